//! `minfer run`: one prompt in, text out as it is made.
//!
//! [`config`] turns flags into one value, [`prompt`] finds the prompt and its tokens, [`stream`] generates,
//! [`report`] writes what is asked for beside the text.

mod config;
mod prompt;
mod report;
mod stream;

use minfer_engine::{EngineError, EngineOptions, Generate, Hyper, Text};
use minfer_runtime::WeightOptions;

use crate::args::RunArgs;
use crate::error::Failure;
use crate::loading::open_engine;
use crate::model::context_size;
use crate::{Context, Outcome, note};
use config::RunConfig;

pub(crate) fn run(args: RunArgs, context: &Context) -> Result<Outcome, Failure> {
    let config = RunConfig::new(args, context)?;
    let devices = config.backends.open(&context.registry, config.threads)?;
    let model = config.model.open()?;
    config.model.announce();
    let loaded = minfer_model::load(&model)?;
    let text = Text::open(&model)?;
    let limit = context_size(config.context, loaded.hyper())?;
    config.check_bias(loaded.hyper().vocab)?;
    let speculation = config.speculation.choose(config::greedy(&config.generate), &*loaded, &model)?;
    let tokens = prompt::tokens(&config.prompt, &text)?;
    check_length(tokens.len(), limit, loaded.hyper())?;
    if config.verbose {
        report::devices(&devices);
        report::speculation(speculation);
    }
    let options = EngineOptions {
        context: Some(limit),
        kv_format: config.kv,
        sync_copies: config.backends.sync_copies,
        require: config.backends.require.clone(),
        reading: config.backends.reading(),
        draft: speculation.depth().is_some(),
        // One answer, of which nothing is taken back.
        checkpoints: 0,
        max_window: speculation.depth().map_or(0, |depth| depth + 1),
        official_rounding: config.official_rounding,
        ..EngineOptions::new(devices)
    };
    let how = config.backends.weights;
    let (mut engine, loading) = open_engine(&model, options, how)?;
    if let Some(dump) = &config.dump_graph {
        dump.write(&engine.placed().graph)?;
    }
    if config.verbose {
        report::placement(&engine, config.kv);
    }
    if config.verbose || how != WeightOptions::default() {
        note(format_args!("{loading}"));
    }
    let generate = Generate { speculate: speculation.for_engine(), ..config.generate };
    let outcome = stream::generate(&mut engine, &text, &tokens, &generate);
    if config.verbose {
        report::counters(&engine);
    }
    outcome
}

fn check_length(prompt: usize, limit: usize, hyper: &Hyper) -> Result<(), EngineError> {
    if prompt <= limit {
        return Ok(());
    }
    Err(EngineError::ContextOverflow { have: 0, add: prompt, limit, model_limit: hyper.context })
}

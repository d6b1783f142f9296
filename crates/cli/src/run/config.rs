//! What `minfer run` was asked to do, as one value. Ranges of sampling options and stop strings are judged by
//! the engine's own rules, before anything is opened.

use std::fs;
use std::path::PathBuf;

use minfer_engine::{EngineError, Generate, KvFormat, Penalties, Sampler, SamplerOptions};
use minfer_graph::Graph;
use minfer_text::StopStrings;

use crate::Context;
use crate::args::{RunArgs, SamplingArgs};
use crate::config::Backends;
use crate::error::Failure;
use crate::model::Source;
use crate::run::prompt::Prompt;
use crate::speculation::{Speculation, check_head_file};

pub(crate) struct RunConfig {
    pub(crate) backends: Backends,
    pub(crate) threads: Option<usize>,
    pub(crate) model: Source,
    pub(crate) prompt: Prompt,
    pub(crate) context: Option<usize>,
    pub(crate) kv: KvFormat,
    /// Complete but for speculation, which depends on the model.
    pub(crate) generate: Generate,
    pub(crate) speculation: Speculation,
    pub(crate) official_rounding: bool,
    pub(crate) dump_graph: Option<Dump>,
    pub(crate) verbose: bool,
}

impl RunConfig {
    pub(crate) fn new(args: RunArgs, context: &Context) -> Result<RunConfig, Failure> {
        let backends = Backends::new(&args.devices, &context.environment, &context.registry)?;
        let generate = Generate {
            max_tokens: args.max_tokens,
            sampler: sampler(&args.sampling)?,
            stop: args.stop,
            ignore_end: args.ignore_eos,
            ..Generate::default()
        };
        StopStrings::new(generate.stop.iter().cloned()).map_err(|e| Failure::Usage(e.to_string()))?;
        if matches!(args.speculate, Speculation::Head { .. }) && !greedy(&generate) {
            return Err(Failure::Usage(EngineError::SpeculationNeedsGreedy.to_string()));
        }
        check_head_file(args.draft_head.is_some(), args.speculate)?;
        Ok(RunConfig {
            backends,
            threads: args.threads,
            model: Source::new(args.model, None, args.draft_head),
            prompt: Prompt { text: args.prompt, raw: args.raw, system: args.system },
            context: args.ctx,
            kv: args.kv.into(),
            generate,
            speculation: args.speculate,
            official_rounding: args.official_rounding,
            dump_graph: args.dump_graph.map(Dump::new).transpose()?,
            verbose: args.verbose,
        })
    }

    /// A bias on a token that the model does not have is a mistake, not something to ignore.
    pub(crate) fn check_bias(&self, vocab: usize) -> Result<(), Failure> {
        match self.generate.sampler.logit_bias.iter().find(|(id, _)| *id as usize >= vocab) {
            Some(&(id, _)) => Err(Failure::BiasOutOfRange { id, vocab }),
            None => Ok(()),
        }
    }
}

/// Whether the likeliest token is always taken.
pub(crate) fn greedy(generate: &Generate) -> bool {
    generate.sampler.temperature == 0.0
}

fn sampler(args: &SamplingArgs) -> Result<SamplerOptions, Failure> {
    let defaults = SamplerOptions::default();
    let options = SamplerOptions {
        temperature: args.temp,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        penalties: Penalties {
            repeat: args.repeat_penalty,
            frequency: args.frequency_penalty,
            presence: args.presence_penalty,
            ..defaults.penalties
        },
        logit_bias: args.logit_bias.clone(),
        seed: args.seed,
        ..defaults
    };
    Sampler::new(&options).map_err(|e| Failure::Usage(e.to_string()))?;
    Ok(options)
}

/// Where the graph goes, and in which form.
pub(crate) struct Dump {
    path: PathBuf,
    json: bool,
}

impl Dump {
    fn new(path: PathBuf) -> Result<Dump, Failure> {
        let json = match path.extension().and_then(|e| e.to_str()) {
            Some("json") => true,
            Some("dot") => false,
            _ => {
                let path = path.display();
                return Err(Failure::Usage(format!("--dump-graph '{path}' must end in .dot or .json")));
            }
        };
        Ok(Dump { path, json })
    }

    pub(crate) fn write(&self, graph: &Graph) -> Result<(), Failure> {
        let text =
            if self.json { serde_json::to_string_pretty(&graph.to_json())? + "\n" } else { graph.to_dot() };
        fs::write(&self.path, text).map_err(|source| Failure::Write { path: self.path.clone(), source })
    }
}

//! `minfer bench`: the speed of prompts and of generation, in every combination asked for.
//!
//! [`config`] turns flags into a list of tests, [`measure`] times one, [`report`] prints results. Tokens are
//! random with a fixed seed: speed does not depend on what they say, except with drafts ([`speculate`]).
//! Weights load once per thread count. [`compare`] measures in pairs with llama.cpp's program ([`peer`],
//! [`bandwidth`]) and prints ratios ([`pairs`]).

mod bandwidth;
mod compare;
mod config;
mod measure;
mod pairs;
mod peer;
mod report;
mod speculate;

use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use minfer_engine::{Checkpoint, Engine, EngineOptions, Text};
use minfer_runtime::Device;

use crate::Context;
use crate::args::BenchArgs;
use crate::error::Failure;
use crate::loading::{Loading, open_engine};
use crate::speculation::Speculation;
use config::{BenchConfig, Phase, Test};
use peer::Peer;
use report::{Report, Row};

pub(crate) use peer::PeerError;

/// Rows of a step in which prompts are processed.
const MAX_ROWS: usize = 512;

pub(crate) fn bench(args: BenchArgs, context: &Context) -> Result<(), Failure> {
    let config = BenchConfig::new(args, context)?;
    // Every pool of threads is opened first, so that a refused backend comes before the model's path.
    let machines = config
        .threads
        .iter()
        .map(|&threads| Ok((threads, config.backends.open(&context.registry, Some(threads))?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    if let Some(comparison) = &config.comparison {
        comparison.check_file()?;
        let model = config.model.open()?;
        let peer = Peer::open(comparison.program.clone(), comparison.file.clone())?;
        return compare::compare(&config, comparison, &peer, machines, &model);
    }
    let model = config.model.open()?;
    config.model.announce();
    let drafting = Drafting::new(&config, &model)?;
    let bar = progress_bar(machines.len() * config.tests.len() * (config.repetitions + 1));
    let mut report = Report::new(config.output, drafting.is_some());
    for (threads, devices) in machines {
        let options = options(&config, drafting.as_ref(), devices);
        let (mut engine, loading) = open_engine(&model, options, config.backends.weights)?;
        bar.suspend(|| crate::note(format_args!("{loading}")));
        let mut report = Loaded { report: &mut report, loading };
        run_tests(&config, drafting.as_ref(), threads, &mut engine, &bar, &mut report)?;
    }
    bar.finish_and_clear();
    report.finish()
}

/// Where rows of tests on one engine go, with how it was loaded.
struct Loaded<'a> {
    report: &'a mut Report,
    loading: Loading,
}

/// What generation with the model's draft head needs.
struct Drafting {
    /// Tokens ahead.
    depth: usize,
    text: Text,
}

impl Drafting {
    /// `None` if drafts are not asked for, or `auto` found no head.
    fn new(config: &BenchConfig, model: &Checkpoint) -> Result<Option<Drafting>, Failure> {
        if config.speculation == Speculation::Off {
            return Ok(None);
        }
        let loaded = minfer_model::load(model)?;
        match config.speculation.choose(true, &*loaded, model)?.depth() {
            Some(depth) => Ok(Some(Drafting { depth, text: Text::open(model)? })),
            None => Ok(None),
        }
    }
}

fn run_tests(
    config: &BenchConfig,
    drafting: Option<&Drafting>,
    threads: usize,
    engine: &mut Engine,
    bar: &ProgressBar,
    loaded: &mut Loaded<'_>,
) -> Result<(), Failure> {
    for test in &config.tests {
        bar.set_message(format!("{} with {threads} threads", test.label()));
        let (repetitions, done) = (config.repetitions, &mut || bar.inc(1));
        let measured = match drafting.filter(|_| test.phase == Phase::Generate) {
            Some(d) => speculate::measure(engine, &d.text, test, d.depth, repetitions, done)?,
            None => measure::measure(engine, test, repetitions, done)?,
        };
        let row = Row::new(config, test, threads, engine, measured, loaded.loading);
        bar.suspend(|| loaded.report.add(row))?;
    }
    Ok(())
}

fn options(
    config: &BenchConfig,
    drafting: Option<&Drafting>,
    devices: Vec<Arc<dyn Device>>,
) -> EngineOptions {
    let batch = config.tests.iter().map(|t| t.batch).max().unwrap_or(1);
    let before = |t: &Test| match drafting {
        Some(_) if t.phase == Phase::Generate => speculate::prompt_len(t),
        _ => t.depth,
    };
    EngineOptions {
        context: config.tests.iter().map(|t| before(t) + t.tokens).max(),
        sequences: batch,
        max_rows: MAX_ROWS.max(batch),
        // A window of drafts begins with the token before them.
        max_outs: batch.max(drafting.map_or(0, |d| d.depth + 1)),
        kv_format: config.kv,
        sync_copies: config.backends.sync_copies,
        require: config.backends.require.clone(),
        reading: config.backends.reading(),
        max_window: drafting.map_or(0, |d| d.depth + 1),
        draft: drafting.is_some(),
        official_rounding: config.official_rounding,
        ..EngineOptions::new(devices)
    }
}

/// Hidden by itself when stderr is not a terminal.
fn progress_bar(runs: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    let bar = ProgressBar::new(runs as u64);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

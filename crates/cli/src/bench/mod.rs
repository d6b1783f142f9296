//! `minfer bench`: the speed of prompts and of generation, in every combination asked for.
//!
//! [`config`] turns flags into a list of tests, [`measure`] times one, [`report`] prints results. Tokens are
//! random with a fixed seed: speed does not depend on what they say. Weights load once per thread count.

mod config;
mod measure;
mod report;

use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use minfer_engine::{Engine, EngineOptions};
use minfer_runtime::Device;

use crate::Context;
use crate::args::BenchArgs;
use crate::error::Failure;
use crate::loading::open_engine;
use config::BenchConfig;
use report::{Report, Row};

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
    let model = config.model.open()?;
    config.model.announce();
    let bar = progress_bar(&config);
    let mut report = Report::new(config.output);
    for (threads, devices) in machines {
        let mut engine = open_engine(&model, options(&config, devices))?;
        run_tests(&config, threads, &mut engine, &bar, &mut report)?;
    }
    bar.finish_and_clear();
    report.finish()
}

fn run_tests(
    config: &BenchConfig,
    threads: usize,
    engine: &mut Engine,
    bar: &ProgressBar,
    report: &mut Report,
) -> Result<(), Failure> {
    for test in &config.tests {
        bar.set_message(format!("{} with {threads} threads", test.label()));
        let samples = measure::measure(engine, test, config.repetitions, &mut || bar.inc(1))?;
        let row = Row::new(config, test, threads, engine, samples);
        bar.suspend(|| report.add(row))?;
    }
    Ok(())
}

fn options(config: &BenchConfig, devices: Vec<Arc<dyn Device>>) -> EngineOptions {
    let batch = config.tests.iter().map(|t| t.batch).max().unwrap_or(1);
    EngineOptions {
        context: config.tests.iter().map(|t| t.depth + t.tokens).max(),
        sequences: batch,
        max_rows: MAX_ROWS.max(batch),
        max_outs: batch,
        kv_format: config.kv,
        sync_copies: config.backends.sync_copies,
        require: config.backends.require.clone(),
        ..EngineOptions::new(devices)
    }
}

/// Hidden by itself when stderr is not a terminal.
fn progress_bar(config: &BenchConfig) -> ProgressBar {
    let runs = config.threads.len() * config.tests.len() * (config.repetitions + 1);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    let bar = ProgressBar::new(runs as u64);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

//! Results: a table that grows line by line, or JSON at the end.

use std::collections::BTreeSet;
use std::io::{Write, stdout};

use minfer_engine::Engine;
use serde::Serialize;

use super::config::{BenchConfig, Phase, Test};
use super::measure::Measured;
use super::speculate::Speculated;
use crate::args::BenchOutput;
use crate::error::Failure;
use crate::loading::Loading;
use crate::{speculation, units, weights};

/// One test's result. The names are the JSON's.
#[derive(Serialize)]
pub(crate) struct Row {
    model: String,
    test: String,
    prompt: usize,
    #[serde(rename = "gen")]
    generate: usize,
    depth: usize,
    batch: usize,
    threads: usize,
    kv: &'static str,
    device: String,
    repetitions: usize,
    /// Mean of the samples.
    tokens_per_second: f64,
    /// Of a sample, with n - 1; 0 for a single one.
    stddev: f64,
    samples: Vec<f64>,
    /// Weights in the encoding of the file.
    model_bytes: u64,
    /// `repacked` or `as in the file`.
    weights: &'static str,
    /// Memory of their own that weights take.
    weight_bytes: u64,
    /// Opening the engine: loading weights above all.
    load_seconds: f64,
    /// Generation only: 1e9 bytes of weights read per second, in the device's layout.
    weight_gbps: Option<f64>,
    /// Generation with the model's draft head only.
    speculate: Option<Drafts>,
    build: String,
    #[serde(skip)]
    label: String,
}

/// How drafts of a repetition fared, first draft first.
#[derive(Serialize)]
struct Drafts {
    /// Tokens ahead.
    depth: usize,
    drafted: Vec<u64>,
    accepted: Vec<u64>,
    #[serde(skip)]
    kept: String,
}

impl Drafts {
    fn new(speculated: Speculated) -> Drafts {
        let Speculated { depth, acceptance } = speculated;
        let kept = speculation::kept(&acceptance);
        Drafts { depth, drafted: acceptance.drafted, accepted: acceptance.accepted, kept }
    }
}

impl Row {
    pub(crate) fn new(
        config: &BenchConfig,
        test: &Test,
        threads: usize,
        engine: &Engine,
        measured: Measured,
        loading: Loading,
    ) -> Row {
        let placed = engine.placed();
        let Measured { samples, speculated } = measured;
        let (mean, stddev) = mean_and_deviation(&samples);
        let (prompt, generate, weight_gbps) = match test.phase {
            Phase::Prompt => (test.tokens, 0, None),
            // With drafts a step makes one token or several, so there is no number.
            Phase::Generate if speculated.is_some() => (0, test.tokens, None),
            Phase::Generate => {
                let read = weights::read_per_step(placed, engine.hyper(), test.batch);
                (0, test.tokens, read.map(|bytes| bytes * mean / test.batch as f64 / 1e9))
            }
        };
        let ahead = speculated.as_ref().map_or_else(String::new, |s| format!(" mtp:{}", s.depth));
        let label = format!("{}{ahead}", test.label());
        Row {
            model: config.model.label(),
            test: test.name(),
            prompt,
            generate,
            depth: test.depth,
            batch: test.batch,
            threads,
            kv: config.kv.name(),
            device: device_names(engine),
            repetitions: config.repetitions,
            tokens_per_second: mean,
            stddev,
            samples,
            model_bytes: weights::encoded(&placed.graph),
            weights: loading.layout(),
            weight_bytes: loading.bytes,
            load_seconds: loading.seconds,
            weight_gbps,
            speculate: speculated.map(Drafts::new),
            build: build(),
            label,
        }
    }

    /// A line of the table; `drafts`: with the column of drafts.
    fn markdown(&self, drafts: bool) -> String {
        let kept = self.speculate.as_ref().map_or("", |d| &d.kept);
        format!(
            "| {} | {} | {} | {} | {} | {} | {:.2} ± {:.2} | {} |{}\n",
            self.model,
            units::bytes(self.model_bytes),
            self.device,
            self.threads,
            self.kv,
            self.label,
            self.tokens_per_second,
            self.stddev,
            self.weight_gbps.map_or_else(String::new, |g| format!("{g:.1}")),
            if drafts { format!(" {kept} |") } else { String::new() },
        )
    }
}

const HEADER: [&str; 2] = [
    "| model | size | device | threads | kv | test | tok/s | weights GB/s |",
    "| ----- | ---: | ------ | ------: | -- | ---: | ----: | -----------: |",
];
/// What drafts add to it.
const DRAFTS_HEADER: [&str; 2] = [" drafts kept |", " ----------- |"];

fn header(drafts: bool) -> String {
    let lines = HEADER.iter().zip(DRAFTS_HEADER);
    lines.map(|(line, more)| format!("{line}{}\n", if drafts { more } else { "" })).collect()
}

/// Every device that the model is on: `cpu`, `cpu+cuda:0`.
pub(super) fn device_names(engine: &Engine) -> String {
    let placed = engine.placed();
    let devices: BTreeSet<_> = placed.splits.iter().map(|s| placed.devices[s.device].id()).collect();
    devices.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
}

/// Says on stderr that the numbers mean little, if they do.
pub(super) fn note_debug_build() {
    if cfg!(debug_assertions) {
        crate::note(format_args!("this is a debug build: measure with a release build"));
    }
}

/// Version, and whether the numbers mean anything.
pub(super) fn build() -> String {
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    format!("minfer {} ({profile})", env!("CARGO_PKG_VERSION"))
}

fn mean_and_deviation(samples: &[f64]) -> (f64, f64) {
    let n = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / n.max(1.0);
    let squares: f64 = samples.iter().map(|x| (x - mean).powi(2)).sum();
    (mean, if samples.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 })
}

/// Where rows go.
pub(crate) struct Report {
    output: BenchOutput,
    /// Whether the table has a column of drafts.
    drafts: bool,
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(output: BenchOutput, drafts: bool) -> Report {
        note_debug_build();
        Report { output, drafts, rows: Vec::new() }
    }

    /// Takes a result. The table starts with the first, so that a model that does not load leaves none.
    pub(crate) fn add(&mut self, row: Row) -> Result<(), Failure> {
        if self.output == BenchOutput::Md {
            let header = if self.rows.is_empty() { header(self.drafts) } else { String::new() };
            print(&format!("{header}{}", row.markdown(self.drafts)))?;
        }
        self.rows.push(row);
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<(), Failure> {
        match self.output {
            BenchOutput::Md => Ok(()),
            BenchOutput::Json => print(&(serde_json::to_string_pretty(&self.rows)? + "\n")),
        }
    }
}

pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics() {
        assert_eq!(mean_and_deviation(&[4.0]), (4.0, 0.0));
        // Sample variance of 2, 4, 6 is 4.
        assert_eq!(mean_and_deviation(&[2.0, 4.0, 6.0]), (4.0, 2.0));
    }
}

//! `--compare`: minfer and llama-bench on the same file in pairs. A shared machine changes its speed from
//! minute to minute, so single figures say little; the ratio within a pair does, and its range over the pairs
//! says how much. The one that begins changes from pair to pair.

use std::sync::Arc;

use indicatif::ProgressBar;
use minfer_engine::{Checkpoint, Engine};
use minfer_runtime::Device;

use super::bandwidth::Probe;
use super::config::{BenchConfig, Comparison, Test};
use super::measure;
use super::pairs::{Pair, Row, Side, Table};
use super::peer::Peer;
use crate::error::Failure;
use crate::loading::open_engine;

/// Runs every test in pairs with each number of threads, on the devices opened for it.
pub(super) fn compare(
    config: &BenchConfig,
    comparison: &Comparison,
    peer: &Peer,
    machines: Vec<(usize, Vec<Arc<dyn Device>>)>,
    model: &Checkpoint,
) -> Result<(), Failure> {
    let runs = machines.len() * config.tests.len() * comparison.pairs * 2;
    let bar = super::progress_bar(runs);
    let probe = Probe::new();
    let mut table = Table::new(config.output);
    for (threads, devices) in machines {
        let options = super::options(config, None, devices);
        let (mut engine, loading) = open_engine(model, options, config.backends.weights)?;
        bar.suspend(|| crate::note(format_args!("{loading}")));
        for test in &config.tests {
            let mut both =
                Both { config, peer, threads, engine: &mut engine, bar: &bar, build: String::new() };
            let pairs = (0..comparison.pairs).map(|i| both.pair(test, i, &probe));
            let pairs = pairs.collect::<Result<Vec<_>, Failure>>()?;
            let build = both.build;
            let row = Row::new(config, test, threads, &engine, pairs, build);
            bar.suspend(|| table.add(row))?;
        }
    }
    bar.finish_and_clear();
    table.finish()
}

/// The two programs with one number of threads.
struct Both<'a> {
    config: &'a BenchConfig,
    peer: &'a Peer,
    threads: usize,
    /// Its threads sleep while the other program runs.
    engine: &'a mut Engine,
    bar: &'a ProgressBar,
    /// What the other program calls itself, known after its first run.
    build: String,
}

impl Both<'_> {
    fn pair(&mut self, test: &Test, index: usize, probe: &Probe) -> Result<Pair, Failure> {
        let bandwidth_gbps = probe.gbps(self.threads).map_err(Failure::Probe)?;
        let first = if index.is_multiple_of(2) { Side::Minfer } else { Side::LlamaCpp };
        let before = self.run(test, first)?;
        let after = self.run(test, first.other())?;
        let (minfer, llama_cpp) = match first {
            Side::Minfer => (before, after),
            Side::LlamaCpp => (after, before),
        };
        Ok(Pair { first, minfer, llama_cpp, ratio: minfer / llama_cpp, bandwidth_gbps })
    }

    /// Tokens per second.
    fn run(&mut self, test: &Test, side: Side) -> Result<f64, Failure> {
        self.bar.set_message(format!("{} with {} threads: {}", test.label(), self.threads, side.name()));
        let speed = match side {
            Side::Minfer => {
                let measured = measure::measure(self.engine, test, 1, &mut || ())?;
                measured.samples.first().copied().unwrap_or(0.0)
            }
            Side::LlamaCpp => {
                let speed = self.peer.measure(test, self.threads, self.config.kv)?;
                self.build = speed.build;
                speed.tokens_per_second
            }
        };
        self.bar.inc(1);
        Ok(speed)
    }
}

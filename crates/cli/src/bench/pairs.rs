//! Pairs of measurements, what they say together, and how that is printed.

use minfer_engine::Engine;
use serde::Serialize;

use super::config::{BenchConfig, Phase, Test};
use super::report::{build, device_names, note_debug_build, print};
use crate::args::BenchOutput;
use crate::error::Failure;
use crate::weights;

/// Which program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Side {
    #[serde(rename = "minfer")]
    Minfer,
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Side::Minfer => "minfer",
            Side::LlamaCpp => "llama.cpp",
        }
    }

    pub(super) fn other(self) -> Side {
        match self {
            Side::Minfer => Side::LlamaCpp,
            Side::LlamaCpp => Side::Minfer,
        }
    }
}

/// One run of each program, one right after the other. The names are the JSON's.
#[derive(Serialize)]
pub(super) struct Pair {
    pub(super) first: Side,
    /// Tokens per second.
    pub(super) minfer: f64,
    /// Tokens per second.
    pub(super) llama_cpp: f64,
    /// minfer's speed divided by llama.cpp's.
    pub(super) ratio: f64,
    /// 1e9 bytes of memory per second that could be read just before.
    pub(super) bandwidth_gbps: f64,
}

/// Median and range.
#[derive(Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(pairs: &[Pair], value: impl Fn(&Pair) -> f64) -> Spread {
        let mut sorted: Vec<f64> = pairs.iter().map(value).collect();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted.len().saturating_sub(1) / 2, sorted.len() / 2);
        let at = |i: usize| sorted.get(i).copied().unwrap_or(0.0);
        Spread { median: (at(low) + at(high)) / 2.0, min: at(0), max: at(sorted.len().saturating_sub(1)) }
    }
}

/// One test's result. The names are the JSON's.
#[derive(Serialize)]
pub(super) struct Row {
    model: String,
    test: String,
    prompt: usize,
    #[serde(rename = "gen")]
    generate: usize,
    depth: usize,
    threads: usize,
    kv: &'static str,
    device: String,
    /// Of minfer's tokens per second divided by llama.cpp's within a pair.
    ratio: Spread,
    minfer_tokens_per_second: Spread,
    llama_cpp_tokens_per_second: Spread,
    bandwidth_gbps: Spread,
    pairs: Vec<Pair>,
    /// Weights in the encoding of the file.
    model_bytes: u64,
    build: String,
    llama_cpp_build: String,
    #[serde(skip)]
    label: String,
}

impl Row {
    pub(super) fn new(
        config: &BenchConfig,
        test: &Test,
        threads: usize,
        engine: &Engine,
        pairs: Vec<Pair>,
        llama_cpp_build: String,
    ) -> Row {
        let (prompt, generate) = match test.phase {
            Phase::Prompt => (test.tokens, 0),
            Phase::Generate => (0, test.tokens),
        };
        Row {
            model: config.model.label(),
            test: test.name(),
            prompt,
            generate,
            depth: test.depth,
            threads,
            kv: config.kv.name(),
            device: device_names(engine),
            ratio: Spread::of(&pairs, |p| p.ratio),
            minfer_tokens_per_second: Spread::of(&pairs, |p| p.minfer),
            llama_cpp_tokens_per_second: Spread::of(&pairs, |p| p.llama_cpp),
            bandwidth_gbps: Spread::of(&pairs, |p| p.bandwidth_gbps),
            pairs,
            model_bytes: weights::encoded(&engine.placed().graph),
            build: build(),
            llama_cpp_build,
            label: test.label(),
        }
    }

    fn markdown(&self) -> String {
        let Spread { median, min, max } = &self.ratio;
        format!(
            "| {} | {} | {} | {:.2} | {:.2} | {median:.3} [{min:.3}..{max:.3}] | {} | {:.1} |\n",
            self.model,
            self.label,
            self.threads,
            self.minfer_tokens_per_second.median,
            self.llama_cpp_tokens_per_second.median,
            self.pairs.len(),
            self.bandwidth_gbps.median,
        )
    }
}

const HEADER: &str = "\
| model | test | threads | minfer tok/s | llama.cpp tok/s | ratio | pairs | memory GB/s |
| ----- | ---: | ------: | -----------: | --------------: | ----: | ----: | ----------: |
";

/// Where rows go: a table that grows line by line, or JSON at the end.
pub(super) struct Table {
    output: BenchOutput,
    rows: Vec<Row>,
}

impl Table {
    pub(super) fn new(output: BenchOutput) -> Table {
        note_debug_build();
        Table { output, rows: Vec::new() }
    }

    /// Takes a result. The table starts with the first, so that a comparison that fails at once leaves none.
    pub(super) fn add(&mut self, row: Row) -> Result<(), Failure> {
        if self.output == BenchOutput::Md {
            let header = if self.rows.is_empty() { HEADER } else { "" };
            print(&format!("{header}{}", row.markdown()))?;
        }
        self.rows.push(row);
        Ok(())
    }

    pub(super) fn finish(self) -> Result<(), Failure> {
        match self.output {
            BenchOutput::Md => Ok(()),
            BenchOutput::Json => print(&(serde_json::to_string_pretty(&self.rows)? + "\n")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratios(ratios: &[f64]) -> Spread {
        let pair = |&ratio: &f64| Pair {
            first: Side::Minfer,
            minfer: 0.0,
            llama_cpp: 0.0,
            ratio,
            bandwidth_gbps: 0.0,
        };
        let pairs: Vec<Pair> = ratios.iter().map(pair).collect();
        Spread::of(&pairs, |p| p.ratio)
    }

    #[test]
    fn medians() {
        assert_eq!(ratios(&[3.0]), Spread { median: 3.0, min: 3.0, max: 3.0 });
        assert_eq!(ratios(&[5.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 5.0 });
        assert_eq!(ratios(&[4.0, 1.0, 2.0, 8.0]), Spread { median: 3.0, min: 1.0, max: 8.0 });
    }
}

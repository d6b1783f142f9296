//! What `minfer bench` was asked to measure, as a list of tests.

use std::path::PathBuf;

use minfer_engine::KvFormat;

use crate::Context;
use crate::args::{BenchArgs, BenchOutput};
use crate::config::Backends;
use crate::error::Failure;
use crate::model::Source;
use crate::speculation::{Speculation, check_head_file};

pub(crate) struct BenchConfig {
    pub(crate) backends: Backends,
    pub(crate) model: Source,
    pub(crate) threads: Vec<usize>,
    pub(crate) tests: Vec<Test>,
    pub(crate) repetitions: usize,
    pub(crate) kv: KvFormat,
    pub(crate) speculation: Speculation,
    pub(crate) official_rounding: bool,
    /// With another program.
    pub(crate) comparison: Option<Comparison>,
    pub(crate) output: BenchOutput,
}

/// What `--compare` asks for.
pub(crate) struct Comparison {
    /// llama-bench: a path, or a name to be found as the shell finds commands.
    pub(crate) program: PathBuf,
    /// The model file, which both programs read.
    pub(crate) file: PathBuf,
    /// Runs of each program.
    pub(crate) pairs: usize,
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Many tokens of a sequence in a step.
    Prompt,
    /// One token of each sequence in a step.
    Generate,
}

/// One line of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    pub(crate) phase: Phase,
    /// Tokens that each sequence gets while the clock runs.
    pub(crate) tokens: usize,
    /// Tokens that each sequence has before.
    pub(crate) depth: usize,
    /// Sequences.
    pub(crate) batch: usize,
}

impl Test {
    /// `pp512` or `tg128`.
    pub(crate) fn name(&self) -> String {
        match self.phase {
            Phase::Prompt => format!("pp{}", self.tokens),
            Phase::Generate => format!("tg{}", self.tokens),
        }
    }

    /// The name with depth and batch: `tg128 @ d4096 x8`.
    pub(crate) fn label(&self) -> String {
        let depth = if self.depth > 0 { format!(" @ d{}", self.depth) } else { String::new() };
        let batch = if self.batch > 1 { format!(" x{}", self.batch) } else { String::new() };
        format!("{}{depth}{batch}", self.name())
    }
}

impl BenchConfig {
    pub(crate) fn new(args: BenchArgs, context: &Context) -> Result<BenchConfig, Failure> {
        let mut backends = Backends::new(&args.devices, &context.environment, &context.registry)?;
        // Weights that are made here lie in no file.
        backends.weights.mmap &= args.shape.is_none();
        let tests = tests(&args);
        if tests.is_empty() {
            return Err(Failure::Usage("nothing to measure: -p and -n are both 0".to_string()));
        }
        let comparison = Comparison::new(&args)?;
        if args.speculate != Speculation::Off && tests.iter().any(|t| t.batch > 1) {
            let why = "--speculate measures one sequence at a time: leave out --batch, or set it to 1";
            return Err(Failure::Usage(why.to_string()));
        }
        check_head_file(args.draft_head.is_some(), args.speculate)?;
        let default = || vec![minfer_cpu::pool::default_threads()];
        Ok(BenchConfig {
            backends,
            model: Source::new(args.model, args.shape, args.draft_head),
            threads: if args.threads.is_empty() { default() } else { args.threads },
            tests,
            repetitions: args.repetitions,
            kv: args.kv.into(),
            speculation: args.speculate,
            official_rounding: args.official_rounding,
            comparison,
            output: args.output,
        })
    }
}

impl Comparison {
    /// `None` without `--compare`; with it, refuses what llama-bench has nothing to set against.
    fn new(args: &BenchArgs) -> Result<Option<Comparison>, Failure> {
        let Some(program) = args.compare.clone() else { return Ok(None) };
        let refused = |why: &str| Err(Failure::Usage(format!("--compare {why}")));
        let Some(file) = args.model.clone() else {
            return refused(match args.shape {
                Some(_) => {
                    "needs a model that llama-bench can read too: name a GGUF file with -m, not a --shape"
                }
                None => {
                    "needs a model that llama-bench can read too: name a GGUF file with -m (the built-in model's is \
                     models/minfer-nano-Q8_0.gguf in the source)"
                }
            });
        };
        if args.batch.iter().any(|&b| b != 1) {
            return refused("measures one sequence at a time: leave out --batch, or set it to 1");
        }
        if args.speculate != Speculation::Off {
            return refused("measures without drafts: leave out --speculate");
        }
        if args.draft_head.is_some() {
            return refused("measures without a draft head: leave out --draft-head");
        }
        if args.official_rounding {
            return refused(
                "measures without --official-rounding, which llama.cpp does not have: leave it out",
            );
        }
        Ok(Some(Comparison { program, file, pairs: args.pairs }))
    }

    /// Refuses a directory, which llama-bench cannot read.
    pub(crate) fn check_file(&self) -> Result<(), Failure> {
        match self.file.is_dir() {
            true => Err(Failure::Usage(format!(
                "--compare needs a GGUF file, which llama-bench can read too, but {} is a directory",
                self.file.display()
            ))),
            false => Ok(()),
        }
    }
}

fn tests(args: &BenchArgs) -> Vec<Test> {
    let mut tests = Vec::new();
    for &depth in &args.depth {
        for &batch in &args.batch {
            let test = |phase, tokens: &usize| Test { phase, tokens: *tokens, depth, batch };
            tests.extend(args.prompt.iter().map(|n| test(Phase::Prompt, n)));
            tests.extend(args.generate.iter().map(|n| test(Phase::Generate, n)));
        }
    }
    tests.retain(|t| t.tokens > 0);
    tests
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, Command};

    fn labels(flags: &str) -> Vec<String> {
        let args = ["minfer", "bench"].into_iter().chain(flags.split_whitespace());
        let Command::Bench(args) = Args::try_parse_from(args).unwrap().command else { panic!() };
        tests(&args).iter().map(Test::label).collect()
    }

    #[test]
    fn every_combination() {
        assert_eq!(labels(""), ["pp512", "tg128"]);
        assert_eq!(labels("-p 0 -n 16"), ["tg16"]);
        assert_eq!(labels("-p 0 -n 0"), [""; 0]);
        let all = labels("-p 8 -n 4 -d 0,64 -b 1,8");
        let expected =
            ["pp8", "tg4", "pp8 x8", "tg4 x8", "pp8 @ d64", "tg4 @ d64", "pp8 @ d64 x8", "tg4 @ d64 x8"];
        assert_eq!(all, expected);
    }
}

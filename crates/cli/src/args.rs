//! What can be typed: every flag, its help and its form. What flags *mean* is decided by each command's
//! configuration; ranges that the engine knows are left to the engine.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use minfer_engine::KvFormat;
use minfer_runtime::WeightOptions;

use crate::speculation::Speculation;

const EXAMPLES: &str = "\
Examples:
  minfer run \"What is 27 + 58?\"                    ask the built-in model
  minfer run -m model.gguf < question.txt          ask a model from a file
  minfer info model.gguf                           what a model is and what it needs
  minfer bench --shape qwen3-0.6b:q4_0             measure a model before downloading it
  minfer backends                                  what this build and this machine can use";

/// Run open-weight language models on your own machine.
#[derive(Parser)]
#[command(name = "minfer", version, after_help = EXAMPLES, arg_required_else_help = true, max_term_width = 100)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Info(InfoArgs),
    Backends(BackendsArgs),
    Bench(BenchArgs),
}

/// Flags of every command that runs a model.
#[derive(ClapArgs, Default)]
#[command(next_help_heading = "Devices")]
pub(crate) struct DeviceArgs {
    /// Use only these backends (cpu, metal, cuda, vulkan; cuda:1 for one device); the CPU is always allowed.
    /// Repeatable, comma lists. Default: MINFER_BACKENDS, else everything that is there
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Vec<String>,
    /// Fail if any part of the model lands on a device of another kind. Repeatable, comma lists
    #[arg(long, value_name = "NAME")]
    pub(crate) require_device: Vec<String>,
    /// Copy between devices with waiting, for comparison (also MINFER_SYNC_COPIES=1)
    #[arg(long)]
    pub(crate) sync_copies: bool,
    /// Read weights into memory instead of mapping their files
    #[arg(long)]
    pub(crate) no_mmap: bool,
    /// Keep the weights in memory: the system may neither swap them out nor drop them
    #[arg(long)]
    pub(crate) mlock: bool,
    /// Leave weights on the CPU as they are in the file and bring them into the kernels' layout for every product:
    /// loads at once and takes little memory of its own, but is slower. Results stay the same, bit for bit
    #[arg(long)]
    pub(crate) no_repack: bool,
}

impl DeviceArgs {
    pub(crate) fn weights(&self) -> WeightOptions {
        WeightOptions { mmap: !self.no_mmap, lock: self.mlock, repack: !self.no_repack }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kv {
    F32,
    F16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl From<Kv> for KvFormat {
    fn from(kv: Kv) -> KvFormat {
        match kv {
            Kv::F32 => KvFormat::F32,
            Kv::F16 => KvFormat::F16,
            Kv::Q8_0 => KvFormat::Q8_0,
        }
    }
}

const RUN_EXAMPLES: &str = "\
Text goes to stdout as it is made, everything else to stderr. Ctrl-C stops after the current
token (exit code 130), a second Ctrl-C at once.

Examples:
  minfer run \"Write this as a JSON list of strings: yellow, boastful, woman\"
  minfer run -m model.gguf --system \"Answer in one word.\" \"What is the capital of France?\"
  minfer run -m model.gguf --raw -n 100 \"Once upon a time\"
  minfer run -m hf-directory --temp 0.7 --seed 42 < question.txt";

/// Answer one prompt, or continue a text (--raw)
#[derive(ClapArgs)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// GGUF file or Hugging Face directory; the built-in model if absent
    #[arg(short, long)]
    pub(crate) model: Option<PathBuf>,
    /// The prompt; read from stdin if absent (one newline at its end is dropped)
    pub(crate) prompt: Option<String>,
    /// Continue the prompt as it stands, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Most tokens to generate; default: until the model ends or the context is full
    #[arg(short = 'n', long, value_name = "N", value_parser = positive)]
    pub(crate) max_tokens: Option<usize>,
    /// Context size in tokens, prompt and answer together; default: the model's, at most 4096
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) ctx: Option<usize>,
    /// End before this text. Repeatable
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Go on when the model ends its answer
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Format of the cached keys and values
    #[arg(long, value_enum, default_value_t = Kv::F16)]
    pub(crate) kv: Kv,
    /// Threads; default: one per physical core
    #[arg(short, long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// Draft tokens ahead with the model's own draft head, and verify them together: off, auto (where the
    /// model has one and decoding is greedy) or mtp[:DEPTH]. The text stays the same
    #[arg(long, value_name = "HOW", default_value = "off", value_parser = Speculation::parse)]
    pub(crate) speculate: Speculation,
    /// Safetensors file with the draft head of the model, a Hugging Face directory, where the two come apart
    #[arg(long, value_name = "FILE", requires = "model")]
    pub(crate) draft_head: Option<PathBuf>,
    /// deepseek_v4 only: pass cached rows through FP8, and what chooses among them through FP4, as DeepSeek's own
    /// graph does. The weights were trained with this rounding; without it the numbers are those of transformers
    #[arg(long)]
    pub(crate) official_rounding: bool,
    /// Write the placed graph of one step to FILE.dot or FILE.json
    #[arg(long, value_name = "FILE")]
    pub(crate) dump_graph: Option<PathBuf>,
    /// Print devices, memory, placement and counters to stderr
    #[arg(long)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
}

/// How tokens are chosen.
#[derive(ClapArgs)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) temp: f32,
    /// Choose among this many likeliest tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 40)]
    pub(crate) top_k: usize,
    /// Choose among the likeliest tokens whose probabilities reach this sum; 1: all
    #[arg(long, value_name = "P", default_value_t = 0.95, allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Leave out tokens less likely than this share of the likeliest; 0: none
    #[arg(long, value_name = "P", default_value_t = 0.05, allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Divide the logits of the last 64 tokens by this; 1: off
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) repeat_penalty: f32,
    /// Subtract this for each occurrence among the last 64 tokens
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,
    /// Subtract this once if a token is among the last 64
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,
    /// Add BIAS to the logit of token ID (-inf: never). Repeatable
    #[arg(long, value_name = "ID=BIAS", value_parser = bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Seed of the random choices
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Describe a model: sizes, tensors, tokenizer, memory
#[derive(ClapArgs)]
pub(crate) struct InfoArgs {
    /// GGUF file or Hugging Face directory; the built-in model if absent
    pub(crate) model: Option<PathBuf>,
    /// A well-known shape with a type instead of a file, such as qwen3-0.6b:q4_0
    #[arg(long, value_name = "NAME:TYPE", conflicts_with = "model")]
    pub(crate) shape: Option<String>,
    /// Safetensors file with the draft head of the model, a Hugging Face directory, where the two come apart
    #[arg(long, value_name = "FILE", requires = "model")]
    pub(crate) draft_head: Option<PathBuf>,
    /// Tokens for which the sizes of state are told; default: the model's context, at most 4096
    #[arg(long, visible_alias = "ctx", value_name = "N", value_parser = positive)]
    pub(crate) context: Option<usize>,
    /// List every tensor
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// List backends: what is compiled in, what is available and why not
#[derive(ClapArgs)]
pub(crate) struct BackendsArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchOutput {
    Md,
    Json,
}

const BENCH_EXAMPLES: &str = "\
ppN: processing a prompt of N tokens; tgN: generating N tokens; @ dN: behind N tokens of context;
xN: N sequences at once, all their tokens counted. Lists are measured in every combination.
--compare: the two programs run in turn, and the ratio is minfer's speed divided by llama.cpp's
within a pair of runs: the median and the range over all pairs.

Examples:
  minfer bench -m model.gguf
  minfer bench --shape qwen3-0.6b:q4_0 -p 0 -t 1,2,4
  minfer bench -m model.gguf -p 512 -n 64 -d 0,4096 -b 1,8 -o json
  minfer bench -m model.gguf --compare llama.cpp/build/bin/llama-bench --pairs 9";

/// Measure the speed of a model
#[derive(ClapArgs)]
#[command(after_help = BENCH_EXAMPLES)]
pub(crate) struct BenchArgs {
    /// GGUF file or Hugging Face directory; the built-in model if absent
    #[arg(short, long)]
    pub(crate) model: Option<PathBuf>,
    /// A well-known shape with a type, filled with random weights, such as qwen3-0.6b:q4_0
    #[arg(long, value_name = "NAME:TYPE", conflicts_with = "model")]
    pub(crate) shape: Option<String>,
    /// Prompt lengths in tokens; 0: do not measure prompts
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', default_value = "512", value_parser = count)]
    pub(crate) prompt: Vec<usize>,
    /// Generated tokens; 0: do not measure generation
    #[arg(short = 'n', long = "gen", value_name = "N,...", value_delimiter = ',', default_value = "128", value_parser = count)]
    pub(crate) generate: Vec<usize>,
    /// Tokens in the context before the measurement starts
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', default_value = "0", value_parser = count)]
    pub(crate) depth: Vec<usize>,
    /// Sequences at once
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', default_value = "1", value_parser = positive)]
    pub(crate) batch: Vec<usize>,
    /// Threads; default: one per physical core
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', value_parser = threads)]
    pub(crate) threads: Vec<usize>,
    /// Measurements of each test, after one warm-up
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = positive)]
    pub(crate) repetitions: usize,
    /// Format of the cached keys and values
    #[arg(long, value_enum, default_value_t = Kv::F16)]
    pub(crate) kv: Kv,
    /// Generate with the model's draft head: off, auto or mtp[:DEPTH], as in run. Only with one sequence (-b 1)
    #[arg(long, value_name = "HOW", default_value = "off", value_parser = Speculation::parse)]
    pub(crate) speculate: Speculation,
    /// Safetensors file with the draft head of the model, a Hugging Face directory, where the two come apart
    #[arg(long, value_name = "FILE", requires = "model")]
    pub(crate) draft_head: Option<PathBuf>,
    /// deepseek_v4 only: round cached rows as DeepSeek's own graph does, as in run, to see what it costs
    #[arg(long)]
    pub(crate) official_rounding: bool,
    /// Measure llama.cpp's llama-bench at PATH on the same GGUF file in turn with minfer, and print ratios
    #[arg(long, value_name = "PATH", conflicts_with = "repetitions")]
    pub(crate) compare: Option<PathBuf>,
    /// Pairs of runs of each test with --compare, at most 99
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = pairs, requires = "compare")]
    pub(crate) pairs: usize,
    /// Form of the results
    #[arg(short, long, value_enum, default_value_t = BenchOutput::Md)]
    pub(crate) output: BenchOutput,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
}

/// Counts of tokens beyond this are typing mistakes; sums of a few of them cannot overflow.
const MOST: usize = 1 << 40;

fn count(text: &str) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(n) if n <= MOST => Ok(n),
        Ok(_) => Err("is too large".to_string()),
        Err(_) => Err("must be a whole number".to_string()),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match count(text)? {
        0 => Err("must be at least 1".to_string()),
        n => Ok(n),
    }
}

fn pairs(text: &str) -> Result<usize, String> {
    match count(text)? {
        n @ 1..=99 => Ok(n),
        _ => Err("must be between 1 and 99".to_string()),
    }
}

fn threads(text: &str) -> Result<usize, String> {
    match count(text)? {
        n @ 1..=1024 => Ok(n),
        _ => Err("must be between 1 and 1024".to_string()),
    }
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || "must be a token id and a number, as in 42=-1.5".to_string();
    let (id, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((id.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use minfer_engine::SamplerOptions;

    use super::*;

    #[test]
    fn flags_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn defaults_are_those_of_the_engine() {
        let Command::Run(run) = Args::try_parse_from(["minfer", "run"]).unwrap().command else { panic!() };
        let (typed, engine) = (run.sampling, SamplerOptions::default());
        assert_eq!(typed.temp, engine.temperature);
        assert_eq!((typed.top_k, typed.top_p, typed.min_p), (engine.top_k, engine.top_p, engine.min_p));
        assert_eq!((typed.repeat_penalty, engine.penalties.window), (engine.penalties.repeat, 64));
        assert_eq!(typed.frequency_penalty, engine.penalties.frequency);
        assert_eq!(typed.presence_penalty, engine.penalties.presence);
        assert_eq!(typed.seed, engine.seed);
    }

    #[test]
    fn numbers() {
        assert_eq!(positive("3"), Ok(3));
        assert_eq!(positive("0"), Err("must be at least 1".to_string()));
        assert_eq!(threads("1025"), Err("must be between 1 and 1024".to_string()));
        assert_eq!(bias("7=-inf"), Ok((7, f32::NEG_INFINITY)));
        assert!(bias("7").is_err() && bias("x=1").is_err() && bias("-1=1").is_err());
        assert!(count("99999999999999999999").is_err());
    }
}

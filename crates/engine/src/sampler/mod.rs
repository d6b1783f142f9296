//! Choosing a token from logits: a pipeline of named stages, then a draw.
//!
//! In: the logits of one row and the tokens before it. Out: one token id. The order of stages is data
//! ([`SamplerOptions::stages`]); each is a function on a list of candidates. A temperature of 0 is greedy:
//! the most likely token, the lowest id among equals, after bias and penalties.

mod stages;

use rand_core::{RngCore, SeedableRng};
use rand_pcg::Pcg64;

use crate::error::EngineError;
use stages::Candidates;

/// Penalties on tokens that occurred before.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Penalties {
    /// How many of the last tokens count; 0: none.
    pub window: usize,
    /// Logits of such tokens are divided (if positive) or multiplied by this (Keskar et al. 2019); 1: off.
    pub repeat: f32,
    /// Subtracted for each occurrence.
    pub frequency: f32,
    /// Subtracted once.
    pub presence: f32,
}

/// A step of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    LogitBias,
    Penalties,
    TopK,
    TopP,
    MinP,
    Temperature,
}

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct SamplerOptions {
    /// 0: greedy.
    pub temperature: f32,
    /// Keep this many candidates; 0: all.
    pub top_k: usize,
    /// Keep the likeliest candidates whose probabilities sum to this (Holtzman et al. 2020); 1: all.
    pub top_p: f32,
    /// Keep candidates at least this likely relative to the likeliest (Nguyen et al. 2024); 0: all.
    pub min_p: f32,
    pub penalties: Penalties,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws (PCG64).
    pub seed: u64,
    /// The pipeline, in order.
    pub stages: Vec<Stage>,
}

impl Default for SamplerOptions {
    fn default() -> SamplerOptions {
        SamplerOptions {
            temperature: 0.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            penalties: Penalties { window: 64, repeat: 1.0, frequency: 0.0, presence: 0.0 },
            logit_bias: Vec::new(),
            seed: 0,
            stages: vec![
                Stage::LogitBias,
                Stage::Penalties,
                Stage::TopK,
                Stage::TopP,
                Stage::MinP,
                Stage::Temperature,
            ],
        }
    }
}

impl SamplerOptions {
    fn check(&self) -> Result<(), EngineError> {
        let p = &self.penalties;
        let rules = [
            ("the temperature", self.temperature, self.temperature >= 0.0, "a number from 0 up"),
            ("top-p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "above 0 and at most 1"),
            ("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "between 0 and 1"),
            ("the repetition penalty", p.repeat, p.repeat > 0.0, "above 0"),
            ("the frequency penalty", p.frequency, true, "a number"),
            ("the presence penalty", p.presence, true, "a number"),
        ];
        for (what, value, good, allowed) in rules {
            if !(value.is_finite() && good) {
                return Err(EngineError::BadOption { what, value: value.to_string(), allowed });
            }
        }
        match self.logit_bias.iter().find(|(_, b)| b.is_nan()) {
            Some((id, _)) => Err(EngineError::BadOption {
                what: "a logit bias",
                value: format!("NaN for token {id}"),
                allowed: "a number",
            }),
            None => Ok(()),
        }
    }
}

/// A pipeline with the state of its random generator.
pub struct Sampler {
    options: SamplerOptions,
    rng: Pcg64,
}

impl Sampler {
    /// # Errors
    /// [`EngineError::BadOption`] for a value outside its range.
    pub fn new(options: &SamplerOptions) -> Result<Sampler, EngineError> {
        options.check()?;
        Ok(Sampler { options: options.clone(), rng: Pcg64::seed_from_u64(options.seed) })
    }

    /// Chooses from the logits of one row; `history` are the tokens before. `None` when no logit is a number.
    pub fn sample(&mut self, mut logits: Vec<f32>, history: &[u32]) -> Option<u32> {
        let o = &self.options;
        if o.temperature == 0.0 {
            for stage in &o.stages {
                match stage {
                    Stage::LogitBias => stages::logit_bias(&mut logits, &o.logit_bias),
                    Stage::Penalties => stages::penalties(&mut logits, &o.penalties, history),
                    _ => {}
                }
            }
            return stages::greedy(&logits);
        }
        let mut candidates = Candidates::new(logits);
        for stage in &o.stages {
            match stage {
                Stage::LogitBias => candidates.on_logits(|l| stages::logit_bias(l, &o.logit_bias)),
                Stage::Penalties => candidates.on_logits(|l| stages::penalties(l, &o.penalties, history)),
                Stage::TopK => candidates.top_k(o.top_k),
                Stage::TopP => candidates.top_p(o.top_p),
                Stage::MinP => candidates.min_p(o.min_p),
                Stage::Temperature => candidates.temperature(o.temperature),
            }
        }
        candidates.draw(self.uniform())
    }

    /// A number in [0, 1) with 53 random bits.
    fn uniform(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

//! Timing generation with the model's draft head. Which drafts are kept depends on the text, so the model
//! continues a fixed prompt greedily here instead of being fed random tokens.

use minfer_engine::{Acceptance, Engine, EngineError, Generate, Speculate, Text};

use super::config::Test;
use super::measure::{Measured, Tokens};

/// Fewest tokens of the prompt: after one or two, a text says little about others.
const SHORTEST_PROMPT: usize = 16;

/// Random tokens that the text begins with, in the place of the test's depth.
pub(crate) fn prompt_len(test: &Test) -> usize {
    test.depth.max(SHORTEST_PROMPT)
}

/// How generation with drafts went.
pub(crate) struct Speculated {
    /// Tokens ahead.
    pub(crate) depth: usize,
    /// Of one repetition; all make the same text.
    pub(crate) acceptance: Acceptance,
}

/// As [`super::measure::measure`], for the generation of one sequence with drafts of `depth` tokens.
pub(crate) fn measure(
    engine: &mut Engine,
    text: &Text,
    test: &Test,
    depth: usize,
    repetitions: usize,
    done: &mut dyn FnMut(),
) -> Result<Measured, EngineError> {
    let prompt = Tokens::new(engine.hyper().vocab).take(prompt_len(test));
    let options = Generate {
        // The first token comes out of the prompt and is not timed.
        max_tokens: Some(test.tokens + 1),
        ignore_end: true,
        speculate: Speculate::Head { depth },
        ..Generate::default()
    };
    let (mut samples, mut acceptance) = (Vec::with_capacity(repetitions), Acceptance::default());
    for repetition in 0..=repetitions {
        let mut session = engine.session();
        let mut generation = session.generate(text, &prompt, &options)?;
        while generation.next_piece()?.is_some() {}
        // The first is the warm-up.
        if repetition > 0 {
            samples.push(generation.timings().generation_speed());
            acceptance = generation.acceptance().cloned().unwrap_or_default();
        }
        done();
    }
    Ok(Measured { samples, speculated: Some(Speculated { depth, acceptance }) })
}

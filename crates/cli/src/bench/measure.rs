//! Timing one test on an open engine.

use std::collections::VecDeque;
use std::time::Instant;

use minfer_engine::{Chunk, Engine, EngineError, Outs, SequenceId};

use super::config::{Phase, Test};
use super::speculate::Speculated;

/// Steps of the generation's warm-up: every weight has been read and every plan been built after one.
const WARM_UP_STEPS: usize = 8;

/// What a test gave.
pub(crate) struct Measured {
    /// Tokens per second of each repetition, all sequences together.
    pub(crate) samples: Vec<f64>,
    /// For generation with drafts.
    pub(crate) speculated: Option<Speculated>,
}

/// Times each repetition after a warm-up that does not count.
/// `done` is called after each, warm-up included.
pub(crate) fn measure(
    engine: &mut Engine,
    test: &Test,
    repetitions: usize,
    done: &mut dyn FnMut(),
) -> Result<Measured, EngineError> {
    let mut tokens = Tokens::new(engine.hyper().vocab);
    let ids: Vec<SequenceId> = (0..test.batch).map(|_| engine.new_sequence()).collect();
    if test.depth > 0 {
        extend(engine, &ids, test.depth, &mut tokens)?;
    }
    let warm_up = match test.phase {
        Phase::Prompt => test.tokens,
        Phase::Generate => test.tokens.min(WARM_UP_STEPS),
    };
    run(engine, &ids, &Test { tokens: warm_up, ..*test }, &mut tokens)?;
    rewind(engine, &ids, test.depth, &mut tokens)?;
    done();
    let mut samples = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let started = Instant::now();
        run(engine, &ids, test, &mut tokens)?;
        let seconds = started.elapsed().as_secs_f64().max(1e-9);
        samples.push((test.tokens * test.batch) as f64 / seconds);
        rewind(engine, &ids, test.depth, &mut tokens)?;
        done();
    }
    ids.iter().try_for_each(|&id| engine.release(id))?;
    Ok(Measured { samples, speculated: None })
}

/// Back to `depth`; a model with recurrent state may have to come from an earlier checkpoint.
fn rewind(
    engine: &mut Engine,
    ids: &[SequenceId],
    depth: usize,
    tokens: &mut Tokens,
) -> Result<(), EngineError> {
    for id in ids {
        let kept = engine.truncate(*id, depth)?;
        if kept < depth {
            extend(engine, &[*id], depth - kept, tokens)?;
        }
    }
    Ok(())
}

fn run(engine: &mut Engine, ids: &[SequenceId], test: &Test, tokens: &mut Tokens) -> Result<(), EngineError> {
    rewind(engine, ids, test.depth, tokens)?;
    match test.phase {
        Phase::Prompt => extend(engine, ids, test.tokens, tokens),
        Phase::Generate => (0..test.tokens).try_for_each(|_| extend(engine, ids, 1, tokens)),
    }
}

/// Gives each sequence `count` more tokens, in steps as large as the engine takes. As in a real prompt, the
/// logits of each sequence's last token are computed.
fn extend(
    engine: &mut Engine,
    ids: &[SequenceId],
    count: usize,
    tokens: &mut Tokens,
) -> Result<(), EngineError> {
    let mut waiting: VecDeque<(SequenceId, usize)> = ids.iter().map(|&id| (id, count)).collect();
    while !waiting.is_empty() {
        let mut room = engine.max_rows();
        let mut parts: Vec<(SequenceId, Vec<u32>, Outs)> = Vec::new();
        while let Some((id, left)) = waiting.front_mut().filter(|_| room > 0) {
            let rows = room.min(*left);
            room -= rows;
            *left -= rows;
            let outs = if *left == 0 { Outs::Last } else { Outs::None };
            parts.push((*id, tokens.take(rows), outs));
            if *left == 0 {
                waiting.pop_front();
            }
        }
        let chunks: Vec<Chunk<'_>> = parts
            .iter()
            .map(|(sequence, tokens, outs)| Chunk { sequence: *sequence, tokens, outs: *outs, window: false })
            .collect();
        engine.step(&chunks)?;
    }
    Ok(())
}

/// Random token ids: SplitMix64 (Steele, Lea and Flood 2014), the same in every run.
pub(crate) struct Tokens {
    state: u64,
    vocab: u64,
}

impl Tokens {
    /// Ids below `vocab`.
    pub(crate) fn new(vocab: usize) -> Tokens {
        Tokens { state: 42, vocab: vocab as u64 }
    }

    pub(crate) fn take(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| (self.next() % self.vocab.max(1)) as u32).collect()
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_in_range_and_repeatable() {
        let take = || Tokens::new(100).take(1000);
        assert_eq!(take(), take());
        assert!(take().iter().all(|&t| t < 100));
        assert!(take().iter().any(|&t| t > 90) && take().iter().any(|&t| t < 10));
    }
}

//! Greedy speculation with a model's own draft head: draft a few tokens, verify them in one step, keep the
//! prefix that the model would have chosen itself.
//!
//! Since a row's logits do not depend on the rows beside it, the kept tokens are exactly those of plain
//! decoding. The head needs its own keys and values of every position; they are filled from the model's
//! streams as soon as the token after a position is known.

use crate::draft::DraftRows;
use crate::engine::{Chunk, Engine, Outs};
use crate::error::EngineError;
use crate::sequence::SequenceId;

/// Whether and how far to speculate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculate {
    /// One token at a time.
    #[default]
    Off,
    /// With the model's draft head, this many tokens ahead.
    Head {
        /// 1 to [`Speculate::MAX_DEPTH`].
        depth: usize,
    },
}

impl Speculate {
    /// Longest chain of drafts.
    pub const MAX_DEPTH: usize = 7;
}

/// How many drafts were made and kept at each depth, first draft first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Acceptance {
    pub drafted: Vec<u64>,
    pub accepted: Vec<u64>,
}

impl Acceptance {
    fn count(&mut self, drafted: usize, accepted: usize) {
        for (counts, n) in [(&mut self.drafted, drafted), (&mut self.accepted, accepted)] {
            counts.resize(counts.len().max(drafted), 0);
            counts[..n].iter_mut().for_each(|c| *c += 1);
        }
    }
}

/// Picks the next token from a row of logits, given the tokens before it; `None` if no logit is a number.
pub(crate) type Choose<'a> = &'a mut dyn FnMut(&[f32], &[u32]) -> Option<u32>;

/// What a round of speculation brought.
pub(crate) struct Round {
    /// Accepted drafts, now in the cache behind the token that the round began with.
    pub(crate) accepted: Vec<u32>,
    /// The token that comes next and is not in the cache; `None` if an accepted draft ended the text.
    pub(crate) next: Option<u32>,
}

/// Speculation on one sequence.
pub(crate) struct Speculator {
    depth: usize,
    /// Streams of the last positions of the sequence, whose row of the head is still to run: `from..len`.
    streams: Vec<f32>,
    from: usize,
    pub(crate) acceptance: Acceptance,
}

impl Speculator {
    /// For a sequence that is empty so far.
    pub(crate) fn new(depth: usize) -> Speculator {
        Speculator { depth, streams: Vec::new(), from: 0, acceptance: Acceptance::default() }
    }

    /// After a step that appended tokens: runs the head on every row whose next token is known.
    pub(crate) fn follow(&mut self, engine: &mut Engine, id: SequenceId) -> Result<(), EngineError> {
        if engine.draft_block() > 1 {
            // The model itself writes what a block reads.
            return Ok(());
        }
        self.streams.extend_from_slice(engine.streams());
        let tokens = engine.tokens(id)?;
        let known = tokens.len().saturating_sub(self.from + 1);
        let next: Vec<u32> = tokens[self.from + 1..].to_vec();
        let width = engine.draft_width();
        let (mut done, max) = (0, engine.max_rows());
        while done < known {
            let count = (known - done).min(max);
            let rows = DraftRows {
                start: self.from + done,
                next: &next[done..done + count],
                streams: &self.streams[done * width..(done + count) * width],
            };
            engine.draft_chain(id, rows, false)?;
            done += count;
        }
        self.streams.drain(..known * width);
        self.from += known;
        Ok(())
    }

    /// One round: `token` was chosen and is not in the cache. `ends` says whether a token ends the text; at
    /// most `limit` drafts are made.
    pub(crate) fn round(
        &mut self,
        engine: &mut Engine,
        id: SequenceId,
        token: u32,
        limit: usize,
        choose: Choose<'_>,
        ends: &dyn Fn(u32) -> bool,
    ) -> Result<Round, EngineError> {
        let len = engine.tokens(id)?.len();
        let room = engine.context().saturating_sub(len + 1);
        let depth = self.depth.min(limit).min(room);
        let drafts = match engine.draft_block() {
            1 => self.draft(engine, id, token, depth)?,
            // A block has one size, and the context may end before.
            size if depth == 0 || room + 1 < size => Vec::new(),
            _ => engine.draft_at_once(id, token, depth, &best)?,
        };
        let window: Vec<u32> = [token].into_iter().chain(drafts.iter().copied()).collect();
        let chunk = Chunk { sequence: id, tokens: &window, outs: Outs::All, window: true };
        let logits = engine.step(&[chunk])?;
        let rows: Vec<Vec<f32>> = (0..logits.len()).map(|i| logits.row(i).to_vec()).collect();
        let mut kept = 1;
        let mut next = None;
        let history = engine.tokens(id)?[..len + window.len()].to_vec();
        for (i, row) in rows.iter().enumerate() {
            if i > 0 && ends(window[i]) {
                break;
            }
            let chosen = choose(row, &history[..len + i + 1]);
            let chosen = chosen.ok_or(EngineError::NotANumber { position: len + i + 1 })?;
            if drafts.get(i) == Some(&chosen) {
                kept += 1;
            } else {
                next = Some(chosen);
                break;
            }
        }
        engine.commit(id, kept)?;
        self.acceptance.count(drafts.len(), kept - 1);
        let width = engine.draft_width();
        self.streams = engine.streams()[..kept * width].to_vec();
        self.from = len;
        Ok(Round { accepted: window[1..kept].to_vec(), next })
    }

    /// Drafts after `token`, and the head's rows up to it.
    fn draft(
        &mut self,
        engine: &mut Engine,
        id: SequenceId,
        token: u32,
        depth: usize,
    ) -> Result<Vec<u32>, EngineError> {
        let tokens = engine.tokens(id)?;
        let len = tokens.len();
        let next: Vec<u32> = tokens[self.from + 1..].iter().copied().chain([token]).collect();
        let rows = DraftRows { start: self.from, next: &next, streams: &self.streams };
        let mut drafted = engine.draft_chain(id, rows, true)?;
        let mut drafts = Vec::new();
        for ahead in 0..depth {
            let Some(draft) = best(&drafted.logits) else { break };
            drafts.push(draft);
            if ahead + 1 < depth {
                let stream = std::mem::take(&mut drafted.stream);
                let rows = DraftRows { start: len + ahead, next: &[draft], streams: &stream };
                drafted = engine.draft_chain(id, rows, true)?;
            }
        }
        Ok(drafts)
    }
}

/// Index of the largest number, the lowest among equals.
fn best(logits: &[f32]) -> Option<u32> {
    let numbers = logits.iter().enumerate().filter(|(_, x)| !x.is_nan());
    numbers.reduce(|a, b| if b.1 > a.1 { b } else { a }).map(|(i, _)| i as u32)
}

//! A session: one sequence of an engine, with the operations that a single user needs.

use crate::engine::{Chunk, Engine, Outs};
use crate::error::EngineError;
use crate::generate::{Generate, Generation};
use crate::sequence::SequenceId;
use crate::speculate::Speculator;
use crate::text::Text;

/// One sequence. Dropping the session releases it.
pub struct Session<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) id: SequenceId,
}

impl<'a> Session<'a> {
    pub(crate) fn new(engine: &'a mut Engine, id: SequenceId) -> Session<'a> {
        Session { engine, id }
    }

    /// The tokens whose keys and values are in the cache.
    pub fn tokens(&self) -> &[u32] {
        self.engine.tokens(self.id).unwrap_or_default()
    }

    /// Appends tokens, in chunks of the engine's step size, and returns the logits after the last one.
    /// `keep_going` is asked between chunks; if it says no, the tokens so far stay and no logits come back.
    ///
    /// # Errors
    /// A prompt that does not fit the context is refused before any of it is computed.
    pub fn append(
        &mut self,
        tokens: &[u32],
        keep_going: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        self.append_with(tokens, keep_going, None)
    }

    /// As [`Session::append`], with the draft head following.
    pub(crate) fn append_with(
        &mut self,
        tokens: &[u32],
        keep_going: &mut dyn FnMut() -> bool,
        mut speculator: Option<&mut Speculator>,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        self.engine.check_context(self.tokens().len(), tokens.len())?;
        let max_rows = self.engine.max_rows();
        let mut chunks = tokens.chunks(max_rows).peekable();
        while let Some(tokens) = chunks.next() {
            if !keep_going() {
                return Ok(None);
            }
            let last = chunks.peek().is_none();
            let outs = if last { Outs::Last } else { Outs::None };
            if let Some(next) = chunks.peek() {
                self.engine.look_ahead(self.id, tokens, next);
            }
            let logits = self.engine.step(&[Chunk { sequence: self.id, tokens, outs, window: false }])?;
            let logits = last.then(|| logits.row(0).to_vec());
            if let Some(speculator) = &mut speculator {
                speculator.follow(self.engine, self.id)?;
            }
            if logits.is_some() {
                return Ok(logits);
            }
        }
        Err(EngineError::EmptyPrompt)
    }

    /// Forgets all but the first `len` tokens, and returns how many are left (see [`Engine::truncate`]).
    ///
    /// # Errors
    /// When there are fewer.
    pub fn truncate(&mut self, len: usize) -> Result<usize, EngineError> {
        self.engine.truncate(self.id, len)
    }

    /// Appends `prompt` and generates from there.
    ///
    /// # Errors
    /// An impossible option, or a prompt that is empty or too long.
    pub fn generate<'s>(
        &'s mut self,
        text: &Text,
        prompt: &[u32],
        options: &Generate,
    ) -> Result<Generation<'s, 'a>, EngineError> {
        Generation::start(self, text, prompt, options)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        // Fails only if the sequence is gone already.
        let _ = self.engine.release(self.id);
    }
}

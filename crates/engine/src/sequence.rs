//! Sequences: tokens whose keys and values are in the cache, and what holds those.

use crate::block_table::BlockTable;
use crate::error::EngineError;
use crate::states::{SequenceState, Window};

/// A sequence of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(crate) u32);

/// Tokens and what holds their state. Invariant: `table` covers `tokens`, and pages behind the last token are not
/// kept.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    /// Pages of all positions.
    pub(crate) table: BlockTable,
    pub(crate) state: SequenceState,
}

impl Sequence {
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Fails while a window waits for its commit.
    pub(crate) fn check_no_window(&self) -> Result<(), EngineError> {
        if self.state.window.is_some() { Err(EngineError::OpenWindow) } else { Ok(()) }
    }

    /// Takes in the tokens of a finished step.
    pub(crate) fn extend(&mut self, tokens: &[u32], window: bool) {
        if window {
            // A model with recurrent state has put the window's slots here already.
            let start = self.tokens.len();
            self.state.window.get_or_insert_with(Window::default).start = start;
        }
        self.tokens.extend_from_slice(tokens);
    }
}

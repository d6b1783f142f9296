//! Sequences: tokens whose keys and values are in the cache, and the pages that hold them.

use minfer_graph::PAGE;

use crate::error::EngineError;
use crate::pages::PagePool;
use crate::states::{SequenceState, Window};

/// A sequence of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(crate) u32);

/// Tokens and block table. Invariant: `pages` covers `tokens`, and pages behind the last token are not kept.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) pages: Vec<u32>,
    pub(crate) state: SequenceState,
}

/// A page whose content must be copied before the sequence writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageCopy {
    pub(crate) from: u32,
    pub(crate) to: u32,
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

    /// Pages that `add` more tokens take from the pool, the copy of a shared last page included.
    pub(crate) fn pages_needed(&self, add: usize, pool: &PagePool) -> usize {
        // Rows of a draft head may have taken pages ahead already.
        let new = (self.len() + add).div_ceil(PAGE).saturating_sub(self.pages.len());
        new + usize::from(add > 0 && self.shared_tail(pool).is_some())
    }

    /// The page that the next token is written to, if there is one and others refer to it too.
    fn shared_tail(&self, pool: &PagePool) -> Option<u32> {
        self.pages.get(self.len() / PAGE).copied().filter(|&tail| pool.is_shared(tail))
    }

    /// Makes room for `add` more tokens. A shared page that they will be written to is replaced by a page of
    /// its own, whose content the caller copies.
    pub(crate) fn reserve(
        &mut self,
        add: usize,
        pool: &mut PagePool,
    ) -> Result<Option<PageCopy>, EngineError> {
        pool.check(self.pages_needed(add, pool))?;
        let mut copy = None;
        if let Some(from) = self.shared_tail(pool).filter(|_| add > 0) {
            let to = pool.take()?;
            pool.release(from);
            let tail = self.len() / PAGE;
            self.pages[tail] = to;
            copy = Some(PageCopy { from, to });
        }
        while self.pages.len() * PAGE < self.len() + add {
            self.pages.push(pool.take()?);
        }
        Ok(copy)
    }

    /// Takes [`Sequence::reserve`]'s replacement back, after a step that failed.
    pub(crate) fn undo_copy(&mut self, copy: PageCopy, pool: &mut PagePool) {
        let tail = self.len() / PAGE;
        if self.pages.get(tail) == Some(&copy.to) {
            self.pages[tail] = copy.from;
            pool.share(copy.from);
            pool.release(copy.to);
        }
    }

    /// Gives back pages that hold no token.
    pub(crate) fn trim(&mut self, pool: &mut PagePool) {
        for page in self.pages.drain(self.tokens.len().div_ceil(PAGE)..) {
            pool.release(page);
        }
    }

    /// The slot of the token at `position`.
    pub(crate) fn slot(&self, position: usize) -> i32 {
        (self.pages[position / PAGE] as usize * PAGE + position % PAGE) as i32
    }
}

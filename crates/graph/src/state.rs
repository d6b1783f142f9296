//! What a model keeps between steps, as declarations. The engine owns the memory.

use std::fmt;

/// Positions per page of paged state. Attention also walks its key tiles in pages, at fixed absolute
/// positions, so this number is part of the definition of the logits' last bits.
pub const PAGE: usize = 64;

/// One piece of state of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct StateDecl {
    pub name: String,
    pub layer: u32,
    pub kind: StateKind,
}

/// Where a row's recurrent state comes from, in the input `state_from`: a slot number, or one of these.
pub mod state_from {
    /// From the row before, which belongs to the same sequence.
    pub const PREVIOUS_ROW: i32 = -1;
    /// From nothing: a sequence begins, and its state is all zero.
    pub const ZERO: i32 = -2;
}

/// One part of paged state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedPart {
    /// Numbers per row.
    pub width: usize,
    /// Positions per row: a row belongs to the last position of each whole number of these. It divides [`PAGE`],
    /// or is a multiple of it.
    pub every: usize,
    /// The last so many positions are needed, earlier ones may be gone; `None`: all are. Rows of such parts lie in
    /// pages of their own, which are given back when they fall out of the window.
    pub window: Option<usize>,
}

impl PagedPart {
    /// One row per position.
    pub const fn each(width: usize) -> PagedPart {
        PagedPart { width, every: 1, window: None }
    }

    /// The same, with a row for every so many positions.
    pub const fn every(self, every: usize) -> PagedPart {
        PagedPart { every, ..self }
    }

    /// The same, of which the last so many positions are needed.
    pub const fn window(self, positions: usize) -> PagedPart {
        PagedPart { window: Some(positions), ..self }
    }

    /// Whether rows for every so many positions fit pages.
    pub const fn fits(every: usize) -> bool {
        every > 0 && (PAGE.is_multiple_of(every) || every.is_multiple_of(PAGE))
    }

    /// Rows in the first so many positions of a page.
    pub const fn rows(&self, positions: usize) -> usize {
        positions / self.positions()
    }

    /// The row in the whole state that the position in this slot ends.
    pub const fn row(&self, slot: usize) -> usize {
        slot / self.positions()
    }

    /// Positions of a page per row: a page has a row even if more positions than it has share one.
    const fn positions(&self) -> usize {
        if self.every < PAGE { self.every } else { PAGE }
    }
}

/// How state grows, and with it how it is rolled back and shared.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateKind {
    /// Rows that belong to positions (for attention: K and V, then what else a layer keeps), stored in pages
    /// of [`PAGE`] positions. Rolled back by truncation, shared by pages.
    Paged {
        /// What is kept, side by side.
        parts: Vec<PagedPart>,
    },
    /// A fixed number of f32 numbers per sequence that every token replaces (recurrent matrices, the tails
    /// of convolutions). Lives in slots: a step reads one slot and writes others, so that a checkpoint is a
    /// slot that nobody writes to any more, and a rollback is a return to it.
    Recurrent {
        /// Numbers per slot.
        width: usize,
    },
}

impl fmt::Display for PagedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.width)?;
        if self.every > 1 {
            write!(f, " for each {} positions", self.every)?;
        }
        match self.window {
            Some(positions) => write!(f, " for the last {positions} positions"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateKind::Paged { parts } => {
                let parts: Vec<String> = parts.iter().map(PagedPart::to_string).collect();
                write!(f, "rows of {}", parts.join(" and "))
            }
            StateKind::Recurrent { width } => write!(f, "{width} numbers"),
        }
    }
}

impl StateKind {
    /// The longest window of its parts, if one has any.
    pub fn window(&self) -> Option<usize> {
        match self {
            StateKind::Paged { parts } => parts.iter().filter_map(|p| p.window).max(),
            StateKind::Recurrent { .. } => None,
        }
    }

    /// Paged state with a row of each of these widths per position.
    pub fn paged(widths: &[usize]) -> StateKind {
        StateKind::Paged { parts: widths.iter().map(|&width| PagedPart::each(width)).collect() }
    }
}

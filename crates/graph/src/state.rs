//! What a model keeps between steps, as declarations. The engine owns the memory.

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

/// How state grows, and with it how it is rolled back and shared.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateKind {
    /// One row per position in each part (for attention: K and V, then what else a layer keeps per
    /// position), stored in pages of [`PAGE`] positions. Rolled back by truncation, shared by pages.
    Paged {
        /// Numbers per position, part by part.
        widths: Vec<usize>,
    },
    /// A fixed number of f32 numbers per sequence that every token replaces (recurrent matrices, the tails
    /// of convolutions). Lives in slots: a step reads one slot and writes others, so that a checkpoint is a
    /// slot that nobody writes to any more, and a rollback is a return to it.
    Recurrent {
        /// Numbers per slot.
        width: usize,
    },
}

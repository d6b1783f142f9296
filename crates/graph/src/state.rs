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

/// How state grows, and with it how it is rolled back and shared.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateKind {
    /// One row per position in each part (for attention: K and V), stored in pages of [`PAGE`]
    /// positions. `widths` holds the numbers per position of each part.
    Paged {
        /// Numbers per position, part by part.
        widths: Vec<usize>,
    },
}

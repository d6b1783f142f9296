//! What the state store has saved the model from computing again.

/// Counters of one engine since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReuseCounters {
    /// Tokens that truncations were asked to keep.
    pub asked: u64,
    /// Tokens that they kept: fewer where recurrent state had to go back to a checkpoint.
    pub kept: u64,
    /// Snapshots taken.
    pub snapshots: u64,
    /// Snapshots restored.
    pub restores: u64,
}

impl ReuseCounters {
    /// Tokens that are computed again although they had not changed.
    pub fn recomputed(&self) -> u64 {
        self.asked - self.kept
    }
}

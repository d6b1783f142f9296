//! Dynamic sharing of a range among workers.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Hands out consecutive chunks of a range, each to one worker only.
///
/// Which worker gets which chunk is a matter of timing, so a chunk's result must not depend on it.
/// The counter has its own cache lines, because every worker writes it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ChunkCounter {
    next: AtomicUsize,
}

impl ChunkCounter {
    /// A counter at the start of its range.
    pub const fn new() -> ChunkCounter {
        ChunkCounter { next: AtomicUsize::new(0) }
    }

    /// The next `chunk` (at least 1) items of `0..len`, fewer at the end, or `None` when all are claimed.
    /// Every call of one pass must name the same `len`.
    pub fn claim(&self, len: usize, chunk: usize) -> Option<Range<usize>> {
        let chunk = chunk.max(1);
        // `fetch_add` alone would run on past the end with every idle poll, and overflow in the end.
        let claim = |next: usize| (next < len).then(|| next.saturating_add(chunk).min(len));
        let start = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).ok()?;
        Some(start..start.saturating_add(chunk).min(len))
    }

    /// Back to the start of the range. Callers separate it from claims by a barrier or between runs.
    pub fn reset(&self) {
        self.next.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::ChunkCounter;

    #[test]
    fn chunks_cover_the_range_once() {
        let counter = ChunkCounter::new();
        let mut seen = Vec::new();
        while let Some(r) = counter.claim(10, 4) {
            seen.push(r);
        }
        assert_eq!(seen, [0..4, 4..8, 8..10]);
        assert_eq!(counter.claim(10, 4), None);
        counter.reset();
        assert_eq!(counter.claim(usize::MAX, usize::MAX), Some(0..usize::MAX));
        assert_eq!(counter.claim(usize::MAX, 1), None);
        assert_eq!(ChunkCounter::new().claim(0, 0), None);
    }
}

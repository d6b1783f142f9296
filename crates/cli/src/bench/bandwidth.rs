//! How fast this machine reads its memory at this moment: tells a slow minute from a slow program.

use std::hint::black_box;
use std::io;
use std::time::Instant;

/// Bytes read in a pass, far more than a share of any cache.
const BYTES: usize = 256 << 20;
/// Passes, of which the fastest counts: the first may find threads that are still starting.
const PASSES: usize = 3;

/// A buffer to read.
pub(super) struct Probe {
    words: Vec<u64>,
}

impl Probe {
    pub(super) fn new() -> Probe {
        // Not zero: a page of zeros that was never written may be the same piece of memory everywhere.
        Probe { words: vec![1; BYTES / size_of::<u64>()] }
    }

    /// 1e9 bytes per second with this many threads.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub(super) fn gbps(&self, threads: usize) -> io::Result<f64> {
        let mut fastest = 0.0f64;
        for _ in 0..PASSES {
            let started = Instant::now();
            self.pass(threads)?;
            let seconds = started.elapsed().as_secs_f64().max(1e-9);
            fastest = fastest.max(BYTES as f64 / seconds / 1e9);
        }
        Ok(fastest)
    }

    /// The sum of all words, each thread reading a part.
    fn pass(&self, threads: usize) -> io::Result<u64> {
        let part = self.words.len().div_ceil(threads.max(1));
        std::thread::scope(|scope| {
            let start =
                |words| std::thread::Builder::new().spawn_scoped(scope, move || black_box(sum(words)));
            let started: Vec<_> = self.words.chunks(part).map(start).collect::<io::Result<_>>()?;
            Ok(started.into_iter().map(|thread| thread.join().unwrap_or(0)).sum())
        })
    }
}

/// In eight sums side by side, which keeps the additions out of each other's way.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0u64; 8];
    let (blocks, rest) = words.as_chunks::<8>();
    for block in blocks {
        for (sum, word) in sums.iter_mut().zip(block) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_once() {
        let probe = Probe { words: (0..1003).collect() };
        for threads in [1, 2, 7, 2000] {
            assert_eq!(probe.pass(threads).unwrap(), 1002 * 1003 / 2, "{threads} threads");
        }
    }
}

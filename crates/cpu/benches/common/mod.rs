//! What the benchmarks of kernels share: rates and the plain read that memory-bound ones are compared with.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use minfer_cpu::pool::Pool;

/// Median and best of some rates.
pub(crate) struct Rates(pub(crate) Vec<f64>);

impl Rates {
    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    pub(crate) fn median(&self) -> f64 {
        self.sorted()[self.0.len() / 2]
    }
}

impl std::fmt::Display for Rates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} ({:.1})", self.median(), self.sorted()[self.0.len() - 1])
    }
}

/// Seconds to read all bytes and add them up as words.
pub(crate) fn read_all(pool: &Pool, bytes: &[u8]) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    pool.run(&|w| {
        let mut sums = [0u64; 16];
        for line in bytes[w.share(bytes.len(), 4096)].chunks_exact(128) {
            for (sum, word) in sums.iter_mut().zip(bytemuck::cast_slice::<u8, u64>(line)) {
                *sum = sum.wrapping_add(*word);
            }
        }
        black_box(sums);
    })?;
    Ok(start.elapsed().as_secs_f64())
}

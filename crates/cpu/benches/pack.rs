//! How fast weights are packed on one thread: bytes of the file per second, from memory that no cache holds to
//! memory that exists. Weights load at this speed times the threads when their file is in the page cache.
//!
//! `cargo bench -p minfer-cpu --bench pack [-- TYPE ...]`

use std::time::Instant;

use minfer_cpu::pack::{GROUP, PackError, PackedMatrix, pack_into};
use minfer_format::BlockType;

const K: usize = 1024;
const ROWS: usize = 32 * 1024;
const RUNS: usize = 15;

fn main() -> Result<(), PackError> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    for ty in BlockType::all() {
        if wanted.is_empty() || wanted.iter().any(|w| *w == ty.to_string()) {
            println!("{:<8} {:5.2} GB/s", ty.to_string(), speed(ty)?);
        }
    }
    Ok(())
}

/// The fastest of several runs, in 1e9 bytes of the file per second.
fn speed(ty: BlockType) -> Result<f64, PackError> {
    let bytes = ty.row_bytes(K).unwrap_or(0) * ROWS;
    // Any bits are valid blocks to the packer.
    let raw: Vec<u8> = (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut packed = PackedMatrix::zeroed(ty, ROWS, K)?;
    packed.bytes_mut().fill(1);
    let mut best = 0.0f64;
    for _ in 0..RUNS {
        let started = Instant::now();
        pack_into(ty, ROWS, K, &raw, 0..ROWS.div_ceil(GROUP), packed.bytes_mut())?;
        best = best.max(bytes as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}

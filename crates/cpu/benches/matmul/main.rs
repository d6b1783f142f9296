//! What the matrix kernels reach on this machine.
//!
//! `cargo bench -p minfer-cpu --bench matmul [-- TYPE...]` prints, for each format,
//! * one activation row (decode): GB/s of packed weights that do not fit any cache, by one and by all threads, beside
//!   the plain read bandwidth measured in alternation, since bandwidth of shared machines changes by the second;
//! * 512 rows (prefill): GOP/s, two operations for each product and sum, and the share of the measured peak of the
//!   instruction set, int8 for quantised weights and f32 for floats;
//!
//! and how long the pool takes for an empty run and for a barrier. Each figure is median (best) of the rounds. A name
//! of an instruction set among the arguments (`avx2`) runs its kernels instead of the machine's best.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use minfer_cpu::Isa;
use minfer_cpu::matmul::{Job, Rows, select, x_row_bytes};
use minfer_cpu::pack::{AlignedBytes, GROUP, PackedMatrix};
use minfer_cpu::pool::{Pool, default_threads};
use minfer_cpu::quantize;
use minfer_format::{BlockType, synth};

#[path = "../common/mod.rs"]
mod common;
mod limits;

use common::{Rates, read_all};
use limits::{Peak, peak};

const K: usize = 2048;
/// Weights of a decode measurement, in bytes: more than any cache holds.
const WORKING_SET: usize = 1 << 30;
const ROUNDS: usize = 9;
const PREFILL_ROWS: usize = 512;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let named = wanted.iter().find_map(|w| Isa::ALL.into_iter().find(|isa| isa.name() == w));
    let isa = named.filter(|isa| isa.is_available()).unwrap_or(Isa::detect());
    let wanted: Vec<String> = wanted.into_iter().filter(|w| w != isa.name()).collect();
    let pools = [Pool::new(1)?, Pool::new(default_threads())?];
    let peaks = [peak(isa, &pools[0])?, peak(isa, &pools[1])?];
    let threads = pools[1].threads();
    println!("kernels: {}", isa.name());
    for (Peak { int8, float }, pool) in peaks.iter().zip(&pools) {
        println!(
            "peak of {} threads: {:.0} GOP/s int8, {:.0} GFLOP/s f32",
            pool.threads(),
            int8 / 1e9,
            float / 1e9
        );
    }
    pool_latency(&pools[1])?;
    let mut memory = AlignedBytes::zeroed(WORKING_SET).ok_or("no memory for the working set")?;
    println!("{:8}| {:^31} | {:^31} | {:^41}", "threads", 1, threads, format!("1 and {threads}"));
    println!(
        "{:8}| {:^15} {:^15} | {:^15} {:^15} | {:^41}",
        "", "1 row: GB/s", "read", "1 row: GB/s", "read", "512 rows: GOP/s and share of peak"
    );
    for ty in BlockType::all() {
        if !wanted.is_empty() && !wanted.iter().any(|w| w.eq_ignore_ascii_case(ty.name())) {
            continue;
        }
        print!("{:8}", ty.name());
        let n = fill(ty, &mut memory)?;
        for pool in &pools {
            let (weights, read) = decode(ty, isa, pool, &memory, n)?;
            print!("| {:15} {:15} ", weights.to_string(), read.to_string());
        }
        print!("|");
        for (pool, peak) in pools.iter().zip(&peaks) {
            let rates = prefill(ty, isa, pool, &memory)?;
            let share = 1e11 * rates.median() / if ty.is_quantized() { peak.int8 } else { peak.float };
            print!(" {:15} {share:3.0} %", rates.to_string());
        }
        println!();
    }
    Ok(())
}

fn pool_latency(pool: &Pool) -> Outcome<()> {
    const TIMES: usize = 2000;
    let micros = |start: Instant| start.elapsed().as_secs_f64() * 1e6 / TIMES as f64;
    let start = Instant::now();
    for _ in 0..TIMES {
        pool.run(&|_| {})?;
    }
    let run = micros(start);
    let start = Instant::now();
    pool.run(&|w| (0..TIMES).for_each(|_| w.barrier()))?;
    println!("pool of 2: {run:.2} us for an empty run, {:.2} us for a barrier", micros(start));
    Ok(())
}

/// Fills the memory with copies of one packed weight; returns how many rows fit.
fn fill(ty: BlockType, memory: &mut AlignedBytes) -> Outcome<usize> {
    let n = 2048;
    let mut raw = vec![0u8; n * ty.row_bytes(K).ok_or("row length")?];
    synth::fill_random(ty, 1, 0.02, &mut raw);
    let packed = PackedMatrix::pack(ty, n, K, &raw)?;
    let copies = WORKING_SET / packed.bytes().len();
    for copy in memory.as_mut_slice().chunks_exact_mut(packed.bytes().len()) {
        copy.copy_from_slice(packed.bytes());
    }
    Ok(copies * n)
}

/// Activation rows for a type of weight, packed without gaps.
fn activations(ty: BlockType, rows: usize) -> Vec<u32> {
    let stride = x_row_bytes(ty, K);
    let mut words = vec![0u32; stride / 4 * rows];
    for (r, out) in bytemuck::cast_slice_mut::<u32, u8>(&mut words).chunks_exact_mut(stride).enumerate() {
        let row: Vec<f32> = (0..K).map(|c| ((r * 31 + c * 17) % 201) as f32 * 0.01 - 1.0).collect();
        if ty.is_quantized() {
            quantize::row(&row, out);
        } else {
            out.copy_from_slice(bytemuck::cast_slice(&row));
        }
    }
    words
}

/// Runs one product of `n` outputs by all workers; seconds.
fn run(
    pool: &Pool,
    isa: Isa,
    ty: BlockType,
    n: usize,
    rows: usize,
    memory: &AlignedBytes,
    x: &[u32],
) -> Outcome<f64> {
    let mut y = vec![0f32; n * rows];
    let job = Job {
        k: K,
        n,
        weights: memory.as_slice().as_ptr(),
        x: x.as_ptr().cast(),
        x_stride: x_row_bytes(ty, K),
        y: y.as_mut_ptr(),
        y_stride: 4 * n,
        rows: Rows::All(rows),
    };
    let kernel = select(ty, isa);
    let start = Instant::now();
    // SAFETY: `isa` was detected; the memory holds the packed weight of `n` rows, `x` and `y` have `rows` rows, and
    // the shares of the workers are disjoint.
    pool.run(&|w| unsafe { kernel(&job, w.share(n / GROUP, 1)) })?;
    let seconds = start.elapsed().as_secs_f64();
    black_box(&y);
    Ok(seconds)
}

/// One activation row: rates of the kernel and of a plain read of the same bytes, in alternation.
fn decode(ty: BlockType, isa: Isa, pool: &Pool, memory: &AlignedBytes, n: usize) -> Outcome<(Rates, Rates)> {
    let x = activations(ty, 1);
    let bytes = PackedMatrix::packed_bytes(ty, n, K).ok_or("size")?;
    let (mut weights, mut read) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        read.push(bytes as f64 / 1e9 / read_all(pool, &memory.as_slice()[..bytes])?);
        weights.push(bytes as f64 / 1e9 / run(pool, isa, ty, n, 1, memory, &x)?);
    }
    Ok((Rates(weights), Rates(read)))
}

/// Many activation rows with a weight of 2048 rows.
fn prefill(ty: BlockType, isa: Isa, pool: &Pool, memory: &AlignedBytes) -> Outcome<Rates> {
    let (n, x) = (2048, activations(ty, PREFILL_ROWS));
    let operations = 2.0 * (n * K * PREFILL_ROWS) as f64;
    let rates = (0..3).map(|_| Ok(operations / 1e9 / run(pool, isa, ty, n, PREFILL_ROWS, memory, &x)?));
    Ok(Rates(rates.collect::<Outcome<_>>()?))
}

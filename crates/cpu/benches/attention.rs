//! What attention reaches on this machine, for the shape of qwen3-0.6b: 16 query heads, 8 KV heads, 128 numbers.
//!
//! `cargo bench -p minfer-cpu --bench attention [-- FORMAT...]` prints, for each format of the cache,
//! * decode (one row of one sequence, one row of each of 8) at two depths: GB/s of keys and values that do not fit
//!   any cache, by 1 and 2 threads, beside the plain read bandwidth measured in alternation, since bandwidth of
//!   shared machines changes by the second;
//! * prefill (512 rows of one sequence) at two depths: GFLOP/s, two operations for each product and sum.
//!
//! Each figure is median (best) of the rounds.

use std::error::Error;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use half::f16;
use minfer_cpu::Kernels;
use minfer_cpu::attention::{AttendShape, CacheRows, KvView, Partials, QueryRows, Scratch, Share, Shares};
use minfer_cpu::pack::AlignedBytes;
use minfer_cpu::pool::{ChunkCounter, Pool};
use minfer_graph::PAGE;
use minfer_runtime::KvFormat;

mod common;

use common::{Rates, read_all};

const SHAPE: AttendShape =
    AttendShape { heads: 16, kv_heads: 8, k_dim: 128, v_dim: 128, scale: 0.088_388_35 };
const Q_WIDTH: usize = SHAPE.heads * SHAPE.k_dim;
const KV_WIDTH: usize = SHAPE.kv_heads * SHAPE.k_dim;
/// Keys and values of a decode measurement, in bytes: eight times the largest cache here.
const WORKING_SET: usize = 288 << 20;
const DEPTHS: [usize; 2] = [4096, 16384];
const ROUNDS: usize = 9;
const PREFILL_ROWS: usize = 512;
const PREFILL_DEPTHS: [usize; 2] = [0, 4096];

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A format of the cache: its name, bytes per row, how random rows are written, and how bytes are seen.
struct Format {
    name: &'static str,
    row_bytes: usize,
    fill: fn(&mut [u8]),
    view: fn(&[u8]) -> CacheRows<'_>,
}

const FORMATS: [Format; 3] = [
    Format {
        name: "f32",
        row_bytes: 4 * KV_WIDTH,
        fill: |bytes| bytemuck::cast_slice_mut(bytes).iter_mut().zip(noise()).for_each(|(o, x)| *o = x),
        view: |bytes| CacheRows::F32(bytemuck::cast_slice(bytes)),
    },
    Format {
        name: "f16",
        row_bytes: 2 * KV_WIDTH,
        fill: |bytes| {
            let halves: &mut [u16] = bytemuck::cast_slice_mut(bytes);
            halves.iter_mut().zip(noise()).for_each(|(o, x)| *o = f16::from_f32(x).to_bits());
        },
        view: |bytes| {
            let halves: &[u16] = bytemuck::cast_slice(bytes);
            // SAFETY: `f16` is a transparent `u16`.
            CacheRows::F16(unsafe { std::slice::from_raw_parts(halves.as_ptr().cast(), halves.len()) })
        },
    },
    Format {
        name: "q8_0",
        row_bytes: KvFormat::Q8_0.row_bytes(KV_WIDTH),
        fill: |bytes| {
            let mut noise = noise();
            for block in bytes.chunks_exact_mut(KvFormat::Q8_0.row_bytes(KvFormat::BLOCK)) {
                block[..2].copy_from_slice(&f16::from_f32(1.0 / 128.0).to_ne_bytes());
                block[2..].iter_mut().zip(&mut noise).for_each(|(o, x)| *o = (x * 127.0) as i8 as u8);
            }
        },
        view: |bytes| CacheRows::Q8_0(bytes),
    },
];

fn main() -> Outcome<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let kernels = Kernels::detect();
    let pools = [Pool::new(1)?, Pool::new(2)?];
    println!("kernels: {}", kernels.isa().name());
    let mut memory = AlignedBytes::zeroed(WORKING_SET).ok_or("no memory for the working set")?;
    for format in FORMATS.iter().filter(|f| wanted.is_empty() || wanted.iter().any(|w| w == f.name)) {
        (format.fill)(memory.as_mut_slice());
        for (sequences, depth) in [(1, DEPTHS[0]), (1, DEPTHS[1]), (8, DEPTHS[0])] {
            print!("{:5} decode {sequences} x {depth:5}: GB/s (read)", format.name);
            for pool in &pools {
                let (kv, read) = decode(&kernels, format, pool, &memory, sequences, depth)?;
                print!(" | {} threads {kv} ({read})", pool.threads());
            }
            println!();
        }
        for depth in PREFILL_DEPTHS {
            print!("{:5} prefill {PREFILL_ROWS} at {depth:4}: GFLOP/s", format.name);
            for pool in &pools {
                print!(" | {} threads {}", pool.threads(), prefill(&kernels, format, pool, &memory, depth)?);
            }
            println!();
        }
    }
    Ok(())
}

/// Numbers within 1, from a small generator.
fn noise() -> impl Iterator<Item = f32> {
    let mut state = 1u32;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    })
}

/// Rows of one step.
struct Step {
    q: Vec<f32>,
    out: Vec<f32>,
    positions: Vec<i32>,
    /// Where each row's page list begins.
    table_at: Vec<i32>,
    pages: Vec<i32>,
    partials: Partials,
}

impl Step {
    fn new(sequences: usize, positions: std::ops::Range<usize>) -> Step {
        let rows = sequences * positions.len();
        let pages = positions.end.div_ceil(PAGE);
        Step {
            q: noise().take(rows * Q_WIDTH).collect(),
            out: vec![0.0; rows * Q_WIDTH],
            positions: (0..sequences).flat_map(|_| positions.clone().map(|p| p as i32)).collect(),
            table_at: (0..rows).map(|row| (row / positions.len() * pages) as i32).collect(),
            pages: (0..(sequences * pages) as i32).collect(),
            partials: Partials::new(&SHAPE, rows, positions.end),
        }
    }

    /// Seconds of attention over one layer's cache, shared out as in a program.
    fn run(&mut self, kernels: &Kernels, pool: &Pool, kv: &KvView<'_>) -> Outcome<f64> {
        let last = self.positions.iter().copied().max().unwrap_or(0);
        let shares = Shares::new(&SHAPE, &self.table_at, last, pool.threads(), &self.partials);
        let mut scratch: Vec<Mutex<Scratch>> = Vec::new();
        scratch.resize_with(pool.threads(), || Mutex::new(Scratch::new(&SHAPE)));
        let (out, next, step) = (SendPtr(self.out.as_mut_ptr()), ChunkCounter::new(), &*self);
        let start = Instant::now();
        pool.run(&|worker| {
            let Ok(mut scratch) = scratch[worker.index].lock() else { return };
            while let Some(task) = next.claim(shares.tasks(), 1) {
                step.share(kernels, kv, &shares.task(task.start), &mut scratch, &out);
            }
            if shares.is_split() {
                worker.barrier();
                for i in worker.share(step.positions.len() * SHAPE.heads, 1) {
                    let (row, head) = (i / SHAPE.heads, i % SHAPE.heads);
                    // SAFETY: workers write disjoint parts of the output, and all tasks are done.
                    unsafe {
                        let out = std::slice::from_raw_parts_mut(out.at(i * SHAPE.v_dim), SHAPE.v_dim);
                        kernels.merge_ranges(&step.partials, row, step.positions[row] as usize, head, out);
                    }
                }
            }
        })?;
        let seconds = start.elapsed().as_secs_f64();
        black_box(&self.out);
        Ok(seconds)
    }

    fn share(&self, kernels: &Kernels, kv: &KvView<'_>, share: &Share, scratch: &mut Scratch, out: &SendPtr) {
        let mut first = share.rows.start;
        for run in self.table_at[share.rows.clone()].chunk_by(|a, b| a == b) {
            let q = &self.q[first * Q_WIDTH..][..run.len() * Q_WIDTH];
            let positions = &self.positions[first..first + run.len()];
            let rows = QueryRows { q, positions, pages: &self.pages[run[0] as usize..] };
            let heads = share.kv_heads.clone();
            match share.range {
                // SAFETY: tasks have parts of their own.
                Some(range) => unsafe {
                    kernels.attend_range(&SHAPE, kv, &rows, heads, range, scratch, (&self.partials, first));
                },
                None => kernels.attend(&SHAPE, kv, &rows, heads, scratch, |row, head, head_out| {
                    let at = out.at((first + row) * Q_WIDTH + head * head_out.len());
                    // SAFETY: tasks write disjoint parts of the output.
                    unsafe { std::ptr::copy_nonoverlapping(head_out.as_ptr(), at, head_out.len()) }
                }),
            }
            first += run.len();
        }
    }
}

struct SendPtr(*mut f32);
// SAFETY: workers write disjoint parts.
unsafe impl Sync for SendPtr {}

impl SendPtr {
    fn at(&self, at: usize) -> *mut f32 {
        self.0.wrapping_add(at)
    }
}

/// Keys and values of the layers that fit into the memory, `slots` rows each.
fn layers<'a>(format: &'a Format, memory: &'a AlignedBytes, slots: usize) -> Vec<KvView<'a>> {
    let bytes = slots * format.row_bytes;
    let layers = memory.as_slice().chunks_exact(2 * bytes);
    layers.map(|kv| KvView { k: (format.view)(&kv[..bytes]), v: (format.view)(&kv[bytes..]) }).collect()
}

/// One row of each sequence in every layer: rates of attention and of a plain read of the same bytes, in alternation.
fn decode(
    kernels: &Kernels,
    format: &Format,
    pool: &Pool,
    memory: &AlignedBytes,
    sequences: usize,
    depth: usize,
) -> Outcome<(Rates, Rates)> {
    let slots = sequences * depth;
    let layers = layers(format, memory, slots);
    let bytes = layers.len() * 2 * slots * format.row_bytes;
    let mut step = Step::new(sequences, depth - 1..depth);
    let (mut kv_rates, mut read) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        read.push(bytes as f64 / 1e9 / read_all(pool, &memory.as_slice()[..bytes])?);
        let seconds: Vec<f64> =
            layers.iter().map(|kv| step.run(kernels, pool, kv)).collect::<Outcome<_>>()?;
        kv_rates.push(bytes as f64 / 1e9 / seconds.iter().sum::<f64>());
    }
    Ok((Rates(kv_rates), Rates(read)))
}

/// Rows that follow `depth` cached positions.
fn prefill(
    kernels: &Kernels,
    format: &Format,
    pool: &Pool,
    memory: &AlignedBytes,
    depth: usize,
) -> Outcome<Rates> {
    let end = depth + PREFILL_ROWS;
    let layers = layers(format, memory, end);
    let kv = layers.first().ok_or("no layer fits")?;
    let mut step = Step::new(1, depth..end);
    let seen: usize = (depth + 1..=end).sum();
    let operations = (2 * SHAPE.heads * (SHAPE.k_dim + SHAPE.v_dim) * seen) as f64;
    let rates = (0..5).map(|_| Ok(operations / 1e9 / step.run(kernels, pool, kv)?));
    Ok(Rates(rates.collect::<Outcome<_>>()?))
}

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
use std::time::Instant;

use half::f16;
use minfer_cpu::Kernels;
use minfer_cpu::attention::{AttendShape, CacheRows, KvView, QueryRows, Scratch, heads_per_task};
use minfer_cpu::pack::AlignedBytes;
use minfer_cpu::pool::{ChunkCounter, Pool};
use minfer_graph::PAGE;
use minfer_runtime::KvFormat;

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
/// Rows of a task, as in a program's step.
const ROW_BLOCK: usize = 16;

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

fn small(kernels: &Kernels, format: &Format, pool: &Pool, memory: &AlignedBytes) -> Outcome<()> {
    for depth in [64, 128, 256, 512, 1024] {
        let mut step = Step::new(1, depth - 1..depth);
        let kv = layers(format, memory, depth)[0];
        let bytes = 2 * depth * format.row_bytes;
        let mut best = f64::MAX;
        for _ in 0..300 { best = best.min(step.run(kernels, pool, &kv)?); }
        println!("depth {depth}: {:.1} GB/s", bytes as f64 / 1e9 / best);
    }
    Ok(())
}

fn main() -> Outcome<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let kernels = Kernels::detect();
    let pools = [Pool::new(1)?, Pool::new(2)?];
    println!("kernels: {}", kernels.isa().name());
    let mut memory = AlignedBytes::zeroed(WORKING_SET).ok_or("no memory for the working set")?;
    if std::env::var("HUGE").is_ok() {
        let b = memory.as_mut_slice();
        let at = (b.as_ptr() as usize).next_multiple_of(1<<21);
        let mut r: isize;
        unsafe { std::arch::asm!("syscall", inlateout("rax") 28isize => r, in("rdi") at, in("rsi") (b.len()-(1<<21)) & !((1<<21)-1), in("rdx") 14usize, out("rcx") _, out("r11") _); }
        println!("madvise {r}");
    }
    for format in FORMATS.iter().filter(|f| wanted.is_empty() || wanted.iter().any(|w| w == f.name)) {
        (format.fill)(memory.as_mut_slice());
        if std::env::var("SMALL").is_ok() { small(&kernels, format, &pools[0], &memory)?; continue; }
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

/// Median and best of some rates.
struct Rates(Vec<f64>);

impl std::fmt::Display for Rates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        write!(f, "{:.1} ({:.1})", sorted[sorted.len() / 2], sorted[sorted.len() - 1])
    }
}

/// Rows of one step: consecutive ones of a sequence share its page list.
struct Step {
    q: Vec<f32>,
    out: Vec<f32>,
    /// Of each sequence, its rows' positions and its pages.
    sequences: Vec<(Vec<i32>, Vec<i32>)>,
}

impl Step {
    fn new(sequences: usize, positions: std::ops::Range<usize>) -> Step {
        let rows = sequences * positions.len();
        let pages = positions.end.div_ceil(PAGE);
        let sequence = |s: usize| {
            let list = (s * pages..(s + 1) * pages).map(|p| p as i32).collect();
            (positions.clone().map(|p| p as i32).collect(), list)
        };
        let q = noise().take(rows * Q_WIDTH).collect();
        Step { q, out: vec![0.0; rows * Q_WIDTH], sequences: (0..sequences).map(sequence).collect() }
    }

    /// Seconds of attention over one layer's cache.
    fn run(&mut self, kernels: &Kernels, pool: &Pool, kv: &KvView<'_>) -> Outcome<f64> {
        let mut tasks = Vec::new();
        let mut first = 0;
        for (positions, pages) in &self.sequences {
            for positions in positions.chunks(ROW_BLOCK) {
                let each = heads_per_task(&SHAPE, self.q.len() / Q_WIDTH, pool.threads());
                let heads = (0..SHAPE.kv_heads).step_by(each);
                tasks.extend(heads.map(|h| (first, positions, pages, h..h + each)));
                first += positions.len();
            }
        }
        tasks.reverse();
        let out = SendPtr(self.out.as_mut_ptr());
        let (next, q) = (ChunkCounter::new(), &self.q);
        let scratch: Vec<_> = (0..pool.threads()).map(|_| std::sync::Mutex::new(Scratch::new(&SHAPE, ROW_BLOCK))).collect();
        let start = Instant::now();
        pool.run(&|worker| {
            let Ok(mut scratch) = scratch[worker.index].lock() else { return };
            while let Some(task) = next.claim(tasks.len(), 1) {
                let (first, positions, pages, heads) = tasks[task.start].clone();
                let rows = QueryRows { q: &q[first * Q_WIDTH..][..positions.len() * Q_WIDTH], positions, pages };
                kernels.attend(&SHAPE, kv, &rows, heads, &mut scratch, |row, head, head_out| {
                    let at = (first + row) * Q_WIDTH + head * head_out.len();
                    // SAFETY: tasks write disjoint parts of the output.
                    unsafe { std::ptr::copy_nonoverlapping(head_out.as_ptr(), out.at(at), head_out.len()) }
                });
            }
        })?;
        let seconds = start.elapsed().as_secs_f64();
        black_box(&self.out);
        Ok(seconds)
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

/// Seconds to read all bytes and add them up as words.
fn read_all(pool: &Pool, bytes: &[u8]) -> Outcome<f64> {
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

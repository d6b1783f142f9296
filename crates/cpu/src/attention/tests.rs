//! Against plain softmax attention in f64 over contiguous rows, and the invariances that the module
//! promises, bit for bit.

use half::f16;
use minfer_runtime::KvFormat;

use super::*;
use crate::testing::{Rng, assert_close, assert_same_bits};

const POSITIONS: [i32; 9] = [0, 1, 63, 64, 65, 127, 511, 512, 600];
/// Positions of a sequence: two ranges.
const LENGTH: usize = 601;
/// Slots of the cache, in pages; a sequence of the tests takes ten or fewer of them.
const CACHE_PAGES: usize = 13;

/// A sequence: its keys and values by position, and the pages where they lie.
struct Sequence {
    shape: AttendShape,
    /// `[positions, kv_heads * dim]`.
    k: Vec<f32>,
    v: Vec<f32>,
    pages: Vec<i32>,
}

impl Sequence {
    fn new(rng: &mut Rng, shape: AttendShape, positions: usize) -> Sequence {
        let mut pages: Vec<i32> = (0..CACHE_PAGES as i32).collect();
        rng.shuffle(&mut pages);
        pages.truncate(positions.div_ceil(PAGE));
        let k = rng.floats(positions * shape.kv_heads * shape.k_dim, 1.0);
        let v = rng.floats(positions * shape.kv_heads * shape.v_dim, 1.0);
        Sequence { shape, k, v, pages }
    }

    /// Writes rows of `width` numbers where the pages put them.
    fn store(&self, kernels: &Kernels, rows: &[f32], width: usize, mut cache: CacheRowsMut<'_>) {
        for (j, row) in rows.chunks(width).enumerate() {
            cache.store(kernels, self.pages[j / PAGE] as usize * PAGE + j % PAGE, row);
        }
    }
}

/// K and V caches in which everything that nobody stored is NaN.
enum Cache {
    F32(Vec<f32>, Vec<f32>),
    F16(Vec<f16>, Vec<f16>),
    Q8(Vec<u8>, Vec<u8>),
}

impl Cache {
    fn of(kernels: &Kernels, seq: &Sequence, format: KvFormat) -> Cache {
        let s = seq.shape;
        let (kw, vw) = (s.kv_heads * s.k_dim, s.kv_heads * s.v_dim);
        let slots = CACHE_PAGES * PAGE;
        match format {
            KvFormat::F16 => {
                let (mut k, mut v) = (vec![f16::NAN; slots * kw], vec![f16::NAN; slots * vw]);
                seq.store(kernels, &seq.k, kw, CacheRowsMut::F16(&mut k));
                seq.store(kernels, &seq.v, vw, CacheRowsMut::F16(&mut v));
                Cache::F16(k, v)
            }
            KvFormat::F32 => {
                let (mut k, mut v) = (vec![f32::NAN; slots * kw], vec![f32::NAN; slots * vw]);
                seq.store(kernels, &seq.k, kw, CacheRowsMut::F32(&mut k));
                seq.store(kernels, &seq.v, vw, CacheRowsMut::F32(&mut v));
                Cache::F32(k, v)
            }
            KvFormat::Q8_0 => {
                // Scales of 0xFFFF are NaN.
                let [mut k, mut v] = [kw, vw].map(|width| vec![0xFF; slots * format.row_bytes(width)]);
                seq.store(kernels, &seq.k, kw, CacheRowsMut::Q8_0(&mut k));
                seq.store(kernels, &seq.v, vw, CacheRowsMut::Q8_0(&mut v));
                Cache::Q8(k, v)
            }
        }
    }

    fn view(&self) -> KvView<'_> {
        match self {
            Cache::F32(k, v) => KvView { k: CacheRows::F32(k), v: CacheRows::F32(v) },
            Cache::F16(k, v) => KvView { k: CacheRows::F16(k), v: CacheRows::F16(v) },
            Cache::Q8(k, v) => KvView { k: CacheRows::Q8_0(k), v: CacheRows::Q8_0(v) },
        }
    }
}

/// All heads of all rows, `block` rows per call.
fn attend(
    kernels: &Kernels,
    seq: &Sequence,
    cache: &Cache,
    q: &[f32],
    positions: &[i32],
    block: usize,
) -> Vec<f32> {
    let shape = &seq.shape;
    let (q_width, out_width) = (shape.heads * shape.k_dim, shape.heads * shape.v_dim);
    let mut scratch = Scratch::of_queries(shape, block * shape.group());
    let mut out = vec![f32::NAN; positions.len() * out_width];
    let blocks =
        q.chunks(block * q_width).zip(positions.chunks(block)).zip(out.chunks_mut(block * out_width));
    for ((q, positions), out) in blocks {
        for kv_head in 0..shape.kv_heads {
            let rows = QueryRows { q, positions, pages: &seq.pages };
            kernels.attend(
                shape,
                &cache.view(),
                &rows,
                kv_head..kv_head + 1,
                &mut scratch,
                |row, _, heads| {
                    out[row * out_width + kv_head * heads.len()..][..heads.len()].copy_from_slice(heads);
                },
            );
        }
    }
    out
}

/// Softmax attention as textbooks write it, in f64, over the numbers that a cache has stored.
fn reference(seq: &Sequence, format: KvFormat, q: &[f32], positions: &[i32]) -> Vec<f64> {
    let s = &seq.shape;
    let cache = Cache::of(&Kernels::scalar(), seq, format);
    let stored = |rows: CacheRows<'_>, width: usize| {
        let mut row = vec![0.0; width];
        let slots = (0..seq.pages.len() * PAGE).map(|j| seq.pages[j / PAGE] as usize * PAGE + j % PAGE);
        slots
            .flat_map(|slot| {
                rows.load(&Kernels::scalar(), slot, &mut row);
                row.clone()
            })
            .collect::<Vec<f32>>()
    };
    let k = stored(cache.view().k, s.kv_heads * s.k_dim);
    let v = stored(cache.view().v, s.kv_heads * s.v_dim);
    let mut out = Vec::new();
    for (row, &position) in positions.iter().enumerate() {
        for head in 0..s.heads {
            let kv_head = head / s.group();
            let q = &q[(row * s.heads + head) * s.k_dim..][..s.k_dim];
            let key = |j: usize| &k[(j * s.kv_heads + kv_head) * s.k_dim..][..s.k_dim];
            let score = |j| {
                let products = q.iter().zip(key(j)).map(|(&q, &k)| f64::from(q) * f64::from(k));
                products.sum::<f64>() * f64::from(s.scale)
            };
            let e: Vec<f64> = (0..=position as usize).map(|j| score(j).exp()).collect();
            let sum: f64 = e.iter().sum();
            out.extend((0..s.v_dim).map(|d| {
                let value = |j: usize| f64::from(v[(j * s.kv_heads + kv_head) * s.v_dim + d]);
                e.iter().enumerate().map(|(j, e)| e * value(j)).sum::<f64>() / sum
            }));
        }
    }
    out
}

fn shape(group: usize, kv_heads: usize, k_dim: usize, v_dim: usize) -> AttendShape {
    AttendShape { heads: group * kv_heads, kv_heads, k_dim, v_dim, scale: 1.0 / (k_dim as f32).sqrt() }
}

/// The rows' bits as tasks of ranges give them, two heads at a time.
fn attend_ranges(kernels: &Kernels, seq: &Sequence, cache: &Cache, q: &[f32], positions: &[i32]) -> Vec<f32> {
    let (shape, last) = (&seq.shape, *positions.iter().max().unwrap() as usize);
    let mut scratch = Scratch::of_queries(shape, positions.len() * shape.group() * 2);
    let partials = Partials::new(shape, positions.len(), last + 1);
    let rows = QueryRows { q, positions, pages: &seq.pages };
    for range in (0..=last / RANGE).rev() {
        for head in (0..shape.kv_heads).step_by(2) {
            let heads = head..(head + 2).min(shape.kv_heads);
            let view = cache.view();
            // SAFETY: one task after the other.
            unsafe { kernels.attend_range(shape, &view, &rows, heads, range, &mut scratch, (&partials, 0)) }
        }
    }
    let mut out = vec![f32::NAN; positions.len() * shape.heads * shape.v_dim];
    for (i, out) in out.chunks_exact_mut(shape.v_dim).enumerate() {
        let (row, head) = (i / shape.heads, i % shape.heads);
        // SAFETY: all tasks are done.
        unsafe { kernels.merge_ranges(&partials, row, positions[row] as usize, head, out) }
    }
    out
}

/// For rows that share positions and for rows of which some do not see the second range.
#[test]
fn ranges_as_tasks_give_the_same_bits() {
    let mut rng = Rng::new(37);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, LENGTH);
        for positions in [&[600][..], &[598, 599, 600], &[600, 511, 512, 3]] {
            let q = rng.floats(positions.len() * shape.heads * shape.k_dim, 4.0);
            for format in KvFormat::ALL {
                for kernels in [Kernels::detect(), Kernels::scalar()] {
                    let cache = Cache::of(&kernels, &seq, format);
                    let want = attend(&kernels, &seq, &cache, &q, positions, 1);
                    assert_same_bits(&attend_ranges(&kernels, &seq, &cache, &q, positions), &want);
                }
            }
        }
    }
}

/// All KV heads in one call, which reads rows in place or copies them, and one after the other.
#[test]
fn heads_do_not_depend_on_their_company() {
    let mut rng = Rng::new(38);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, LENGTH);
        let q = rng.floats(shape.heads * shape.k_dim, 4.0);
        for format in KvFormat::ALL {
            let cache = Cache::of(&Kernels::detect(), &seq, format);
            let mut out = vec![f32::NAN; shape.heads * shape.v_dim];
            let rows = QueryRows { q: &q, positions: &[600], pages: &seq.pages };
            let mut scratch = Scratch::new(&shape);
            let mut write = |_: usize, head: usize, heads: &[f32]| {
                out[head * heads.len()..][..heads.len()].copy_from_slice(heads);
            };
            let (kernels, all) = (Kernels::detect(), 0..shape.kv_heads);
            kernels.attend(&shape, &cache.view(), &rows, all, &mut scratch, &mut write);
            assert_same_bits(&out, &attend(&kernels, &seq, &cache, &q, &[600], 1));
        }
    }
}

/// What rounding keys and values does to outputs, against f32: queries within 4 (peaked weights, the hard case), keys
/// and values within 1. Outputs are within 1. For f16 at most 1e-3, 1e-4 in the mean; for Q8_0 1.5e-2, 2.5e-3.
#[test]
fn rounded_caches_stay_close_to_f32() {
    let mut rng = Rng::new(39);
    for shape in [shape(2, 2, 128, 128), shape(4, 1, 64, 64)] {
        let seq = Sequence::new(&mut rng, shape, LENGTH);
        let q = rng.floats(POSITIONS.len() * shape.heads * shape.k_dim, 4.0);
        let run = |format| {
            let cache = Cache::of(&Kernels::detect(), &seq, format);
            attend(&Kernels::detect(), &seq, &cache, &q, &POSITIONS, 1)
        };
        let exact = run(KvFormat::F32);
        for (format, most, mean) in [(KvFormat::F16, 1e-3, 1e-4), (KvFormat::Q8_0, 1.5e-2, 2.5e-3)] {
            let off: Vec<f32> = run(format).iter().zip(&exact).map(|(a, b)| (a - b).abs()).collect();
            let worst = off.iter().fold(0.0f32, |m, &x| m.max(x));
            let average = off.iter().sum::<f32>() / off.len() as f32;
            println!("{}: at most {worst:e}, mean {average:e}", format.name());
            assert!(worst <= most && average <= mean, "{}: {worst:e}, mean {average:e}", format.name());
            assert!(worst > 0.0, "{} rounds", format.name());
        }
    }
}

/// Group sizes 1, 2, 4, 8; head sizes 16 to 128, 80, and ones that do not fill registers.
fn shapes() -> Vec<AttendShape> {
    vec![
        shape(1, 3, 64, 64),
        shape(2, 2, 80, 80),
        shape(4, 1, 128, 128),
        shape(8, 2, 16, 16),
        shape(3, 1, 32, 96),
        shape(2, 2, 13, 7),
        shape(4, 3, 96, 32),
    ]
}

/// Against f64 over the same stored numbers, queries within 4 so that the softmax is peaked. Outputs
/// are means of |v| <= 1; bound 2e-6.
#[test]
fn equals_plain_attention() {
    let mut rng = Rng::new(30);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, LENGTH);
        let q = rng.floats(POSITIONS.len() * shape.heads * shape.k_dim, 4.0);
        for format in KvFormat::ALL {
            let cache = Cache::of(&Kernels::detect(), &seq, format);
            let got = attend(&Kernels::detect(), &seq, &cache, &q, &POSITIONS, 1);
            assert_close(&got, &reference(&seq, format, &q, &POSITIONS), 2e-6);
        }
    }
}

#[test]
fn every_isa_gives_the_same_bits() {
    let mut rng = Rng::new(31);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, LENGTH);
        let q = rng.floats(POSITIONS.len() * shape.heads * shape.k_dim, 4.0);
        for format in KvFormat::ALL {
            let run = |k: &Kernels| attend(k, &seq, &Cache::of(k, &seq, format), &q, &POSITIONS, 1);
            let want = run(&Kernels::scalar());
            for kernels in crate::Isa::ALL.into_iter().filter_map(Kernels::for_isa) {
                assert_same_bits(&run(&kernels), &want);
            }
        }
    }
}

/// Rows in one call, in any order, give the bits of rows alone, also when later rows see more.
#[test]
fn rows_do_not_depend_on_their_company() {
    let mut rng = Rng::new(32);
    let mut positions: Vec<i32> = (120..140).chain(POSITIONS).collect();
    rng.shuffle(&mut positions);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, LENGTH);
        let q = rng.floats(positions.len() * shape.heads * shape.k_dim, 4.0);
        for format in KvFormat::ALL {
            let cache = Cache::of(&Kernels::detect(), &seq, format);
            let run = |block| attend(&Kernels::detect(), &seq, &cache, &q, &positions, block);
            let alone = run(1);
            for block in [2, 7, positions.len()] {
                assert_same_bits(&run(block), &alone);
            }
        }
    }
}

/// The same rows on other pages, with another sequence in the rest of the cache and later positions of
/// its own in the last page.
#[test]
fn rows_do_not_depend_on_where_pages_lie_or_what_else_is_cached() {
    let mut rng = Rng::new(33);
    let shape = shape(2, 2, 48, 48);
    let width = shape.kv_heads * shape.k_dim;
    let q = rng.floats(shape.heads * shape.k_dim, 4.0);
    let long = Sequence::new(&mut rng, shape, LENGTH);
    for position in POSITIONS {
        let seen = (position as usize + 1) * width;
        let mut short = Sequence::new(&mut rng, shape, position as usize + 1);
        short.k.copy_from_slice(&long.k[..seen]);
        short.v.copy_from_slice(&long.v[..seen]);
        for format in KvFormat::ALL {
            let kernels = Kernels::detect();
            let run = |seq| attend(&kernels, seq, &Cache::of(&kernels, seq, format), &q, &[position], 1);
            assert_same_bits(&run(&short), &run(&long));
        }
    }
}

/// Scores far apart: weights underflow to 0 and earlier tiles are scaled away, without NaN. The last
/// key decides; its weight is 1 up to e^-100.
#[test]
fn a_dominant_late_key_wins() {
    let mut rng = Rng::new(34);
    let shape = AttendShape { scale: 1.0, ..shape(1, 1, 16, 16) };
    let mut seq = Sequence::new(&mut rng, shape, 130);
    seq.k[129 * 16..].fill(200.0);
    let cache = Cache::of(&Kernels::detect(), &seq, KvFormat::F32);
    let out = attend(&Kernels::detect(), &seq, &cache, &[1.0; 16], &[129], 1);
    assert_eq!(out, seq.v[129 * 16..]);
}

#[test]
fn no_rows_is_no_work() {
    let shape = shape(1, 1, 16, 16);
    let rows = QueryRows { q: &[], positions: &[], pages: &[] };
    let kv = KvView { k: CacheRows::F32(&[]), v: CacheRows::F32(&[]) };
    Kernels::detect()
        .attend(&shape, &kv, &rows, 0..1, &mut Scratch::of_queries(&shape, 0), |_, _, _| panic!("no row"));
}

/// One row over chosen blocks, all heads.
fn attend_blocks(
    kernels: &Kernels,
    seq: &Sequence,
    cache: &Cache,
    q: &[f32],
    position: i32,
    block: usize,
    blocks: &[i32],
) -> Vec<f32> {
    let mut scratch = Scratch::of_one_row(&seq.shape);
    let row = SparseRow { q, position: position as usize, pages: &seq.pages, blocks, block };
    let mut heads =
        |heads| kernels.attend_blocks(&seq.shape, &cache.view(), &row, heads, &mut scratch).to_vec();
    let group = seq.shape.group();
    let out: Vec<f32> = (0..seq.shape.kv_heads).flat_map(|h| heads(h * group..(h + 1) * group)).collect();
    let alone: Vec<f32> = (0..seq.shape.heads).flat_map(|h| heads(h..h + 1)).collect();
    assert_same_bits(&alone, &out);
    out
}

#[test]
fn all_blocks_chosen_is_dense_attention() {
    let mut rng = Rng::new(35);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, LENGTH);
        let q = rng.floats(shape.heads * shape.k_dim, 4.0);
        for (format, block) in [
            (KvFormat::F32, 4),
            (KvFormat::F16, 4),
            (KvFormat::Q8_0, 4),
            (KvFormat::F32, 48),
            (KvFormat::F32, 64),
            (KvFormat::F16, 100),
        ] {
            for kernels in [Kernels::scalar(), Kernels::detect()] {
                let cache = Cache::of(&kernels, &seq, format);
                for position in POSITIONS {
                    let blocks: Vec<i32> = (0..(position + 1) / block as i32).collect();
                    let got = attend_blocks(&kernels, &seq, &cache, &q, position, block, &blocks);
                    assert_same_bits(&got, &attend(&kernels, &seq, &cache, &q, &[position], 1));
                }
            }
        }
    }
}

/// Against f64 dense attention over a sequence of the allowed positions only; bound 2e-6. What is not
/// allowed is NaN in the cache.
#[test]
fn chosen_blocks_are_all_that_a_row_sees() {
    let mut rng = Rng::new(36);
    let (block, position) = (4, 201 - 1);
    for shape in shapes() {
        let mut seq = Sequence::new(&mut rng, shape, LENGTH);
        let q = rng.floats(shape.heads * shape.k_dim, 4.0);
        let blocks = [1, 2, 17, 40, 41, 42];
        let allowed = |p: usize| blocks.contains(&((p / block) as i32)) || p >= 200;
        let mut only = Sequence { shape, k: vec![], v: vec![], pages: vec![0] };
        let (kw, vw) = (shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim);
        for p in 0..201 {
            let (k, v) = (&mut seq.k[p * kw..][..kw], &mut seq.v[p * vw..][..vw]);
            if allowed(p) {
                only.k.extend_from_slice(k);
                only.v.extend_from_slice(v);
            } else {
                k.fill(f32::NAN);
                v.fill(f32::NAN);
            }
        }
        let last = (only.k.len() / kw - 1) as i32;
        for format in KvFormat::ALL {
            let cache = Cache::of(&Kernels::detect(), &seq, format);
            let got = attend_blocks(&Kernels::detect(), &seq, &cache, &q, position, block, &blocks);
            assert_close(&got, &reference(&only, format, &q, &[last]), 2e-6);
            let cache = Cache::of(&Kernels::scalar(), &seq, format);
            let scalar = attend_blocks(&Kernels::scalar(), &seq, &cache, &q, position, block, &blocks);
            assert_same_bits(&got, &scalar);
        }
    }
}

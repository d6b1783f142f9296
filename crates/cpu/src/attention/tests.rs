//! Against plain softmax attention in f64 over contiguous rows, and the invariances that the module
//! promises, bit for bit.

use half::f16;

use super::*;
use crate::testing::{Rng, assert_close, assert_same_bits};

const POSITIONS: [i32; 7] = [0, 1, 63, 64, 65, 127, 200];
/// Slots of the cache, in pages; a sequence of the tests takes four or fewer of them.
const CACHE_PAGES: usize = 9;

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
}

impl Cache {
    fn of(kernels: &Kernels, seq: &Sequence, half: bool) -> Cache {
        let s = seq.shape;
        let (kw, vw) = (s.kv_heads * s.k_dim, s.kv_heads * s.v_dim);
        let slots = CACHE_PAGES * PAGE;
        if half {
            let (mut k, mut v) = (vec![f16::NAN; slots * kw], vec![f16::NAN; slots * vw]);
            seq.store(kernels, &seq.k, kw, CacheRowsMut::F16(&mut k));
            seq.store(kernels, &seq.v, vw, CacheRowsMut::F16(&mut v));
            Cache::F16(k, v)
        } else {
            let (mut k, mut v) = (vec![f32::NAN; slots * kw], vec![f32::NAN; slots * vw]);
            seq.store(kernels, &seq.k, kw, CacheRowsMut::F32(&mut k));
            seq.store(kernels, &seq.v, vw, CacheRowsMut::F32(&mut v));
            Cache::F32(k, v)
        }
    }

    fn view(&self) -> KvView<'_> {
        match self {
            Cache::F32(k, v) => KvView { k: CacheRows::F32(k), v: CacheRows::F32(v) },
            Cache::F16(k, v) => KvView { k: CacheRows::F16(k), v: CacheRows::F16(v) },
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

/// Softmax attention as textbooks write it, in f64.
fn reference(seq: &Sequence, half: bool, q: &[f32], positions: &[i32]) -> Vec<f64> {
    let s = &seq.shape;
    let stored = |x: f32| f64::from(if half { f16::from_f32_const(x).to_f32_const() } else { x });
    let mut out = Vec::new();
    for (row, &position) in positions.iter().enumerate() {
        for head in 0..s.heads {
            let kv_head = head / s.group();
            let q = &q[(row * s.heads + head) * s.k_dim..][..s.k_dim];
            let key = |j: usize| &seq.k[(j * s.kv_heads + kv_head) * s.k_dim..][..s.k_dim];
            let score = |j| {
                let products = q.iter().zip(key(j)).map(|(&q, &k)| f64::from(q) * stored(k));
                products.sum::<f64>() * f64::from(s.scale)
            };
            let e: Vec<f64> = (0..=position as usize).map(|j| score(j).exp()).collect();
            let sum: f64 = e.iter().sum();
            out.extend((0..s.v_dim).map(|d| {
                let value = |j: usize| stored(seq.v[(j * s.kv_heads + kv_head) * s.v_dim + d]);
                e.iter().enumerate().map(|(j, e)| e * value(j)).sum::<f64>() / sum
            }));
        }
    }
    out
}

fn shape(group: usize, kv_heads: usize, k_dim: usize, v_dim: usize) -> AttendShape {
    AttendShape { heads: group * kv_heads, kv_heads, k_dim, v_dim, scale: 1.0 / (k_dim as f32).sqrt() }
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
    ]
}

/// Against f64 over the same stored numbers, queries within 4 so that the softmax is peaked. Outputs
/// are means of |v| <= 1; bound 2e-6.
#[test]
fn equals_plain_attention() {
    let mut rng = Rng::new(30);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, 201);
        let q = rng.floats(POSITIONS.len() * shape.heads * shape.k_dim, 4.0);
        for half in [false, true] {
            let cache = Cache::of(&Kernels::detect(), &seq, half);
            let got = attend(&Kernels::detect(), &seq, &cache, &q, &POSITIONS, 1);
            assert_close(&got, &reference(&seq, half, &q, &POSITIONS), 2e-6);
        }
    }
}

#[test]
fn every_isa_gives_the_same_bits() {
    let mut rng = Rng::new(31);
    for shape in shapes() {
        let seq = Sequence::new(&mut rng, shape, 201);
        let q = rng.floats(POSITIONS.len() * shape.heads * shape.k_dim, 4.0);
        for half in [false, true] {
            let run = |k: &Kernels| attend(k, &seq, &Cache::of(k, &seq, half), &q, &POSITIONS, 1);
            assert_same_bits(&run(&Kernels::detect()), &run(&Kernels::scalar()));
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
        let seq = Sequence::new(&mut rng, shape, 201);
        let q = rng.floats(positions.len() * shape.heads * shape.k_dim, 4.0);
        for half in [false, true] {
            let cache = Cache::of(&Kernels::detect(), &seq, half);
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
    let long = Sequence::new(&mut rng, shape, 201);
    for position in POSITIONS {
        let seen = (position as usize + 1) * width;
        let mut short = Sequence::new(&mut rng, shape, position as usize + 1);
        short.k.copy_from_slice(&long.k[..seen]);
        short.v.copy_from_slice(&long.v[..seen]);
        for half in [false, true] {
            let kernels = Kernels::detect();
            let run = |seq| attend(&kernels, seq, &Cache::of(&kernels, seq, half), &q, &[position], 1);
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
    let cache = Cache::of(&Kernels::detect(), &seq, false);
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
        let seq = Sequence::new(&mut rng, shape, 201);
        let q = rng.floats(shape.heads * shape.k_dim, 4.0);
        for (half, block) in [(false, 4), (true, 4), (false, 48), (false, 64), (true, 100)] {
            for kernels in [Kernels::scalar(), Kernels::detect()] {
                let cache = Cache::of(&kernels, &seq, half);
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
        let mut seq = Sequence::new(&mut rng, shape, 201);
        let q = rng.floats(shape.heads * shape.k_dim, 4.0);
        let blocks = [1, 2, 17, 40, 41, 42];
        let allowed = |p: usize| blocks.contains(&((p / block) as i32)) || p >= 200;
        let mut only = Sequence { shape, k: vec![], v: vec![], pages: vec![] };
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
        for half in [false, true] {
            let cache = Cache::of(&Kernels::detect(), &seq, half);
            let got = attend_blocks(&Kernels::detect(), &seq, &cache, &q, position, block, &blocks);
            assert_close(&got, &reference(&only, half, &q, &[last]), 2e-6);
            let cache = Cache::of(&Kernels::scalar(), &seq, half);
            let scalar = attend_blocks(&Kernels::scalar(), &seq, &cache, &q, position, block, &blocks);
            assert_same_bits(&got, &scalar);
        }
    }
}

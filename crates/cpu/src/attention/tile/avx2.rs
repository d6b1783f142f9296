//! The same for AVX2. Keys and values are widened in registers, once for up to three queries.

use std::arch::x86_64::*;

use minfer_runtime::KvFormat;

use super::Tile;
use crate::math::{
    LANES,
    avx2::{exp, load, store, sum_lanes_of_4, sum_lanes_of_8, to_array},
    exp as exp_of, sum_lanes,
};

/// Registers of a block of 32 numbers.
const CHUNKS: usize = KvFormat::BLOCK / LANES;

/// How numbers are read. `row` points to the first of a head's numbers in a row, which has the block and the chunk.
trait Numbers {
    /// What a block's numbers share.
    type Scale: Copy;
    unsafe fn scale(row: *const u8, block: usize) -> Self::Scale;
    /// The eight numbers of a chunk of a block.
    unsafe fn load(row: *const u8, block: usize, chunk: usize, scale: Self::Scale) -> __m256;
}

struct F32;
struct F16;
struct Q8;

impl Numbers for F32 {
    type Scale = ();

    #[inline(always)]
    unsafe fn scale(_row: *const u8, _block: usize) {}

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(row: *const u8, block: usize, chunk: usize, (): ()) -> __m256 {
        // SAFETY: the row has the chunk, by the caller's promise; the load needs no alignment.
        unsafe { _mm256_loadu_ps(row.add((block * CHUNKS + chunk) * 4 * LANES).cast()) }
    }
}

impl Numbers for F16 {
    type Scale = ();

    #[inline(always)]
    unsafe fn scale(_row: *const u8, _block: usize) {}

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(row: *const u8, block: usize, chunk: usize, (): ()) -> __m256 {
        // SAFETY: as above.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(row.add((block * CHUNKS + chunk) * 2 * LANES).cast()) })
    }
}

impl Numbers for Q8 {
    type Scale = __m256;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scale(row: *const u8, block: usize) -> __m256 {
        // SAFETY: the row has the block, which starts with its scale.
        let bits = unsafe { row.add(block * Q8_BYTES).cast::<i16>().read_unaligned() };
        _mm256_cvtph_ps(_mm_set1_epi16(bits))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(row: *const u8, block: usize, chunk: usize, scale: __m256) -> __m256 {
        // SAFETY: as above; its codes follow.
        let codes = unsafe { _mm_loadl_epi64(row.add(block * Q8_BYTES + 2 + chunk * LANES).cast()) };
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), scale)
    }
}

const Q8_BYTES: usize = KvFormat::Q8_0.row_bytes(KvFormat::BLOCK);

impl Tile<'_> {
    /// Where the numbers of row `j` begin. Only for rows that are read in place.
    #[inline(always)]
    fn row(&self, j: usize) -> *const u8 {
        debug_assert!(j < self.count);
        self.data.as_ptr().wrapping_add(j * self.stride + self.format.row_bytes(self.at))
    }
}

/// Calls the version of a function that reads the format of a tile.
macro_rules! by_format {
    ($tile:expr, $function:ident($($argument:expr),*)) => {
        match $tile.format {
            KvFormat::F32 => $function::<F32>($($argument),*),
            KvFormat::F16 => $function::<F16>($($argument),*),
            KvFormat::Q8_0 => $function::<Q8>($($argument),*),
        }
    };
}

/// How many of `left` queries are taken together: three fill the registers, and four are better two by two.
const fn together(left: usize) -> usize {
    match left {
        1 => 1,
        2 | 4 => 2,
        _ => 3,
    }
}

/// Runs a body for all of `count` queries, with the first of those that are taken together and their number.
macro_rules! for_queries {
    ($count:expr, |$first:ident, $q:ident| $body:block) => {
        let mut $first = 0;
        while $first < $count {
            let these = together($count - $first);
            match these {
                1 => {
                    const $q: usize = 1;
                    $body
                }
                2 => {
                    const $q: usize = 2;
                    $body
                }
                _ => {
                    const $q: usize = 3;
                    $body
                }
            }
            $first += these;
        }
    };
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn score(q: &[f32], keys: Tile<'_>, scale: f32, stride: usize, scores: &mut [f32]) {
    by_format!(keys, score_as(q, keys, scale, stride, scores))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn score_as<E: Numbers>(mut q: &[f32], keys: Tile<'_>, scale: f32, stride: usize, mut scores: &mut [f32]) {
    assert!(keys.is_direct(), "attend: rows that are not whole blocks");
    while !q.is_empty() {
        let count = together(q.len() / keys.dim);
        let (these, rest) = q.split_at(count * keys.dim);
        let (out, rest_out) = scores.split_at_mut((count * stride).min(scores.len()));
        match count {
            1 => score_queries::<E, 1, 8>(these, keys, scale, stride, out),
            2 => score_queries::<E, 2, 4>(these, keys, scale, stride, out),
            _ => score_queries::<E, 3, 4>(these, keys, scale, stride, out),
        }
        (q, scores) = (rest, rest_out);
    }
}

/// `Q` queries with `N` keys at a time.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn score_queries<E: Numbers, const Q: usize, const N: usize>(
    q: &[f32],
    keys: Tile<'_>,
    scale: f32,
    stride: usize,
    scores: &mut [f32],
) {
    let whole = keys.count / N * N;
    for j in (0..whole).step_by(N) {
        let sums = finish::<Q, N>(lanes_of::<E, Q, N>(q, keys, j), q, keys, j);
        for (i, sums) in sums.iter().enumerate() {
            scores[i * stride + j..][..N].iter_mut().zip(sums).for_each(|(s, sum)| *s = sum * scale);
        }
    }
    for j in whole..keys.count {
        for (i, [sum]) in finish::<Q, 1>(lanes_of::<E, Q, 1>(q, keys, j), q, keys, j).into_iter().enumerate()
        {
            scores[i * stride + j] = sum * scale;
        }
    }
}

/// Lanes of the products of `Q` queries with `N` keys from `j` on, whole registers only.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn lanes_of<E: Numbers, const Q: usize, const N: usize>(
    q: &[f32],
    keys: Tile<'_>,
    j: usize,
) -> [[__m256; N]; Q] {
    assert!(j + N <= keys.count && q.len() == Q * keys.dim);
    let mut lanes = [[_mm256_setzero_ps(); N]; Q];
    let chunks = keys.dim / LANES;
    let rows: [*const u8; N] = std::array::from_fn(|n| keys.row(j + n));
    let q = q.as_ptr();
    macro_rules! fold {
        ($block:expr, $scales:expr, $chunk:expr) => {
            // SAFETY: chunk `block * CHUNKS + chunk` is below `dim / LANES`, `Tile::new` checked that rows below `count`
            // lie within the data, and queries have `dim` numbers each.
            unsafe {
                let at = ($block * CHUNKS + $chunk) * LANES;
                let q: [__m256; Q] = std::array::from_fn(|i| _mm256_loadu_ps(q.add(i * keys.dim + at)));
                for n in 0..N {
                    let k = E::load(rows[n], $block, $chunk, $scales[n]);
                    for i in 0..Q {
                        lanes[i][n] = _mm256_fmadd_ps(q[i], k, lanes[i][n]);
                    }
                }
            }
        };
    }
    for block in 0..chunks / CHUNKS {
        // SAFETY: as above.
        let scales: [E::Scale; N] = std::array::from_fn(|n| unsafe { E::scale(rows[n], block) });
        for chunk in 0..CHUNKS {
            fold!(block, scales, chunk);
        }
    }
    if !chunks.is_multiple_of(CHUNKS) {
        let block = chunks / CHUNKS;
        // SAFETY: as above.
        let scales: [E::Scale; N] = std::array::from_fn(|n| unsafe { E::scale(rows[n], block) });
        for chunk in 0..chunks % CHUNKS {
            fold!(block, scales, chunk);
        }
    }
    lanes
}

/// Ends the dot products: the sums of the lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn finish<const Q: usize, const N: usize>(
    lanes: [[__m256; N]; Q],
    q: &[f32],
    keys: Tile<'_>,
    j: usize,
) -> [[f32; N]; Q] {
    if !keys.dim.is_multiple_of(LANES) {
        return finish_tails(lanes, q, keys, j);
    }
    let mut sums = [[0.0; N]; Q];
    let (eights, rest) = lanes.as_flattened().as_chunks::<8>();
    let (out8, out) = sums.as_flattened_mut().as_chunks_mut::<LANES>();
    eights.iter().zip(out8).for_each(|(lanes, out)| store(out, sum_lanes_of_8(*lanes)));
    let ((fours, rest), (out4, out)) = (rest.as_chunks::<4>(), out.as_chunks_mut::<4>());
    for (lanes, out) in fours.iter().zip(out4) {
        // SAFETY: four floats.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), sum_lanes_of_4(*lanes)) }
    }
    rest.iter().zip(out).for_each(|(lanes, out)| *out = sum_lanes(to_array(*lanes)));
    sums
}

/// The same with what does not fill a register.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn finish_tails<const Q: usize, const N: usize>(
    lanes: [[__m256; N]; Q],
    q: &[f32],
    keys: Tile<'_>,
    j: usize,
) -> [[f32; N]; Q] {
    let whole = keys.dim / LANES * LANES;
    let mut sums = [[0.0; N]; Q];
    for i in 0..Q {
        for n in 0..N {
            let mut lanes = to_array(lanes[i][n]);
            for (at, lane) in (whole..keys.dim).zip(&mut lanes) {
                *lane = q[i * keys.dim + at].mul_add(keys.number(j + n, at), *lane);
            }
            sums[i][n] = sum_lanes(lanes);
        }
    }
    sums
}

#[target_feature(enable = "avx2,fma")]
pub(crate) fn exp_and_sum(scores: &mut [f32], max: f32) -> f32 {
    let (scores8, tail) = scores.as_chunks_mut::<LANES>();
    let mut lanes = _mm256_setzero_ps();
    for s in scores8 {
        let w = exp(_mm256_sub_ps(load(s), _mm256_set1_ps(max)));
        lanes = _mm256_add_ps(lanes, w);
        store(s, w);
    }
    let mut lanes = to_array(lanes);
    for (s, lane) in tail.iter_mut().zip(&mut lanes) {
        *s = exp_of(*s - max);
        *lane += *s;
    }
    sum_lanes(lanes)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn accumulate(weights: &[f32], stride: usize, values: Tile<'_>, keep: &[f32], acc: &mut [f32]) {
    by_format!(values, accumulate_as(weights, stride, values, keep, acc))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate_as<E: Numbers>(
    weights: &[f32],
    stride: usize,
    values: Tile<'_>,
    keep: &[f32],
    acc: &mut [f32],
) {
    assert!(values.is_direct() && acc.len() == keep.len() * values.dim, "attend: output");
    let (blocks, chunks) = (values.dim / KvFormat::BLOCK, values.dim % KvFormat::BLOCK / LANES);
    // Block by block, so that what all queries read stays in the nearest cache.
    for block in 0..blocks {
        for_queries!(keep.len(), |first, Q| {
            accumulate_chunks::<E, Q, CHUNKS>(weights, stride, values, keep, first, block, 0, acc)
        });
    }
    for chunk in 0..chunks {
        for_queries!(keep.len(), |first, Q| {
            accumulate_chunks::<E, Q, 1>(weights, stride, values, keep, first, blocks, chunk, acc)
        });
    }
    for i in values.dim / LANES * LANES..values.dim {
        for (n, keep) in keep.iter().enumerate() {
            let products = weights[n * stride..][..values.count].iter().enumerate();
            let a = &mut acc[n * values.dim + i];
            *a = products.fold(*a * keep, |sum, (j, w)| w.mul_add(values.number(j, i), sum));
        }
    }
}

/// Accumulates `W` registers of output of `Q` queries from `first` on, over all values.
// Indices name the query and the register in several arrays at once.
#[allow(clippy::needless_range_loop)]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate_chunks<E: Numbers, const Q: usize, const W: usize>(
    weights: &[f32],
    stride: usize,
    values: Tile<'_>,
    keep: &[f32],
    first: usize,
    block: usize,
    chunk: usize,
    acc: &mut [f32],
) {
    let at = block * KvFormat::BLOCK + chunk * LANES;
    assert!((first + Q - 1) * stride + values.count <= weights.len() && at + W * LANES <= values.dim);
    let mut sums = [[_mm256_setzero_ps(); W]; Q];
    for i in 0..Q {
        let acc = &acc[(first + i) * values.dim + at..][..W * LANES];
        for (sum, acc) in sums[i].iter_mut().zip(acc.as_chunks::<LANES>().0) {
            *sum = _mm256_mul_ps(load(acc), _mm256_set1_ps(keep[first + i]));
        }
    }
    for j in 0..values.count {
        let row = values.row(j);
        // SAFETY: rows below `count` lie within the data, as `Tile::new` checked, and have the block; there is a weight
        // for each row and query.
        unsafe {
            let scale = E::scale(row, block);
            let w: [__m256; Q] =
                std::array::from_fn(|i| _mm256_set1_ps(*weights.get_unchecked((first + i) * stride + j)));
            for c in 0..W {
                let v = E::load(row, block, chunk + c, scale);
                for i in 0..Q {
                    sums[i][c] = _mm256_fmadd_ps(w[i], v, sums[i][c]);
                }
            }
        }
    }
    for i in 0..Q {
        let acc = &mut acc[(first + i) * values.dim + at..][..W * LANES];
        for (sum, acc) in sums[i].iter().zip(acc.as_chunks_mut::<LANES>().0) {
            store(acc, *sum);
        }
    }
}

/// The scalar source with wider instructions; elements stand alone, so the bits are the same.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn merge(acc: &[f32], weight: f32, keep: f32, all: &mut [f32]) {
    super::scalar::merge(acc, weight, keep, all);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn widen(rows: Tile<'_>, stride: usize, out: &mut [f32]) {
    if rows.is_direct() && rows.dim.is_multiple_of(LANES) {
        by_format!(rows, widen_as(rows, stride, out))
    } else {
        super::scalar::widen(rows, stride, out)
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn widen_as<E: Numbers>(rows: Tile<'_>, stride: usize, out: &mut [f32]) {
    for (j, out) in out.chunks_mut(stride).take(rows.count).enumerate() {
        let row = rows.row(j);
        for (block, out) in out[..rows.dim].chunks_mut(KvFormat::BLOCK).enumerate() {
            // SAFETY: rows below `count` lie within the data, as `Tile::new` checked, and have the block.
            let scale = unsafe { E::scale(row, block) };
            for (chunk, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                // SAFETY: as above, and the chunk.
                store(out, unsafe { E::load(row, block, chunk, scale) });
            }
        }
    }
}

//! What attention does with one tile of keys or values: scores, weights, weighted sum.

/// The first `count` rows of one head in a tile: row `j` is `data[j * stride..][..dim]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
    count: usize,
}

/// `q, keys, scale, scores`.
pub(crate) type ScoreFn = unsafe fn(&[f32], Tile<'_>, f32, &mut [f32]);
/// `weights, values, keep, acc`.
pub(crate) type AccumulateFn = unsafe fn(&[f32], Tile<'_>, f32, &mut [f32]);

impl<'a> Tile<'a> {
    /// # Panics
    /// When the rows do not lie within `data`; kernels rely on it.
    pub(crate) fn new(data: &'a [f32], stride: usize, dim: usize, count: usize) -> Tile<'a> {
        let end = count.checked_sub(1).map_or(0, |last| last * stride + dim);
        assert!(end <= data.len() && dim <= stride, "attend: {count} rows end at {end} of {}", data.len());
        Tile { data, stride, dim, count }
    }

    /// The first `count` of these rows.
    pub(super) fn first(self, count: usize) -> Tile<'a> {
        debug_assert!(count <= self.count);
        Tile { count: count.min(self.count), ..self }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    #[inline(always)]
    fn row(&self, j: usize) -> &'a [f32] {
        &self.data[j * self.stride..][..self.dim]
    }
}

pub(crate) mod scalar {
    use super::Tile;
    use crate::math::{LANES, exp, scalar::dot, sum_lanes};

    /// `scores[j] = dot(q, keys[j]) * scale`.
    pub(crate) fn score(q: &[f32], keys: Tile<'_>, scale: f32, scores: &mut [f32]) {
        for (j, s) in scores.iter_mut().enumerate() {
            *s = dot(q, keys.row(j)) * scale;
        }
    }

    /// Turns scores into `exp(score - max)` and returns their sum, in lanes.
    pub(crate) fn exp_and_sum(scores: &mut [f32], max: f32) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for (j, s) in scores.iter_mut().enumerate() {
            *s = exp(*s - max);
            lanes[j % LANES] += *s;
        }
        sum_lanes(lanes)
    }

    /// `acc = acc * keep`, then `acc += weights[j] * values[j]` with FMA, `j` ascending.
    pub(crate) fn accumulate(weights: &[f32], values: Tile<'_>, keep: f32, acc: &mut [f32]) {
        for a in acc.iter_mut() {
            *a *= keep;
        }
        for (j, w) in weights.iter().enumerate() {
            for (a, v) in acc.iter_mut().zip(values.row(j)) {
                *a = w.mul_add(*v, *a);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use std::arch::x86_64::*;

    use super::Tile;
    use crate::math::{
        LANES,
        avx2::{exp, finish_dot, load, store, sum_lanes_of_4, to_array},
        exp as exp_of, sum_lanes,
    };

    /// Keys that are scored together, enough independent chains to hide the latency of FMA.
    const KEYS: usize = 8;
    /// Registers of output that are accumulated together, for the same reason.
    const WIDE: usize = 8;

    /// Lanes of the products of `q` with `N` keys from `j` on, whole registers only.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn lanes_of<const N: usize>(q: &[f32], keys: Tile<'_>, j: usize) -> [__m256; N] {
        assert!(j + N <= keys.count && q.len() <= keys.dim);
        let mut lanes = [_mm256_setzero_ps(); N];
        for (c, q) in q.as_chunks::<LANES>().0.iter().enumerate() {
            let q = load(q);
            for (n, lanes) in lanes.iter_mut().enumerate() {
                // SAFETY: `Tile::new` checked that rows below `count` lie within `data`, and chunk `c` of
                // a row ends at or before `q.len() <= dim`.
                let k = unsafe { _mm256_loadu_ps(keys.data.as_ptr().add((j + n) * keys.stride + c * LANES)) };
                *lanes = _mm256_fmadd_ps(q, k, *lanes);
            }
        }
        lanes
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn score(q: &[f32], keys: Tile<'_>, scale: f32, scores: &mut [f32]) {
        let whole = q.len() / LANES * LANES;
        let (blocks, rest) = scores.as_chunks_mut::<KEYS>();
        let rest_from = blocks.len() * KEYS;
        for (block, out) in blocks.iter_mut().enumerate() {
            let lanes: [__m256; KEYS] = lanes_of(q, keys, block * KEYS);
            if whole == q.len() {
                let [a, b, c, d, e, f, g, h] = lanes;
                let sums = _mm256_set_m128(sum_lanes_of_4([e, f, g, h]), sum_lanes_of_4([a, b, c, d]));
                store(out, _mm256_mul_ps(sums, _mm256_set1_ps(scale)));
            } else {
                for (n, (out, lanes)) in out.iter_mut().zip(lanes).enumerate() {
                    *out = finish_dot(lanes, &q[whole..], &keys.row(block * KEYS + n)[whole..]) * scale;
                }
            }
        }
        for (n, out) in rest.iter_mut().enumerate() {
            let [lanes] = lanes_of(q, keys, rest_from + n);
            *out = finish_dot(lanes, &q[whole..], &keys.row(rest_from + n)[whole..]) * scale;
        }
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

    /// Accumulates `N` registers of output, elements `at..at + 8 N`, over all values.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn accumulate_block<const N: usize>(
        weights: &[f32],
        values: Tile<'_>,
        keep: f32,
        at: usize,
        acc: &mut [f32],
    ) {
        let acc = &mut acc.as_chunks_mut::<LANES>().0[..N];
        assert!(weights.len() <= values.count && at + N * LANES <= values.dim);
        let mut sums = [_mm256_setzero_ps(); N];
        for (sum, acc) in sums.iter_mut().zip(acc.iter()) {
            *sum = _mm256_mul_ps(load(acc), _mm256_set1_ps(keep));
        }
        for (j, w) in weights.iter().enumerate() {
            let w = _mm256_set1_ps(*w);
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `Tile::new` checked that rows below `count` lie within `data`; the elements
                // end at or before `dim`.
                let v =
                    unsafe { _mm256_loadu_ps(values.data.as_ptr().add(j * values.stride + at + n * LANES)) };
                *sum = _mm256_fmadd_ps(w, v, *sum);
            }
        }
        for (sum, acc) in sums.iter().zip(acc) {
            store(acc, *sum);
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn accumulate(weights: &[f32], values: Tile<'_>, keep: f32, acc: &mut [f32]) {
        let mut at = 0;
        while acc.len() - at >= WIDE * LANES {
            accumulate_block::<WIDE>(weights, values, keep, at, &mut acc[at..]);
            at += WIDE * LANES;
        }
        while acc.len() - at >= 2 * LANES {
            accumulate_block::<2>(weights, values, keep, at, &mut acc[at..]);
            at += 2 * LANES;
        }
        while acc.len() - at >= LANES {
            accumulate_block::<1>(weights, values, keep, at, &mut acc[at..]);
            at += LANES;
        }
        for (e, a) in acc.iter_mut().enumerate().skip(at) {
            let products = weights.iter().enumerate();
            *a = products.fold(*a * keep, |sum, (j, w)| w.mul_add(values.row(j)[e], sum));
        }
    }
}

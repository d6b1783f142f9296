//! Weights of hyper-connections, whose mixing matrix is balanced by Sinkhorn's iteration.
//!
//! In: the row `m` that a layer computes and its constants. Out: weights to read, to write and to mix streams.
//! Sums run in the order of streams from the first, so four streams fit registers: a sum over rows of the matrix
//! adds registers, and a sum over columns adds those of the transposed matrix.

use minfer_graph::HyperMix;

use crate::Kernels;

/// `h, m, weight, [pre, post, comb]`.
pub(crate) type MixerFn = unsafe fn(&HyperMix, &[f32], &[f32], [&mut [f32]; 3]);

impl Kernels {
    /// Weights of a hyper-connection from a row `m` and `weight = base | scale [3]`, as [`HyperMix`] says.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn hyper_mix(&self, h: &HyperMix, m: &[f32], weight: &[f32], [pre, post, comb]: [&mut [f32]; 3]) {
        assert!(h.n > 0 && m.len() == h.width() && weight.len() == h.width() + 3, "hyper_mix: row or weight");
        assert!(pre.len() == h.n && post.len() == h.n && comb.len() == h.n * h.n, "hyper_mix: outputs");
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.hyper_mix)(h, m, weight, [pre, post, comb]) }
    }
}

pub(crate) mod scalar {
    use minfer_graph::HyperMix;

    use crate::math::exp;

    #[inline(always)]
    pub(crate) fn hyper_mix(h: &HyperMix, m: &[f32], weight: &[f32], [pre, post, comb]: [&mut [f32]; 3]) {
        let n = h.n;
        let (base, scale) = weight.split_at(h.width());
        let logit = |i: usize, scale: f32| m[i].mul_add(scale, base[i]);
        let sigmoid = |x: f32| 1.0 / (1.0 + exp(-x));
        for i in 0..n {
            pre[i] = sigmoid(logit(i, scale[0])) + h.eps;
            post[i] = 2.0 * sigmoid(logit(n + i, scale[1]));
        }
        for (i, row) in comb.chunks_exact_mut(n).enumerate() {
            row.iter_mut().enumerate().for_each(|(j, c)| *c = logit((2 + i) * n + j, scale[2]));
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter_mut().for_each(|c| *c = exp(*c - max));
            let sum: f32 = row.iter().sum();
            row.iter_mut().for_each(|c| *c = *c / sum + h.eps);
        }
        balance_columns(comb, n, h.eps);
        for _ in 1..h.iterations {
            for row in comb.chunks_exact_mut(n) {
                let sum = row.iter().sum::<f32>() + h.eps;
                row.iter_mut().for_each(|c| *c /= sum);
            }
            balance_columns(comb, n, h.eps);
        }
    }

    #[inline(always)]
    fn balance_columns(comb: &mut [f32], n: usize, eps: f32) {
        for j in 0..n {
            let sum = comb.iter().skip(j).step_by(n).sum::<f32>() + eps;
            comb.iter_mut().skip(j).step_by(n).for_each(|c| *c /= sum);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use std::arch::x86_64::*;

    use minfer_graph::HyperMix;

    use crate::math::{
        LANES,
        avx2::{exp, load, store, to_array},
    };

    /// Streams that fill half a register.
    const N: usize = LANES / 2;
    /// The matrix, a row in each register.
    type Matrix = [__m128; N];

    /// Any other number of streams takes the scalar source.
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn hyper_mix(h: &HyperMix, m: &[f32], weight: &[f32], [pre, post, comb]: [&mut [f32]; 3]) {
        if h.n != N {
            return super::scalar::hyper_mix(h, m, weight, [pre, post, comb]);
        }
        let (base, scale) = weight.split_at(h.width());
        let (m, base) = (m.as_chunks::<LANES>().0, base.as_chunks::<LANES>().0);
        let logits = |i: usize, scale: __m256| _mm256_fmadd_ps(load(&m[i]), scale, load(&base[i]));
        let outer = _mm256_set_m128(_mm_set1_ps(scale[1]), _mm_set1_ps(scale[0]));
        let outer = to_array(sigmoid(logits(0, outer)));
        for (i, (pre, post)) in pre.iter_mut().zip(post).enumerate() {
            *pre = outer[i] + h.eps;
            *post = 2.0 * outer[N + i];
        }
        let [upper, lower] = [1, 2].map(|i| exps_of_halves(logits(i, _mm256_set1_ps(scale[2]))));
        let halves = |x: __m256| (_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let ((a, b), (c, d)) = (halves(upper), halves(lower));
        let [a, b, c, d] = balance(h, [a, b, c, d]);
        for (out, rows) in comb.as_chunks_mut::<LANES>().0.iter_mut().zip([(a, b), (c, d)]) {
            store(out, _mm256_set_m128(rows.1, rows.0));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn sigmoid(x: __m256) -> __m256 {
        let (one, minus_x) = (_mm256_set1_ps(1.0), _mm256_xor_ps(x, _mm256_set1_ps(-0.0)));
        _mm256_div_ps(one, _mm256_add_ps(one, exp(minus_x)))
    }

    /// `e^(x - largest of the half)`; NaN is never the largest.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn exps_of_halves(x: __m256) -> __m256 {
        let max = _mm256_max_ps(x, _mm256_set1_ps(f32::NEG_INFINITY));
        let max = _mm256_max_ps(max, _mm256_permute_ps::<0b01_00_11_10>(max));
        let max = _mm256_max_ps(max, _mm256_permute_ps::<0b10_11_00_01>(max));
        exp(_mm256_sub_ps(x, max))
    }

    /// From the numerators of the rows' softmax to the balanced matrix.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn balance(h: &HyperMix, c: Matrix) -> Matrix {
        let eps = _mm_set1_ps(h.eps);
        let mut c = divide_rows(c, sum(transpose(c))).map(|row| _mm_add_ps(row, eps));
        for i in 0..h.iterations.max(1) {
            if i > 0 {
                c = divide_rows(c, _mm_add_ps(sum(transpose(c)), eps));
            }
            let columns = _mm_add_ps(sum(c), eps);
            c = c.map(|row| _mm_div_ps(row, columns));
        }
        c
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn sum([a, b, c, d]: Matrix) -> __m128 {
        _mm_add_ps(_mm_add_ps(_mm_add_ps(a, b), c), d)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn transpose([a, b, c, d]: Matrix) -> Matrix {
        let (ab_lo, ab_hi) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let (cd_lo, cd_hi) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        [
            _mm_movelh_ps(ab_lo, cd_lo),
            _mm_movehl_ps(cd_lo, ab_lo),
            _mm_movelh_ps(ab_hi, cd_hi),
            _mm_movehl_ps(cd_hi, ab_hi),
        ]
    }

    /// Divides row `i` by `sums[i]`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn divide_rows([a, b, c, d]: Matrix, sums: __m128) -> Matrix {
        [
            _mm_div_ps(a, _mm_permute_ps::<0b00_00_00_00>(sums)),
            _mm_div_ps(b, _mm_permute_ps::<0b01_01_01_01>(sums)),
            _mm_div_ps(c, _mm_permute_ps::<0b10_10_10_10>(sums)),
            _mm_div_ps(d, _mm_permute_ps::<0b11_11_11_11>(sums)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close, assert_same_bits, with_edge_cases};

    fn run(k: &Kernels, h: &HyperMix, m: &[f32], weight: &[f32]) -> [Vec<f32>; 3] {
        let [mut pre, mut post, mut comb] = [vec![9.0; h.n], vec![9.0; h.n], vec![9.0; h.n * h.n]];
        k.hyper_mix(h, m, weight, [&mut pre, &mut post, &mut comb]);
        [pre, post, comb]
    }

    #[test]
    fn every_isa_gives_the_same_bits() {
        let mut rng = Rng::new(73);
        for (n, iterations) in [(4, 20), (4, 1), (4, 0), (1, 3), (3, 20), (8, 5)] {
            let h = HyperMix { n, iterations, eps: 1e-6 };
            for range in [2.0, 300.0] {
                let (m, weight) = (rng.floats(h.width(), range), rng.floats(h.width() + 3, range));
                for m in [m.clone(), with_edge_cases(m)] {
                    let got = run(&Kernels::detect(), &h, &m, &weight);
                    for (got, want) in got.iter().zip(run(&Kernels::scalar(), &h, &m, &weight)) {
                        assert_same_bits(got, &want);
                    }
                }
            }
        }
    }

    /// Against the same formula in f64; weights of at most 2 after some 40 divisions: bound 1e-5. The columns sum
    /// to one within the same.
    #[test]
    fn mixing_weights_are_balanced() {
        let mut rng = Rng::new(72);
        let h = HyperMix { n: 4, iterations: 20, eps: 1e-6 };
        let (m, weight) = (rng.floats(24, 2.0), rng.floats(27, 1.5));
        let [pre, post, comb] = run(&Kernels::detect(), &h, &m, &weight);
        let logit = |i: usize, s: usize| f64::from(m[i]) * f64::from(weight[24 + s]) + f64::from(weight[i]);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let want: Vec<f64> = (0..4).map(|i| sigmoid(logit(i, 0)) + 1e-6).collect();
        assert_close(&pre, &want, 1e-6);
        let want: Vec<f64> = (0..4).map(|i| 2.0 * sigmoid(logit(4 + i, 1))).collect();
        assert_close(&post, &want, 1e-6);
        let mut c: Vec<f64> = (0..16).map(|i| logit(8 + i, 2).exp()).collect();
        let scale = |c: &mut Vec<f64>, row: bool, before: f64, after: f64| {
            for i in 0..4 {
                let at = |j: usize| if row { 4 * i + j } else { 4 * j + i };
                let sum = (0..4).map(|j| c[at(j)]).sum::<f64>() + before;
                (0..4).for_each(|j| c[at(j)] = c[at(j)] / sum + after);
            }
        };
        scale(&mut c, true, 0.0, 1e-6);
        scale(&mut c, false, 1e-6, 0.0);
        for _ in 1..20 {
            scale(&mut c, true, 1e-6, 0.0);
            scale(&mut c, false, 1e-6, 0.0);
        }
        assert_close(&comb, &c, 1e-5);
        let columns: Vec<f32> = (0..4).map(|j| (0..4).map(|i| comb[4 * i + j]).sum()).collect();
        assert_close(&columns, &[1.0; 4], 1e-5);
    }
}

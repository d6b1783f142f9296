//! The gated delta rule (Yang et al. 2024) of one value head, token by token.
//!
//! The state `S` is `[k_dim, v_dim]`. With a unit key `k`, a scaled unit query `q`, a value `v`, a decay
//! `d` in 0..1 and a rate `beta`, one token is
//!
//! ```text
//! S[i][e] = S[i][e] * d[i]                           one rounding
//! m[e]    = fma(k[i], S[i][e], m[e])                 i ascending, from 0
//! delta[e] = beta * (v[e] - m[e])
//! S[i][e] = fma(k[i], delta[e], S[i][e])
//! out[e]  = fma(q[i], S[i][e], out[e])               i ascending, from 0
//! ```
//!
//! where `d[i]` is one number for the head, or one for each key channel (Kimi delta attention). Columns of `S` stand
//! alone, so callers may give any range of them, and the bits do not depend on it, nor on how the tokens are cut
//! into steps. Where states live between steps is the caller's affair.
//! [`chunked`] is the algebraically equal form for devices that prefer matrix products.

pub mod chunked;

use crate::Kernels;

/// `S, q, k, v, decay, beta, out`.
pub(crate) type StepFn = unsafe fn(&mut [f32], &[f32], &[f32], &[f32], Decay<'_>, f32, &mut [f32]);

/// Under the square root of a norm, against division by zero.
const EPS: f32 = 1e-6;

/// What is left of the state after one token.
#[derive(Clone, Copy, Debug)]
pub enum Decay<'a> {
    /// The same for all of it.
    Head(f32),
    /// One number for each row, `[k_dim]`.
    Channels(&'a [f32]),
}

/// One token of one value head.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Token<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub decay: Decay<'a>,
    pub beta: f32,
}

impl Kernels {
    /// `out = x * (scale / sqrt(sum(x^2) + 1e-6))`, the sum in lanes.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn unit(&self, x: &[f32], scale: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "unit: lengths differ");
        // SAFETY: `Kernels` holds only what this machine can run.
        let r = scale / (unsafe { (self.dot)(x, x) } + EPS).sqrt();
        out.iter_mut().zip(x).for_each(|(o, x)| *o = x * r);
    }

    /// `out = exp(x)`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn exps(&self, x: &[f32], out: &mut [f32]) {
        out.copy_from_slice(x);
        // SAFETY: as in `unit`. Nothing is subtracted, and the sum is of no interest.
        unsafe { (self.exp_and_sum)(out, 0.0) };
    }

    /// One token: changes `state` (`[k_dim, columns]`) and fills `out` (`[columns]`); `t.v` has the same columns.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn delta_step(&self, state: &mut [f32], t: &Token<'_>, out: &mut [f32]) {
        assert!(t.q.len() == t.k.len() && t.v.len() == out.len(), "delta_step: heads");
        assert_eq!(state.len(), t.k.len() * t.v.len(), "delta_step: state");
        if let Decay::Channels(decay) = t.decay {
            assert_eq!(decay.len(), t.k.len(), "delta_step: decays");
        }
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.delta_step)(state, t.q, t.k, t.v, t.decay, t.beta, out) }
    }
}

pub(crate) mod scalar {
    use super::Decay;

    pub(crate) fn step(
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        decay: Decay<'_>,
        beta: f32,
        out: &mut [f32],
    ) {
        match decay {
            Decay::Head(d) => column_range(state, q, k, v, std::iter::repeat(d), beta, out, 0),
            Decay::Channels(d) => column_range(state, q, k, v, d.iter().copied(), beta, out, 0),
        }
    }

    /// Columns from `from` on, one at a time.
    #[allow(clippy::too_many_arguments)]
    #[inline]
    pub(super) fn column_range(
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        decay: impl Iterator<Item = f32> + Clone,
        beta: f32,
        out: &mut [f32],
        from: usize,
    ) {
        let width = v.len();
        for e in from..width {
            let mut m = 0.0;
            for ((row, k), decay) in state.chunks_exact_mut(width).zip(k).zip(decay.clone()) {
                row[e] *= decay;
                m = k.mul_add(row[e], m);
            }
            let delta = beta * (v[e] - m);
            out[e] = 0.0;
            for ((row, k), q) in state.chunks_exact_mut(width).zip(k).zip(q) {
                row[e] = k.mul_add(delta, row[e]);
                out[e] = q.mul_add(row[e], out[e]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use std::arch::x86_64::*;

    use super::Decay;
    use crate::math::{
        LANES,
        avx2::{load, store},
    };

    /// Registers of columns at a time: with their deltas and sums, what the register file holds.
    const WIDE: usize = 4;

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn step(
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        decay: Decay<'_>,
        beta: f32,
        out: &mut [f32],
    ) {
        match decay {
            Decay::Head(d) => columns(state, q, k, v, std::iter::repeat(d), beta, out),
            Decay::Channels(d) => columns(state, q, k, v, d.iter().copied(), beta, out),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn columns(
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        v: &[f32],
        decay: impl Iterator<Item = f32> + Clone,
        beta: f32,
        out: &mut [f32],
    ) {
        let mut at = 0;
        while v.len() - at >= WIDE * LANES {
            let deltas = deltas::<WIDE>(state, k, v, decay.clone(), beta, at);
            update(state, q, k, &deltas, decay.clone(), out, at);
            at += WIDE * LANES;
        }
        while v.len() - at >= LANES {
            let deltas = deltas::<1>(state, k, v, decay.clone(), beta, at);
            update(state, q, k, &deltas, decay.clone(), out, at);
            at += LANES;
        }
        super::scalar::column_range(state, q, k, v, decay, beta, out, at);
    }

    /// What the keys' values lack, for `N` registers of columns from `at` on. The decayed state is not stored:
    /// to compute it again is cheaper, and gives the same bits.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn deltas<const N: usize>(
        state: &mut [f32],
        k: &[f32],
        v: &[f32],
        decay: impl Iterator<Item = f32>,
        beta: f32,
        at: usize,
    ) -> [__m256; N] {
        let mut m = [_mm256_setzero_ps(); N];
        for ((row, k), decay) in state.chunks_exact_mut(v.len()).zip(k).zip(decay) {
            let (k, decay) = (_mm256_set1_ps(*k), _mm256_set1_ps(decay));
            for (s, m) in registers::<N>(row, at).iter().zip(&mut m) {
                *m = _mm256_fmadd_ps(k, _mm256_mul_ps(load(s), decay), *m);
            }
        }
        for (delta, v) in m.iter_mut().zip(v[at..].as_chunks::<LANES>().0) {
            *delta = _mm256_mul_ps(_mm256_set1_ps(beta), _mm256_sub_ps(load(v), *delta));
        }
        m
    }

    /// New state and outputs of `N` registers of columns from `at` on.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn update<const N: usize>(
        state: &mut [f32],
        q: &[f32],
        k: &[f32],
        deltas: &[__m256; N],
        decay: impl Iterator<Item = f32>,
        out: &mut [f32],
        at: usize,
    ) {
        let width = out.len();
        let mut sums = [_mm256_setzero_ps(); N];
        for (((row, k), q), decay) in state.chunks_exact_mut(width).zip(k).zip(q).zip(decay) {
            let (k, q, decay) = (_mm256_set1_ps(*k), _mm256_set1_ps(*q), _mm256_set1_ps(decay));
            for ((s, delta), sum) in registers::<N>(row, at).iter_mut().zip(deltas).zip(&mut sums) {
                let new = _mm256_fmadd_ps(k, *delta, _mm256_mul_ps(load(s), decay));
                *sum = _mm256_fmadd_ps(q, new, *sum);
                store(s, new);
            }
        }
        for (out, sum) in registers::<N>(out, at).iter_mut().zip(sums) {
            store(out, sum);
        }
    }

    #[inline(always)]
    fn registers<const N: usize>(row: &mut [f32], at: usize) -> &mut [[f32; LANES]] {
        &mut row[at..].as_chunks_mut::<LANES>().0[..N]
    }
}

#[cfg(test)]
mod tests;

//! Rows of residual streams (hyper-connections): `n` streams of equal width, one after the other.
//!
//! Each stream is handled alone, and sums run in stream order: a stream after the other, which memory serves faster
//! than several side by side. Weights of hyper-connections are in `mixer`.

pub(crate) mod mixer;

use crate::Kernels;

impl Kernels {
    /// `out = scale * (h_0 + h_1 + ..)`, `h` being `[h.len() / out.len(), out.len()]`.
    ///
    /// # Panics
    /// When `h` is not whole streams; so do the other operations of this module.
    pub fn stream_sum(&self, h: &[f32], scale: f32, out: &mut [f32]) {
        let width = out.len();
        assert!(width > 0 && h.len().is_multiple_of(width), "stream_sum: rows");
        out.fill(0.0);
        for stream in h.chunks_exact(width) {
            out.iter_mut().zip(stream).for_each(|(o, x)| *o += x);
        }
        out.iter_mut().for_each(|o| *o *= scale);
    }

    /// `out[s] = dot(a_s, b_s) * scale`, each dot product in lanes.
    pub fn stream_dot(&self, a: &[f32], b: &[f32], scale: f32, out: &mut [f32]) {
        assert!(a.len() == b.len() && !a.is_empty() && a.len().is_multiple_of(out.len()), "stream_dot: rows");
        let width = a.len() / out.len();
        for (o, (a, b)) in out.iter_mut().zip(a.chunks_exact(width).zip(b.chunks_exact(width))) {
            // SAFETY: `Kernels` holds only what this machine can run.
            *o = unsafe { (self.dot)(a, b) } * scale;
        }
    }

    /// `out_s = y * weights[s]`.
    pub fn stream_mul(&self, y: &[f32], weights: &[f32], out: &mut [f32]) {
        assert!(out.len() == y.len() * weights.len() && !y.is_empty(), "stream_mul: rows");
        for (out, w) in out.chunks_exact_mut(y.len()).zip(weights) {
            out.iter_mut().zip(y).for_each(|(o, y)| *o = y * w);
        }
    }

    /// `out_s = weights[s] * y + h_s`, rounded once.
    pub fn stream_add(&self, h: &[f32], y: &[f32], weights: &[f32], out: &mut [f32]) {
        assert!(h.len() == out.len() && !y.is_empty(), "stream_add: rows");
        assert_eq!(out.len(), y.len() * weights.len(), "stream_add: rows");
        let streams = h.chunks_exact(y.len()).zip(out.chunks_exact_mut(y.len()));
        for ((h, out), w) in streams.zip(weights) {
            // SAFETY: `Kernels` holds only what this machine can run.
            unsafe { (self.stream_add)(h, *w, y, out) }
        }
    }
}

impl Kernels {
    /// `out = sum_s weights[s] * x_s`, in stream order from 0, each term rounded once.
    pub fn stream_weighted_sum(&self, x: &[f32], weights: &[f32], out: &mut [f32]) {
        assert!(x.len() == out.len() * weights.len() && !out.is_empty(), "stream_weighted_sum: rows");
        out.fill(0.0);
        for (x, w) in x.chunks_exact(out.len()).zip(weights) {
            // SAFETY: `Kernels` holds only what this machine can run.
            unsafe { (self.stream_fold)(*w, x, out) }
        }
    }

    /// `out_k = post[k] * y + sum_j comb[j][k] * x_j`, `j` ascending, each term rounded once.
    pub fn stream_mix(&self, x: &[f32], y: &[f32], post: &[f32], comb: &[f32], out: &mut [f32]) {
        let n = post.len();
        assert!(x.len() == out.len() && x.len() == y.len() * n && !y.is_empty(), "stream_mix: rows");
        assert_eq!(comb.len(), n * n, "stream_mix: weights");
        for (k, out) in out.chunks_exact_mut(y.len()).enumerate() {
            out.iter_mut().zip(y).for_each(|(o, y)| *o = post[k] * y);
            for (j, x) in x.chunks_exact(y.len()).enumerate() {
                // SAFETY: as above.
                unsafe { (self.stream_fold)(comb[j * n + k], x, out) }
            }
        }
    }
}

pub(crate) mod scalar {
    /// `out = w * x + out`.
    #[inline(always)]
    pub(crate) fn fold(w: f32, x: &[f32], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = w.mul_add(*x, *o);
        }
    }

    /// `out = w * y + h`.
    #[inline(always)]
    pub(crate) fn add(h: &[f32], w: f32, y: &[f32], out: &mut [f32]) {
        for ((o, h), y) in out.iter_mut().zip(h).zip(y) {
            *o = w.mul_add(*y, *h);
        }
    }
}

/// The scalar source with wider instructions; elements stand alone, so the bits are the same.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn fold(w: f32, x: &[f32], out: &mut [f32]) {
        super::scalar::fold(w, x, out);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn add(h: &[f32], w: f32, y: &[f32], out: &mut [f32]) {
        super::scalar::add(h, w, y, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close, assert_same_bits};

    /// Against f64; up to 4 terms of |x| <= 2, or 37 products: bound 2e-6.
    #[test]
    fn equal_their_definitions_on_every_isa() {
        let mut rng = Rng::new(70);
        for (n, w) in [(1, 1), (4, 37), (3, 64)] {
            let (a, b) = (rng.floats(n * w, 2.0), rng.floats(n * w, 2.0));
            let (y, weights) = (rng.floats(w, 2.0), rng.floats(n, 2.0));
            let f = |x: f32| f64::from(x);
            let sum: Vec<f64> = (0..w).map(|i| 0.5 * (0..n).map(|s| f(a[s * w + i])).sum::<f64>()).collect();
            let dot: Vec<f64> =
                (0..n).map(|s| 0.25 * (s * w..(s + 1) * w).map(|i| f(a[i]) * f(b[i])).sum::<f64>()).collect();
            let mul: Vec<f64> = (0..n * w).map(|i| f(weights[i / w]) * f(y[i % w])).collect();
            let add: Vec<f64> = mul.iter().zip(&a).map(|(m, a)| m + f(*a)).collect();
            let run = |k: &Kernels| {
                let mut out = [vec![9.0; w], vec![9.0; n], vec![9.0; n * w], vec![9.0; n * w]];
                k.stream_sum(&a, 0.5, &mut out[0]);
                k.stream_dot(&a, &b, 0.25, &mut out[1]);
                k.stream_mul(&y, &weights, &mut out[2]);
                k.stream_add(&a, &y, &weights, &mut out[3]);
                out
            };
            let (got, definition) = (run(&Kernels::detect()), run(&Kernels::scalar()));
            for ((got, definition), want) in got.iter().zip(&definition).zip([sum, dot, mul, add]) {
                assert_same_bits(got, definition);
                assert_close(got, &want, 2e-6);
            }
        }
    }

    /// Against f64; 5 terms of |x| <= 4: bound 2e-6.
    #[test]
    fn weighted_sums_equal_their_definitions_on_every_isa() {
        let mut rng = Rng::new(71);
        for (n, w) in [(1, 1), (4, 37), (3, 64)] {
            let (x, y) = (rng.floats(n * w, 2.0), rng.floats(w, 2.0));
            let (post, comb) = (rng.floats(n, 2.0), rng.floats(n * n, 2.0));
            let f = |x: f32| f64::from(x);
            let sum: Vec<f64> = (0..w).map(|i| (0..n).map(|s| f(post[s]) * f(x[s * w + i])).sum()).collect();
            let mix: Vec<f64> = (0..n * w)
                .map(|at| {
                    let (k, i) = (at / w, at % w);
                    let streams: f64 = (0..n).map(|j| f(comb[j * n + k]) * f(x[j * w + i])).sum();
                    f(post[k]) * f(y[i]) + streams
                })
                .collect();
            let run = |k: &Kernels| {
                let mut out = [vec![9.0; w], vec![9.0; n * w]];
                k.stream_weighted_sum(&x, &post, &mut out[0]);
                k.stream_mix(&x, &y, &post, &comb, &mut out[1]);
                out
            };
            let (got, definition) = (run(&Kernels::detect()), run(&Kernels::scalar()));
            for ((got, definition), want) in got.iter().zip(&definition).zip([sum, mix]) {
                assert_same_bits(got, definition);
                assert_close(got, &want, 2e-6);
            }
        }
    }
}

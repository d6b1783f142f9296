//! Element-by-element operations on a row: sums (residuals, biases), products, SwiGLU, activations.
//!
//! Every element stands alone, so where the compiler vectorises a loop the AVX2 kernel is the scalar
//! source compiled once more with the wider instructions; only the exponential is written out.

use minfer_graph::Act;

use crate::Kernels;

impl Kernels {
    /// `out = a + b`: a residual, or a bias on one row.
    ///
    /// # Panics
    /// When the lengths differ; so do the other operations of this module.
    pub fn add(&self, a: &[f32], b: &[f32], out: &mut [f32]) {
        assert!(a.len() == out.len() && b.len() == out.len(), "add: lengths differ");
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.add)(a, b, out) }
    }

    /// `out = a * b`.
    pub fn mul(&self, a: &[f32], b: &[f32], out: &mut [f32]) {
        assert!(a.len() == out.len() && b.len() == out.len(), "mul: lengths differ");
        // SAFETY: as in `add`.
        unsafe { (self.mul)(a, b, out) }
    }

    /// `out = x / (1 + exp(-x))`.
    pub fn silu(&self, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "silu: lengths differ");
        // SAFETY: as in `add`.
        unsafe { (self.silu)(x, out) }
    }

    /// `out = silu(gate) * up`, the bits of [`Kernels::silu`] followed by [`Kernels::mul`].
    pub fn swiglu(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len(), "swiglu: lengths differ");
        // SAFETY: as in `add`.
        unsafe { (self.swiglu)(gate, up, out) }
    }

    /// `out = silu(min(gate, limit)) * clamp(up, -limit, limit)`.
    pub fn clamped_swiglu(&self, gate: &[f32], up: &[f32], limit: f32, out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len(), "clamped_swiglu: lengths differ");
        for ((o, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            let gate = if gate > limit { limit } else { gate };
            let up = if up > limit { limit } else { up };
            *o = scalar::silu_of(gate) * if up < -limit { -limit } else { up };
        }
    }

    /// `sum = a * b + sum`, rounded once: one term of a sum of rows.
    pub fn fold(&self, a: &[f32], b: &[f32], sum: &mut [f32]) {
        assert!(a.len() == sum.len() && b.len() == sum.len(), "fold: lengths differ");
        // SAFETY: as in `add`.
        unsafe { (self.fold)(a, b, sum) }
    }

    /// `out = post * f(pre * x)`.
    pub fn act(&self, act: Act, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "act: lengths differ");
        // SAFETY: as in `add`.
        unsafe { (self.act)(act, x, out) }
    }
}

pub(crate) mod scalar {
    use minfer_graph::{Act, ActKind};

    use crate::math::exp;

    #[inline(always)]
    pub(crate) fn fold(a: &[f32], b: &[f32], sum: &mut [f32]) {
        for ((s, a), b) in sum.iter_mut().zip(a).zip(b) {
            *s = a.mul_add(*b, *s);
        }
    }

    #[inline(always)]
    pub(crate) fn act(act: Act, x: &[f32], out: &mut [f32]) {
        match act.kind {
            ActKind::Silu => each(act, x, out, silu_of),
            ActKind::Sigmoid => each(act, x, out, |x| 1.0 / (1.0 + exp(-x))),
            // Neither term overflows: the logarithm's argument is between 1 and 2.
            ActKind::Softplus => each(act, x, out, |x| x.max(0.0) + exp(-x.abs()).ln_1p()),
            ActKind::SignedSqrt => each(act, x, out, signed_sqrt),
        }
    }

    #[inline(always)]
    fn each(act: Act, x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = act.post * f(act.pre * x);
        }
    }

    #[inline(always)]
    fn signed_sqrt(x: f32) -> f32 {
        let size = if x.abs() < 1e-6 { 1e-6 } else { x.abs() };
        if x == 0.0 { 0.0 } else { size.sqrt().copysign(x) }
    }

    #[inline(always)]
    pub(crate) fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = a + b;
        }
    }

    #[inline(always)]
    pub(crate) fn mul(a: &[f32], b: &[f32], out: &mut [f32]) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = a * b;
        }
    }

    #[inline(always)]
    pub(super) fn silu_of(x: f32) -> f32 {
        x / (1.0 + exp(-x))
    }

    pub(crate) fn silu(x: &[f32], out: &mut [f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = silu_of(*x);
        }
    }

    pub(crate) fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *o = silu_of(*gate) * up;
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use minfer_graph::Act;

    use super::scalar;
    use crate::math::{
        LANES,
        avx2::{exp, load, store},
    };
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
        scalar::add(a, b, out);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn fold(a: &[f32], b: &[f32], sum: &mut [f32]) {
        scalar::fold(a, b, sum);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn act(act: Act, x: &[f32], out: &mut [f32]) {
        scalar::act(act, x, out);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn mul(a: &[f32], b: &[f32], out: &mut [f32]) {
        scalar::mul(a, b, out);
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn silu_of(x: __m256) -> __m256 {
        let minus_x = _mm256_xor_ps(x, _mm256_set1_ps(-0.0));
        _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0), exp(minus_x)))
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn silu(x: &[f32], out: &mut [f32]) {
        let (x8, x_tail) = x.as_chunks::<LANES>();
        let (out8, out_tail) = out.as_chunks_mut::<LANES>();
        for (out, x) in out8.iter_mut().zip(x8) {
            store(out, silu_of(load(x)));
        }
        scalar::silu(x_tail, out_tail);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        let (gate8, gate_tail) = gate.as_chunks::<LANES>();
        let (up8, up_tail) = up.as_chunks::<LANES>();
        let (out8, out_tail) = out.as_chunks_mut::<LANES>();
        for ((out, gate), up) in out8.iter_mut().zip(gate8).zip(up8) {
            store(out, _mm256_mul_ps(silu_of(load(gate)), load(up)));
        }
        scalar::swiglu(gate_tail, up_tail, out_tail);
    }
}

#[cfg(test)]
mod tests {
    use minfer_graph::{Act, ActKind};

    use crate::Kernels;
    use crate::testing::{Rng, assert_close, assert_same_bits, with_edge_cases};

    const LENGTHS: [usize; 7] = [0, 1, 7, 8, 9, 100, 1031];

    fn binary(f: impl Fn(&mut [f32]), n: usize) -> Vec<f32> {
        let mut out = vec![0.0; n];
        f(&mut out);
        out
    }

    #[test]
    fn every_isa_gives_the_same_bits() {
        let (scalar, best) = (Kernels::scalar(), Kernels::detect());
        let mut rng = Rng::new(4);
        for n in LENGTHS {
            let a = with_edge_cases(rng.floats(n, 100.0));
            let b = with_edge_cases(rng.floats(n, 100.0));
            assert_same_bits(&binary(|o| best.add(&a, &b, o), n), &binary(|o| scalar.add(&a, &b, o), n));
            assert_same_bits(&binary(|o| best.mul(&a, &b, o), n), &binary(|o| scalar.mul(&a, &b, o), n));
            assert_same_bits(&binary(|o| best.silu(&a, o), n), &binary(|o| scalar.silu(&a, o), n));
            assert_same_bits(
                &binary(|o| best.swiglu(&a, &b, o), n),
                &binary(|o| scalar.swiglu(&a, &b, o), n),
            );
        }
    }

    #[test]
    fn sums_and_products_are_those_of_the_elements() {
        let k = Kernels::detect();
        let (a, b) = ([1.5, -2.0, 0.25], [2.0, 3.0, -1.0]);
        assert_eq!(binary(|o| k.add(&a, &b, o), 3), [3.5, 1.0, -0.75]);
        assert_eq!(binary(|o| k.mul(&a, &b, o), 3), [3.0, -6.0, -0.25]);
    }

    /// Against f64; the exponential and three roundings, bound 5e-7.
    #[test]
    fn silu_is_accurate() {
        let x = Rng::new(5).floats(10_000, 60.0);
        let want: Vec<f64> = x.iter().map(|&x| f64::from(x) / (1.0 + (-f64::from(x)).exp())).collect();
        assert_close(&binary(|o| Kernels::detect().silu(&x, o), x.len()), &want, 5e-7);
    }

    #[test]
    fn swiglu_equals_silu_then_mul() {
        let mut rng = Rng::new(6);
        for n in LENGTHS {
            let (gate, up) = (with_edge_cases(rng.floats(n, 30.0)), rng.floats(n, 3.0));
            let k = Kernels::detect();
            let silu = binary(|o| k.silu(&gate, o), n);
            assert_same_bits(&binary(|o| k.swiglu(&gate, &up, o), n), &binary(|o| k.mul(&silu, &up, o), n));
        }
    }

    /// Against f64 over |x| <= 40, where the exponential is good to 2e-7 and four roundings follow: 1e-6.
    #[test]
    fn activations_equal_their_formulas_on_every_isa() {
        let mut rng = Rng::new(12);
        let x = [rng.floats(5000, 40.0), rng.floats(1003, 1e-3), vec![0.0, -0.0, 1e-9, -1e-9]].concat();
        let formula = |kind: ActKind, x: f64| match kind {
            ActKind::Silu => x / (1.0 + (-x).exp()),
            ActKind::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            ActKind::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
            ActKind::SignedSqrt if x == 0.0 => 0.0,
            ActKind::SignedSqrt => x.signum() * x.abs().max(1e-6).sqrt(),
        };
        for kind in [ActKind::Silu, ActKind::Sigmoid, ActKind::Softplus, ActKind::SignedSqrt] {
            let act = Act { kind, pre: 0.5, post: -2.0 };
            let want: Vec<f64> = x.iter().map(|&x| -2.0 * formula(kind, 0.5 * f64::from(x))).collect();
            let [mut got, mut definition] = [vec![0.0; x.len()], vec![0.0; x.len()]];
            Kernels::detect().act(act, &x, &mut got);
            assert_close(&got, &want, 1e-6);
            let x = with_edge_cases(x.clone());
            Kernels::detect().act(act, &x, &mut got);
            Kernels::scalar().act(act, &x, &mut definition);
            assert_same_bits(&got, &definition);
        }
        let plain = Act { kind: ActKind::Silu, pre: 1.0, post: 1.0 };
        let [mut got, mut want] = [vec![0.0; x.len()], vec![0.0; x.len()]];
        Kernels::detect().act(plain, &x, &mut got);
        Kernels::detect().silu(&x, &mut want);
        assert_same_bits(&got, &want);
    }

    /// Without a limit that binds: the bits of SwiGLU in its scalar definition. With one: its value at the limit.
    #[test]
    fn a_limit_clips_gate_and_up() {
        let mut rng = Rng::new(14);
        let (gate, up) = (rng.floats(100, 3.0), rng.floats(100, 3.0));
        let (clipped, plain) = (Kernels::detect(), Kernels::scalar());
        let got = binary(|o| clipped.clamped_swiglu(&gate, &up, 10.0, o), 100);
        assert_same_bits(&got, &binary(|o| plain.swiglu(&gate, &up, o), 100));
        let got = binary(|o| clipped.clamped_swiglu(&[5.0, -5.0, 1.0], &[5.0, -5.0, -0.5], 2.0, o), 3);
        assert_same_bits(&got, &binary(|o| plain.swiglu(&[2.0, -5.0, 1.0], &[2.0, -2.0, -0.5], o), 3));
    }
}

//! RMS normalisation of one row, whole or by heads.

use crate::Kernels;

impl Kernels {
    /// Normalises each group of `group` numbers of a row by its own root mean square.
    ///
    /// `out[i] = (x[i] * (1 / sqrt(mean(x^2) + eps))) * weight[i % weight.len()]`, the order in which the
    /// `transformers` library rounds. A group of the whole row is the ordinary RMSNorm; one of `head_dim`
    /// is the per-head norm of queries and keys. The weight is as long as a group or as the row.
    ///
    /// # Panics
    /// When `x` or `weight` is not whole groups or `out` is not as long as `x`.
    pub fn rms_norm(&self, x: &[f32], group: usize, weight: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "rms_norm: rows differ");
        assert!(group > 0 && x.len().is_multiple_of(group), "rms_norm: partial group");
        assert!(weight.len() == group || weight.len() == x.len(), "rms_norm: weight");
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.rms_norm)(x, group, weight, eps, out) }
    }
}

impl Kernels {
    /// [`Kernels::rms_norm`] without a weight: `out = x * (1 / sqrt(mean(x^2) + eps))`.
    ///
    /// # Panics
    /// When `x` is not whole groups or `out` is not as long as `x`.
    pub fn unit_norm(&self, x: &[f32], group: usize, eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "unit_norm: rows differ");
        assert!(group > 0 && x.len().is_multiple_of(group), "unit_norm: partial group");
        for (x, out) in x.chunks_exact(group).zip(out.chunks_exact_mut(group)) {
            // SAFETY: `Kernels` holds only what this machine can run.
            let r = reciprocal_rms(unsafe { (self.dot)(x, x) }, group, eps);
            out.iter_mut().zip(x).for_each(|(o, x)| *o = x * r);
        }
    }
}

/// `1 / sqrt(mean + eps)`: square root and quotient are correctly rounded everywhere.
#[inline(always)]
fn reciprocal_rms(sum_of_squares: f32, n: usize, eps: f32) -> f32 {
    1.0 / (sum_of_squares / n as f32 + eps).sqrt()
}

#[inline(always)]
fn scale_group(x: &[f32], weight: &[f32], r: f32, out: &mut [f32]) {
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = (x * r) * w;
    }
}

pub(crate) mod scalar {
    use super::{reciprocal_rms, scale_group};
    use crate::math::scalar::dot;

    pub(crate) fn rms_norm(x: &[f32], group: usize, weight: &[f32], eps: f32, out: &mut [f32]) {
        let weights = weight.chunks_exact(group).cycle();
        for ((x, out), weight) in x.chunks_exact(group).zip(out.chunks_exact_mut(group)).zip(weights) {
            scale_group(x, weight, reciprocal_rms(dot(x, x), group, eps), out);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use super::{reciprocal_rms, scale_group};
    use crate::math::avx2::dot;

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn rms_norm(x: &[f32], group: usize, weight: &[f32], eps: f32, out: &mut [f32]) {
        let weights = weight.chunks_exact(group).cycle();
        for ((x, out), weight) in x.chunks_exact(group).zip(out.chunks_exact_mut(group)).zip(weights) {
            scale_group(x, weight, reciprocal_rms(dot(x, x), group, eps), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Kernels;
    use crate::testing::{Rng, assert_close, assert_same_bits, with_edge_cases};

    fn reference(x: &[f32], group: usize, weight: &[f32], eps: f64) -> Vec<f64> {
        let mut weights = weight.iter().cycle();
        let mut normalised = |x: &[f32]| {
            let square = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
            let r = 1.0 / (square + eps).sqrt();
            x.iter().zip(weights.by_ref()).map(|(&x, &w)| f64::from(x) * r * f64::from(w)).collect::<Vec<_>>()
        };
        x.chunks(group).flat_map(&mut normalised).collect()
    }

    /// Against f64: six roundings and a sum over at most 4096 squares in 8 lanes; bound 2e-6.
    #[test]
    fn is_accurate() {
        let mut rng = Rng::new(2);
        for (n, group) in [(1, 1), (7, 7), (96, 96), (4096, 4096), (1024, 64), (240, 80)] {
            for wide in [group, n] {
                let (x, weight) = (rng.floats(n, 3.0), rng.floats(wide, 2.0));
                let mut out = vec![0.0; n];
                Kernels::detect().rms_norm(&x, group, &weight, 1e-6, &mut out);
                assert_close(&out, &reference(&x, group, &weight, 1e-6), 2e-6);
            }
        }
    }

    #[test]
    fn every_isa_gives_the_same_bits() {
        let mut rng = Rng::new(3);
        for (n, group) in [(1, 1), (5, 5), (13, 13), (200, 200), (264, 88), (39, 13), (960, 960)] {
            for x in [rng.floats(n, 3.0), with_edge_cases(rng.floats(n, 3.0)), vec![0.0; n]] {
                let weight = rng.floats(group, 2.0);
                let [mut want, mut got] = [vec![0.0; n], vec![0.0; n]];
                Kernels::scalar().rms_norm(&x, group, &weight, 1e-5, &mut want);
                Kernels::detect().rms_norm(&x, group, &weight, 1e-5, &mut got);
                assert_same_bits(&got, &want);
            }
        }
    }

    /// Reference: the norm with a weight of ones, equal bits.
    #[test]
    fn unit_norm_is_a_norm_with_ones() {
        let mut rng = Rng::new(13);
        for (n, group) in [(5, 5), (96, 32), (264, 88)] {
            let x = with_edge_cases(rng.floats(n, 3.0));
            let x = &x[..n];
            let [mut want, mut got] = [vec![0.0; n], vec![0.0; n]];
            Kernels::detect().rms_norm(x, group, &vec![1.0; group], 1e-6, &mut want);
            Kernels::detect().unit_norm(x, group, 1e-6, &mut got);
            assert_same_bits(&got, &want);
            Kernels::scalar().unit_norm(x, group, 1e-6, &mut got);
            assert_same_bits(&got, &want);
        }
    }
}

//! Weights of residual streams: how a sublayer reads, writes and mixes them (manifold-constrained
//! hyper-connections). The streams themselves are in `streams`.

use minfer_graph::HyperMix;

use crate::Kernels;
use crate::math::exp;

impl Kernels {
    /// From a row `m` and a weight (base values, then three scales) to the weights `pre` and `post` of each
    /// stream and the matrix `comb` (`[n, n]`), as [`HyperMix`] defines them. Sums run in index order.
    ///
    /// # Panics
    /// When a slice does not have its size.
    pub fn hyper_mix(
        &self,
        mix: &HyperMix,
        m: &[f32],
        weight: &[f32],
        pre: &mut [f32],
        post: &mut [f32],
        comb: &mut [f32],
    ) {
        let n = mix.n;
        assert!(m.len() == (2 + n) * n && weight.len() == m.len() + 3, "hyper_mix: input");
        assert!(pre.len() == n && post.len() == n && comb.len() == n * n, "hyper_mix: outputs");
        let (base, scale) = weight.split_at(m.len());
        let at = |i: usize, s: usize| m[i] * scale[s] + base[i];
        for (i, (pre, post)) in pre.iter_mut().zip(post).enumerate() {
            *pre = sigmoid(at(i, 0)) + mix.eps;
            *post = 2.0 * sigmoid(at(n + i, 1));
        }
        for (i, row) in comb.chunks_exact_mut(n).enumerate() {
            row.iter_mut().enumerate().for_each(|(j, c)| *c = at(2 * n + n * i + j, 2));
            let max = row.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
            row.iter_mut().for_each(|c| *c = exp(*c - max));
            let sum = row.iter().fold(0.0, |sum, c| sum + c);
            row.iter_mut().for_each(|c| *c = *c / sum + mix.eps);
        }
        for round in 0..mix.iterations {
            if round > 0 {
                comb.chunks_exact_mut(n).for_each(|row| share(row, 1, mix.eps));
            }
            (0..n).for_each(|j| share(&mut comb[j..], n, mix.eps));
        }
    }
}

/// Divides every `stride`-th number by the sum of all these plus `eps`.
fn share(x: &mut [f32], stride: usize, eps: f32) {
    let sum = x.iter().step_by(stride).fold(0.0, |sum, x| sum + x) + eps;
    x.iter_mut().step_by(stride).for_each(|x| *x /= sum);
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use minfer_graph::HyperMix;

    use crate::Kernels;
    use crate::testing::{Rng, assert_close};

    /// Against f64; 20 rounds of divisions that pull towards one fixed point: bound 2e-6.
    #[test]
    fn equals_its_definition() {
        let mut rng = Rng::new(110);
        for n in [1, 2, 4] {
            let mix = HyperMix { n, iterations: 20, eps: 1e-6 };
            let (m, weight) = (rng.floats((2 + n) * n, 2.0), rng.floats((2 + n) * n + 3, 1.0));
            let at =
                |i: usize, s: usize| f64::from(m[i]) * f64::from(weight[m.len() + s]) + f64::from(weight[i]);
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let pre: Vec<f64> = (0..n).map(|i| sigmoid(at(i, 0)) + 1e-6).collect();
            let post: Vec<f64> = (0..n).map(|i| 2.0 * sigmoid(at(n + i, 1))).collect();
            let mut c: Vec<Vec<f64>> =
                (0..n).map(|i| (0..n).map(|j| at(2 * n + n * i + j, 2).exp()).collect()).collect();
            for row in &mut c {
                let sum: f64 = row.iter().sum();
                row.iter_mut().for_each(|c| *c = *c / sum + 1e-6);
            }
            for round in 0..20 {
                if round > 0 {
                    for row in &mut c {
                        let sum: f64 = row.iter().sum::<f64>() + 1e-6;
                        row.iter_mut().for_each(|c| *c /= sum);
                    }
                }
                for j in 0..n {
                    let sum: f64 = c.iter().map(|row| row[j]).sum::<f64>() + 1e-6;
                    c.iter_mut().for_each(|row| row[j] /= sum);
                }
            }
            let [mut a, mut b, mut got] = [vec![0.0; n], vec![0.0; n], vec![0.0; n * n]];
            Kernels::detect().hyper_mix(&mix, &m, &weight, &mut a, &mut b, &mut got);
            assert_close(&a, &pre, 2e-6);
            assert_close(&b, &post, 2e-6);
            assert_close(&got, &c.concat(), 2e-6);
        }
    }
}

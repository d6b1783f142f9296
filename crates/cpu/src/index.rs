//! Index keys of sparse attention: pooling the raw keys of a block, scoring blocks, choosing the best.
//!
//! In: rows of one block, or a query and the key of a block, or scores. Where keys lie is the caller's affair.

use minfer_graph::{PoolKeys, RopeStyle};

use crate::attention::Tile;
use crate::compress::Term;
use crate::{Kernels, rope};

/// Working memory of [`Kernels::pool_key`], one per thread.
#[derive(Debug)]
pub struct PoolScratch {
    row: Vec<f32>,
    mean: Vec<f32>,
    table: Vec<f32>,
    /// The result.
    key: Vec<f32>,
}

impl PoolScratch {
    /// For keys of `width` numbers of which `rotated` are rotated.
    pub fn new(width: usize, rotated: usize) -> PoolScratch {
        PoolScratch {
            row: vec![0.0; width],
            mean: vec![0.0; width],
            table: vec![0.0; rotated],
            key: vec![0.0; width],
        }
    }
}

impl Kernels {
    /// The index key of the block that starts at `first`: the mean of its rows (summed in ascending order from
    /// the first, times `1/block`), RMS-normalised, its first numbers rotated (half-split) at position
    /// `first`. `row` fills in the row at an offset in the block.
    ///
    /// # Panics
    /// When scratch, weight and frequencies do not fit each other.
    pub fn pool_key<'a>(
        &self,
        pool: &PoolKeys,
        weight: &[f32],
        first: i32,
        mut row: impl FnMut(usize, &mut [f32]),
        s: &'a mut PoolScratch,
    ) -> &'a [f32] {
        row(0, &mut s.mean);
        for i in 1..pool.block {
            row(i, &mut s.row);
            s.mean.iter_mut().zip(&s.row).for_each(|(sum, x)| *sum += x);
        }
        let share = 1.0 / pool.block as f32;
        s.mean.iter_mut().for_each(|x| *x *= share);
        self.rms_norm(&s.mean, s.mean.len(), weight, pool.eps, &mut s.row);
        rope::table(&pool.inv_freq, 1.0, first, &mut s.table);
        self.rope(RopeStyle::HalfSplit, &s.row, s.row.len(), &s.table, &mut s.key);
        &s.key
    }

    /// The index key of a block by gates: `out = sum_j w_j * keys_j / sum_j w_j` in each channel, with
    /// `w_j = exp(gates_j + bias_j - max)`, positions `j` in ascending order. `keys`, `gates` and `bias` are
    /// `[block, out.len()]`; `scratch` is twice as long as `out`.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn gated_key(&self, keys: &[f32], gates: &[f32], bias: &[f32], scratch: &mut [f32], out: &mut [f32]) {
        let width = out.len();
        assert!(keys.len() == gates.len() && keys.len() == bias.len() && width > 0, "gated_key: rows");
        assert_eq!(scratch.len(), 2 * width, "gated_key: scratch");
        let (max, sum) = scratch.split_at_mut(width);
        let gates = gates.chunks_exact(width).zip(bias.chunks_exact(width));
        max.fill(f32::NEG_INFINITY);
        for (gate, bias) in gates.clone() {
            // SAFETY: `Kernels` holds only what this machine can run.
            unsafe { (self.gate_max)(gate, bias, max) }
        }
        sum.fill(0.0);
        out.fill(0.0);
        for (kv, (gate, bias)) in keys.chunks_exact(width).zip(gates) {
            // SAFETY: as above.
            unsafe { (self.gate_fold)(&Term { kv, gate, bias }, max, sum, out) }
        }
        out.iter_mut().zip(sum).for_each(|(o, sum)| *o /= *sum);
    }

    /// Scores of keys `[out.len(), width]`: `sum_h weights[h] * relu(dot(q_h, key)) * scale`, heads in ascending
    /// order, each term rounded once, each dot product in lanes; without weights they are one. `q` is
    /// `[heads, width]`; a NaN product counts as 0. `products` is scratch, as long as `out`. A key's score does not
    /// depend on the keys beside it.
    ///
    /// # Panics
    /// When `width` is 0 or the lengths do not fit.
    #[allow(clippy::too_many_arguments)]
    pub fn index_scores(
        &self,
        q: &[f32],
        keys: &[f32],
        width: usize,
        weights: Option<&[f32]>,
        scale: f32,
        products: &mut [f32],
        out: &mut [f32],
    ) {
        assert!(keys.len() == out.len() * width && products.len() == out.len(), "index_scores: keys");
        let keys = Tile::of_numbers(keys, width, width, out.len());
        out.fill(0.0);
        for (h, q) in q.chunks_exact(width).enumerate() {
            // SAFETY: `Kernels` holds only what this machine can run.
            unsafe {
                (self.score)(q, keys, 1.0, products.len(), products);
                (self.relu_fold)(weights.map_or(1.0, |w| w[h]), products, out);
            }
        }
        out.iter_mut().for_each(|score| *score *= scale);
    }
}

pub(crate) mod scalar {
    /// `sum = w * relu(x) + sum`, rounded once; the relu of NaN is 0.
    #[inline(always)]
    pub(crate) fn relu_fold(w: f32, x: &[f32], sum: &mut [f32]) {
        for (sum, &x) in sum.iter_mut().zip(x) {
            *sum = w.mul_add(if x > 0.0 { x } else { 0.0 }, *sum);
        }
    }
}

/// The scalar source with wider instructions; elements stand alone, so the bits are the same.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn relu_fold(w: f32, x: &[f32], sum: &mut [f32]) {
        super::scalar::relu_fold(w, x, sum);
    }
}

/// Fills `out` with the `out.len()` best of `scores`, higher score first, then lower index, in ascending order,
/// padded with -1. `order` is scratch, as long as `scores`.
///
/// # Panics
/// When `order` is too short.
pub fn choose(scores: &[f32], order: &mut [i32], out: &mut [i32]) {
    let order = &mut order[..scores.len()];
    order.iter_mut().zip(0..).for_each(|(o, i)| *o = i);
    let chosen = out.len().min(scores.len());
    if chosen < scores.len() && chosen > 0 {
        let best_first =
            |a: &i32, b: &i32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
        order.select_nth_unstable_by(chosen - 1, best_first);
        order[..chosen].sort_unstable();
    }
    out[..chosen].copy_from_slice(&order[..chosen]);
    out[chosen..].fill(-1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close, assert_same_bits};

    /// Against f64 with the f32 angles of the definition; means of |x| <= 2 normalised to about 1: 2e-6.
    #[test]
    fn a_pooled_key_is_mean_norm_rotation() {
        let mut rng = Rng::new(100);
        let (width, block, first) = (20, 4, 36);
        let inv_freq = [1.0f32, 0.3, 0.01];
        let pool = PoolKeys { block, raw: 2, pooled: 3, eps: 1e-6, inv_freq: inv_freq.into() };
        let (rows, weight) = (rng.floats(block * width, 2.0), rng.floats(width, 1.0));
        let mean: Vec<f64> = (0..width)
            .map(|i| (0..block).map(|r| f64::from(rows[r * width + i])).sum::<f64>() / 4.0)
            .collect();
        let square = mean.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let mut want: Vec<f64> =
            mean.iter().zip(&weight).map(|(x, &w)| x / (square + 1e-6).sqrt() * f64::from(w)).collect();
        for (i, f) in inv_freq.iter().enumerate() {
            let (sin, cos) = f64::from(first as f32 * f).sin_cos();
            let (a, b) = (want[i], want[i + 3]);
            (want[i], want[i + 3]) = (a * cos - b * sin, b * cos + a * sin);
        }
        let run = |k: &Kernels| {
            let mut scratch = PoolScratch::new(width, 6);
            let row = |i: usize, out: &mut [f32]| out.copy_from_slice(&rows[i * width..][..width]);
            k.pool_key(&pool, &weight, first, row, &mut scratch).to_vec()
        };
        assert_close(&run(&Kernels::detect()), &want, 2e-6);
        assert_same_bits(&run(&Kernels::detect()), &run(&Kernels::scalar()));
    }

    fn scores(k: &Kernels, q: &[f32], keys: &[f32], width: usize, weights: Option<&[f32]>) -> Vec<f32> {
        let [mut products, mut out] = [vec![9.0; keys.len() / width], vec![9.0; keys.len() / width]];
        k.index_scores(q, keys, width, weights, 0.5, &mut products, &mut out);
        out
    }

    /// Against f64: 3 sums of up to 40 products of |x| <= 4, weighted by at most 2; bound 2e-5. A key alone has the
    /// same score.
    #[test]
    fn scores_are_sums_of_positive_products() {
        let mut rng = Rng::new(101);
        for (width, count) in [(40, 1), (40, 19), (21, 9), (1, 33)] {
            let (q, keys) = (rng.floats(3 * width, 2.0), rng.floats(count * width, 2.0));
            for weights in [None, Some(&[0.5, -2.0, 1.5][..])] {
                let want: Vec<f64> = keys
                    .chunks(width)
                    .map(|key| {
                        let relu = |h: usize| {
                            let terms = q[h * width..].iter().zip(key);
                            terms.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>().max(0.0)
                        };
                        0.5 * (0..3).map(|h| weights.map_or(1.0, |w| f64::from(w[h])) * relu(h)).sum::<f64>()
                    })
                    .collect();
                let got = scores(&Kernels::detect(), &q, &keys, width, weights);
                assert_close(&got, &want, 2e-5);
                assert_same_bits(&got, &scores(&Kernels::scalar(), &q, &keys, width, weights));
                let last = scores(&Kernels::detect(), &q, &keys[(count - 1) * width..], width, weights);
                assert_same_bits(&last, &got[count - 1..]);
            }
        }
        for k in [Kernels::detect(), Kernels::scalar()] {
            assert_eq!(scores(&k, &[f32::NAN, -1.0, 2.0], &[1.0; 9], 1, None), [1.0; 9]);
        }
    }

    /// Against f64; weighted means of 4 numbers within 2: 1e-6. Gates far apart choose one row.
    #[test]
    fn gates_weigh_the_rows_of_each_channel() {
        let mut rng = Rng::new(103);
        for width in [1, 5, 8, 67] {
            let (keys, bias) = (rng.floats(4 * width, 2.0), rng.floats(4 * width, 1.0));
            let mut gates = rng.floats(4 * width, 3.0);
            gates[2 * width] = 1e4;
            let want: Vec<f64> = (0..width)
                .map(|c| {
                    let gate = |j: usize| f64::from(gates[j * width + c] + bias[j * width + c]);
                    let max = (0..4).map(gate).fold(f64::MIN, f64::max);
                    let w = |j: usize| (gate(j) - max).exp();
                    let sum = (0..4).map(|j| w(j) * f64::from(keys[j * width + c])).sum::<f64>();
                    sum / (0..4).map(w).sum::<f64>()
                })
                .collect();
            let run = |k: &Kernels| {
                let (mut scratch, mut out) = (vec![9.0; 2 * width], vec![9.0; width]);
                k.gated_key(&keys, &gates, &bias, &mut scratch, &mut out);
                out
            };
            let got = run(&Kernels::detect());
            assert_close(&got, &want, 1e-6);
            assert_same_bits(&got, &run(&Kernels::scalar()));
            assert_eq!(got[0], keys[2 * width]);
        }
    }

    #[test]
    fn the_best_are_chosen_by_score_then_index() {
        let chosen = |scores: &[f32], top: usize| {
            let (mut order, mut out) = (vec![0; scores.len()], vec![7; top]);
            choose(scores, &mut order, &mut out);
            out
        };
        assert_eq!(chosen(&[1.0, 3.0, 0.0, 3.0, 2.0], 3), [1, 3, 4]);
        assert_eq!(chosen(&[0.0, 0.0, 0.0, 5.0], 2), [0, 3]);
        assert_eq!(chosen(&[2.0, 1.0], 4), [0, 1, -1, -1]);
        assert_eq!(chosen(&[], 2), [-1, -1]);
        // A sort of everything says the same.
        let mut rng = Rng::new(102);
        let scores: Vec<f32> = (0..500).map(|_| rng.below(40) as f32).collect();
        let mut want: Vec<i32> = (0..500).collect();
        want.sort_by_key(|&i| (-scores[i as usize] as i32, i));
        want.truncate(100);
        want.sort();
        assert_eq!(chosen(&scores, 100), want);
    }
}

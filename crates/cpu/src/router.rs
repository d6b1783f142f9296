//! Experts: from a row of router logits to the chosen experts and their weights, and the weighted sum
//! of what they returned. The expert products themselves are matrix products and live with those.

use minfer_graph::{Act, ActKind, Router, Scoring};

use crate::{Kernels, select::top_k};

/// Added to sums of scores, which may all be 0.
const FLOOR: f32 = 1e-20;

impl Kernels {
    /// Softmax of one row: `exp(x - max) / sum`, the sum in lanes.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn softmax(&self, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "softmax: lengths differ");
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.softmax)(x, out) }
    }

    /// Chooses `ids.len()` experts by score, plus `bias` where there is one, and writes ids and scores in rank order.
    ///
    /// Equal scores: the lower expert. If asked for, the scores are divided by their sum, taken in rank order (plus
    /// 1e-20, as they may all be 0), and then multiplied by the scale. `scratch` is twice as long as `logits`.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn route(
        &self,
        r: &Router,
        logits: &[f32],
        bias: &[f32],
        scratch: &mut [f32],
        ids: &mut [i32],
        weights: &mut [f32],
    ) {
        let (scores, choice) = scratch.split_at_mut(logits.len());
        self.expert_scores(r.scoring, logits, scores);
        if r.biased {
            let choice = &mut choice[..logits.len()];
            self.add(scores, bias, choice);
            top_k(choice, ids, weights);
            weights.iter_mut().zip(ids.iter()).for_each(|(w, &id)| *w = scores[id as usize]);
        } else {
            top_k(scores, ids, weights);
        }
        if r.renormalise {
            let sum = weights.iter().fold(0.0, |sum, w| sum + w) + FLOOR;
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        if r.scale != 1.0 {
            weights.iter_mut().for_each(|w| *w *= r.scale);
        }
    }

    /// Scores of all experts.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn expert_scores(&self, scoring: Scoring, logits: &[f32], out: &mut [f32]) {
        assert_eq!(logits.len(), out.len(), "expert_scores: lengths differ");
        match scoring {
            Scoring::Softmax => self.softmax(logits, out),
            Scoring::Sigmoid => self.act(Act { kind: ActKind::Sigmoid, pre: 1.0, post: 1.0 }, logits, out),
            Scoring::SqrtSoftplus => {
                self.act(Act { kind: ActKind::Softplus, pre: 1.0, post: 1.0 }, logits, out);
                out.iter_mut().for_each(|o| *o = o.sqrt());
            }
        }
    }

    /// Weights of the experts `ids`: their scores, divided by the sum of these in rank order, times `scale`.
    /// An id outside the row gives NaN.
    pub fn expert_weights(
        &self,
        (scoring, scale): (Scoring, f32),
        logits: &[f32],
        scores: &mut [f32],
        ids: &[i32],
        weights: &mut [f32],
    ) {
        self.expert_scores(scoring, logits, scores);
        weights_of(scores, ids, scale, weights);
    }

    /// `out = sum(weights[r] * y[r])` over the ranks of `y` (`[top_k, n]`), in rank order: the first
    /// product is rounded, each further one is added with FMA.
    ///
    /// # Panics
    /// When `y` is not one row of `out.len()` per weight, or there is no weight.
    pub fn combine(&self, y: &[f32], weights: &[f32], out: &mut [f32]) {
        assert!(!weights.is_empty() && y.len() == weights.len() * out.len(), "combine: lengths");
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.combine)(y, weights, out) }
    }
}

fn weights_of(scores: &[f32], ids: &[i32], scale: f32, weights: &mut [f32]) {
    for (w, &id) in weights.iter_mut().zip(ids) {
        *w = usize::try_from(id).ok().and_then(|id| scores.get(id)).copied().unwrap_or(f32::NAN);
    }
    let sum = weights.iter().fold(0.0, |sum, w| sum + w) + FLOOR;
    weights.iter_mut().for_each(|w| *w = *w / sum * scale);
}

pub(crate) mod scalar {
    use crate::math::{exp, scalar as math};

    pub(crate) fn softmax(x: &[f32], out: &mut [f32]) {
        let max = math::max(x);
        for (o, x) in out.iter_mut().zip(x) {
            *o = exp(x - max);
        }
        let sum = math::sum(out);
        out.iter_mut().for_each(|o| *o /= sum);
    }

    #[inline(always)]
    pub(crate) fn combine(y: &[f32], weights: &[f32], out: &mut [f32]) {
        let (first, rest) = y.split_at(out.len());
        for (o, y) in out.iter_mut().zip(first) {
            *o = weights[0] * y;
        }
        for (rank, w) in weights[1..].iter().enumerate() {
            let y = &rest[rank * out.len()..];
            for (o, y) in out.iter_mut().zip(y) {
                *o = w.mul_add(*y, *o);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use crate::math::{
        LANES,
        avx2::{exp, load, max, store, to_array},
        exp as exp_of, sum_lanes,
    };
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn softmax(x: &[f32], out: &mut [f32]) {
        let max = max(x);
        let (x8, x_tail) = x.as_chunks::<LANES>();
        let (out8, out_tail) = out.as_chunks_mut::<LANES>();
        let mut lanes = _mm256_setzero_ps();
        for (o, x) in out8.iter_mut().zip(x8) {
            let e = exp(_mm256_sub_ps(load(x), _mm256_set1_ps(max)));
            lanes = _mm256_add_ps(lanes, e);
            store(o, e);
        }
        let mut lanes = to_array(lanes);
        for ((o, x), lane) in out_tail.iter_mut().zip(x_tail).zip(&mut lanes) {
            *o = exp_of(x - max);
            *lane += *o;
        }
        let sum = sum_lanes(lanes);
        for o in out {
            *o /= sum;
        }
    }

    /// The scalar source with wider instructions; elements stand alone.
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn combine(y: &[f32], weights: &[f32], out: &mut [f32]) {
        super::scalar::combine(y, weights, out);
    }
}

#[cfg(test)]
mod tests {
    use minfer_graph::{Router, Scoring};

    use crate::Kernels;
    use crate::testing::{Rng, assert_close, assert_same_bits, with_edge_cases};

    fn softmax(k: &Kernels, x: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        k.softmax(x, &mut out);
        out
    }

    /// Against f64 on |x| <= 15, where rounding `x - max` moves the exponent by up to 2e-6; results
    /// are at most 1, bound 3e-6.
    #[test]
    fn softmax_is_accurate_and_the_same_on_every_isa() {
        let mut rng = Rng::new(10);
        for n in [1, 7, 8, 60, 128, 513] {
            let x = rng.floats(n, 15.0);
            let got = softmax(&Kernels::detect(), &x);
            let max = x.iter().fold(f64::MIN, |m, &x| m.max(f64::from(x)));
            let e: Vec<f64> = x.iter().map(|&x| (f64::from(x) - max).exp()).collect();
            let sum: f64 = e.iter().sum();
            assert_close(&got, &e.iter().map(|e| e / sum).collect::<Vec<_>>(), 3e-6);
            assert_same_bits(&got, &softmax(&Kernels::scalar(), &x));
            let bad = with_edge_cases(x);
            assert_same_bits(&softmax(&Kernels::detect(), &bad), &softmax(&Kernels::scalar(), &bad));
        }
    }

    #[test]
    fn routing_takes_the_lower_expert_of_equals_and_renormalises() {
        let k = Kernels::detect();
        let logits = [0.0, 2.0, 1.0, 2.0, -1.0];
        let (mut p, mut ids, mut w) = ([0.0; 10], [0; 3], [0.0; 3]);
        let plain =
            Router { scoring: Scoring::Softmax, top_k: 3, renormalise: false, biased: false, scale: 1.0 };
        k.route(&plain, &logits, &[], &mut p, &mut ids, &mut w);
        assert_eq!(ids, [1, 3, 2]);
        assert_eq!(w, [p[1], p[3], p[2]]);
        let sum = w[0] + w[1] + w[2];
        let want = w.map(|w| w / sum);
        k.route(&Router { renormalise: true, ..plain }, &logits, &[], &mut p, &mut ids, &mut w);
        assert_eq!(w, want);
    }

    /// Sigmoids of 0, ln 3 and -ln 3 are 1/2, 3/4 and 1/4, to 3e-7.
    #[test]
    fn a_bias_chooses_but_does_not_weigh() {
        let r = Router { scoring: Scoring::Sigmoid, top_k: 2, renormalise: false, biased: true, scale: 1.0 };
        let (logits, bias) = ([0.0, 3f32.ln(), -3f32.ln(), 0.0], [0.0, -0.6, 0.6, -0.1]);
        let (mut scratch, mut ids, mut w) = ([0.0; 8], [0; 2], [0.0; 2]);
        Kernels::detect().route(&r, &logits, &bias, &mut scratch, &mut ids, &mut w);
        assert_eq!(ids, [2, 0]);
        assert_close(&w, &[0.25, 0.5], 3e-7);
        let r = Router { renormalise: true, scale: 2.5, ..r };
        Kernels::detect().route(&r, &logits, &bias, &mut scratch, &mut ids, &mut w);
        assert_close(&w, &[2.5 / 3.0, 5.0 / 3.0], 2e-6);
        // Scores that are all zero stay zero.
        Kernels::detect().route(&r, &[-200.0; 4], &bias, &mut scratch, &mut ids, &mut w);
        assert_eq!((ids, w), ([2, 0], [0.0; 2]));
    }

    /// Against f64; at most four terms below 4 each, bound 1e-6.
    #[test]
    fn combine_sums_in_rank_order() {
        let mut rng = Rng::new(11);
        for (ranks, n) in [(1, 5), (2, 9), (4, 131)] {
            let (y, w) = (rng.floats(ranks * n, 2.0), rng.floats(ranks, 2.0));
            let [mut got, mut want] = [vec![0.0; n], vec![0.0; n]];
            Kernels::detect().combine(&y, &w, &mut got);
            Kernels::scalar().combine(&y, &w, &mut want);
            assert_same_bits(&got, &want);
            let term = |r: usize, i: usize| f64::from(w[r]) * f64::from(y[r * n + i]);
            let exact: Vec<f64> = (0..n).map(|i| (0..ranks).map(|r| term(r, i)).sum()).collect();
            assert_close(&got, &exact, 1e-6);
        }
    }

    /// Scores are `sqrt(log(1 + exp(x)))`, in f64, relative tolerance 2e-6; the bias decides who is chosen, but not
    /// with which weight.
    #[test]
    fn a_bias_moves_the_choice_and_not_the_weights() {
        let (k, scoring, scale) = (Kernels::detect(), Scoring::SqrtSoftplus, 1.5);
        let logits = [0.0, 2.0, -30.0, 2.0, 60.0];
        let bias = [9.0, 0.5, 0.0, 0.5, -100.0];
        let (mut scratch, mut ids, mut weights) = ([0.0; 10], [0; 3], [0.0; 3]);
        let router = Router { scoring, top_k: 3, renormalise: true, biased: true, scale };
        k.route(&router, &logits, &bias, &mut scratch, &mut ids, &mut weights);
        assert_eq!(ids, [0, 1, 3]);
        let score = |x: f32| f64::from(x).exp().ln_1p().sqrt();
        let sum: f64 = ids.iter().map(|&i| score(logits[i as usize])).sum();
        let want: Vec<f64> = ids.iter().map(|&i| 1.5 * score(logits[i as usize]) / sum).collect();
        assert_close(&weights, &want, 2e-6);
        let mut same = [0.0; 3];
        k.expert_weights((scoring, scale), &logits, &mut scratch[..5], &ids, &mut same);
        assert_eq!(same, weights);
        k.expert_weights((scoring, scale), &logits, &mut scratch[..5], &[0, 5, -1], &mut same);
        assert!(same.iter().all(|w| w.is_nan()), "{same:?}");
    }
}

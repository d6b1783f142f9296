//! Compression of a window of rows into one, for a range of channels.
//!
//! In: rows of kv and gates of one sequence, of this step and before. Out: the compressed row. Each channel
//! stands alone, and sums run in the order of rows. Where rows lie is the caller's affair.

use minfer_graph::Compress;

use crate::Kernels;
use crate::conv::History;

/// kv and gates of one part of the rows, for some channels.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Part<'a> {
    pub kv: History<'a>,
    pub gate: History<'a>,
}

/// Rows before position `position` that a window which is complete there or later may take.
pub fn rows_before(c: &Compress, position: usize) -> usize {
    position % c.ratio + if c.overlap && position >= c.ratio { c.ratio } else { 0 }
}

impl Kernels {
    /// The row into which the window that ends with this step's row `row`, at `position`, is compressed:
    /// `sum_i kv_i exp(g_i - max g) / sum_i exp(g_i - max g)` with `g` the gate plus its bias. `bias` is
    /// `[ratio, stride]`; `max` and `sum` are scratch.
    ///
    /// # Panics
    /// When parts, scratch and output do not fit each other.
    #[allow(clippy::too_many_arguments)]
    pub fn compress(
        &self,
        c: &Compress,
        parts: &[Part<'_>],
        bias: &[f32],
        (row, position): (usize, usize),
        max: &mut [f32],
        sum: &mut [f32],
        out: &mut [f32],
    ) {
        assert!(parts.len() == c.parts() && max.len() == out.len() && sum.len() == out.len(), "compress");
        // The first window has none before it.
        let before = if c.overlap && position >= c.ratio { c.ratio } else { 0 };
        let before = (0..before).map(|place| (&parts[0], place, 2 * c.ratio - 1 - place));
        let own = (0..c.ratio).map(|place| (&parts[parts.len() - 1], place, c.ratio - 1 - place));
        max.fill(f32::NEG_INFINITY);
        for (part, place, lag) in before.clone().chain(own.clone()) {
            let term = term(part, bias, row, place, lag);
            // SAFETY: `Kernels` holds only what this machine can run.
            unsafe { (self.gate_max)(term.gate, term.bias, max) }
        }
        sum.fill(0.0);
        out.fill(0.0);
        for (part, place, lag) in before.chain(own) {
            let term = term(part, bias, row, place, lag);
            // SAFETY: as above.
            unsafe { (self.gate_fold)(&term, max, sum, out) }
        }
        out.iter_mut().zip(sum).for_each(|(o, sum)| *o /= *sum);
    }
}

/// One row of a window, some channels of it. All three are equally long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Term<'a> {
    pub(crate) kv: &'a [f32],
    pub(crate) gate: &'a [f32],
    pub(crate) bias: &'a [f32],
}

/// `term, max, sum, out`.
pub(crate) type FoldFn = unsafe fn(&Term<'_>, &[f32], &mut [f32], &mut [f32]);

/// The row `lag` rows before `row`, at `place` in its window.
fn term<'a>(part: &Part<'a>, bias: &'a [f32], row: usize, place: usize, lag: usize) -> Term<'a> {
    let bias = &bias[place * part.gate.stride + part.gate.first..][..part.gate.count];
    Term { kv: part.kv.row(row, lag), gate: part.gate.row(row, lag), bias }
}

pub(crate) mod scalar {
    use super::Term;
    use crate::math::exp;

    /// `max = max(max, gate + bias)`; NaN is never the larger.
    #[inline(always)]
    pub(crate) fn gate_max(gate: &[f32], bias: &[f32], max: &mut [f32]) {
        for (max, (g, b)) in max.iter_mut().zip(gate.iter().zip(bias)) {
            *max = if g + b > *max { g + b } else { *max };
        }
    }

    /// `weight = exp(gate + bias - max)`, then `sum += weight; out = weight * kv + out`, the latter rounded once.
    #[inline(always)]
    pub(crate) fn gate_fold(t: &Term<'_>, max: &[f32], sum: &mut [f32], out: &mut [f32]) {
        let sums = max.iter().zip(sum).zip(out);
        for (((max, sum), out), (kv, (g, b))) in sums.zip(t.kv.iter().zip(t.gate.iter().zip(t.bias))) {
            let weight = exp(g + b - max);
            *sum += weight;
            *out = weight.mul_add(*kv, *out);
        }
    }
}

/// Channels stand alone: only the exponential is written out.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use std::arch::x86_64::*;

    use super::{Term, scalar};
    use crate::math::{
        LANES,
        avx2::{exp, load, store},
    };

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn gate_max(gate: &[f32], bias: &[f32], max: &mut [f32]) {
        scalar::gate_max(gate, bias, max);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn gate_fold(t: &Term<'_>, max: &[f32], sum: &mut [f32], out: &mut [f32]) {
        let ((max8, max), (sum8, sum)) = (max.as_chunks::<LANES>(), sum.as_chunks_mut::<LANES>());
        let ((kv8, kv), (out8, out)) = (t.kv.as_chunks::<LANES>(), out.as_chunks_mut::<LANES>());
        let ((gate8, gate), (bias8, bias)) = (t.gate.as_chunks::<LANES>(), t.bias.as_chunks::<LANES>());
        let sums = max8.iter().zip(sum8).zip(out8);
        for (((max, sum), out), (kv, (g, b))) in sums.zip(kv8.iter().zip(gate8.iter().zip(bias8))) {
            let weight = exp(_mm256_sub_ps(_mm256_add_ps(load(g), load(b)), load(max)));
            store(sum, _mm256_add_ps(load(sum), weight));
            store(out, _mm256_fmadd_ps(weight, load(kv), load(out)));
        }
        scalar::gate_fold(&Term { kv, gate, bias }, max, sum, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close, assert_same_bits};

    const W: usize = 21;

    /// Against f64; at most 8 weights of sum 1 on |x| <= 2: bound 2e-6. A tail before the step changes no bit.
    #[test]
    fn a_window_is_the_gated_mean_of_its_rows() {
        let mut rng = Rng::new(111);
        for c in [Compress { ratio: 4, overlap: true }, Compress { ratio: 5, overlap: false }] {
            let (width, n) = (W * c.parts(), 3 * c.ratio);
            let [kv, gate] = [(); 2].map(|()| rng.floats(n * width, 2.0));
            let bias = rng.floats(c.ratio * width, 1.0);
            for w in 0..3 {
                let own = (w * c.ratio..(w + 1) * c.ratio).map(|t| (t, (c.parts() - 1) * W));
                let before = (w * c.ratio).saturating_sub(if c.overlap { c.ratio } else { 0 })..w * c.ratio;
                let terms: Vec<_> = before.map(|t| (t, 0)).chain(own).collect();
                let want: Vec<f64> = (0..W)
                    .map(|i| {
                        let g = |&(t, at): &(usize, usize)| {
                            let bias = bias[t % c.ratio * width + at + i];
                            (f64::from(gate[t * width + at + i]) + f64::from(bias)).exp()
                        };
                        let total: f64 = terms.iter().map(g).sum();
                        terms.iter().map(|t| g(t) * f64::from(kv[t.0 * width + t.1 + i])).sum::<f64>() / total
                    })
                    .collect();
                let end = (w + 1) * c.ratio - 1;
                let got = run(&Kernels::detect(), &c, &kv, &gate, &bias, width, 0, end);
                assert_close(&got, &want, 2e-6);
                assert_same_bits(&run(&Kernels::scalar(), &c, &kv, &gate, &bias, width, 0, end), &got);
                for start in 1..=end {
                    assert_same_bits(
                        &run(&Kernels::detect(), &c, &kv, &gate, &bias, width, start, end),
                        &got,
                    );
                }
            }
        }
    }

    /// The window that ends at `end`, in a step that begins at `start`, with no more of a tail than is needed.
    #[allow(clippy::too_many_arguments)]
    fn run(
        k: &Kernels,
        c: &Compress,
        kv: &[f32],
        gate: &[f32],
        bias: &[f32],
        width: usize,
        start: usize,
        end: usize,
    ) -> Vec<f32> {
        let kept = rows_before(c, start);
        let firsts: Vec<usize> = (0..c.parts()).map(|p| p * W).collect();
        let tail = |x: &[f32], first: usize| -> Vec<f32> {
            (start - kept..start).flat_map(|t| &x[t * width + first..][..W]).copied().collect()
        };
        let tails: Vec<[Vec<f32>; 2]> = firsts.iter().map(|&f| [tail(kv, f), tail(gate, f)]).collect();
        let parts: Vec<Part<'_>> = firsts
            .iter()
            .zip(&tails)
            .map(|(&first, [a, b])| {
                let kv = History { tail: a, rows: &kv[start * width..], stride: width, first, count: W };
                Part { kv, gate: History { tail: b, rows: &gate[start * width..], ..kv } }
            })
            .collect();
        let [mut max, mut sum, mut out] = [(); 3].map(|()| vec![0.0; W]);
        let at = (end - start, end);
        k.compress(c, &parts, bias, at, &mut max, &mut sum, &mut out);
        out
    }
}

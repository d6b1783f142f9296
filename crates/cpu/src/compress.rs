//! Compression of a window of rows into one, for a range of channels.
//!
//! In: rows of kv and gates of one sequence, of this step and before. Out: the compressed row. Each channel
//! stands alone, and sums run in the order of rows. Where rows lie is the caller's affair.

use minfer_graph::Compress;

use crate::Kernels;
use crate::conv::History;
use crate::math::exp;

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
        let term = |part, place, lag| term(part, bias, row, place, lag);
        // The first window has none before it.
        let before = if c.overlap && position >= c.ratio { c.ratio } else { 0 };
        let before = (0..before).map(|place| term(&parts[0], place, 2 * c.ratio - 1 - place));
        let own = (0..c.ratio).map(|place| term(&parts[parts.len() - 1], place, c.ratio - 1 - place));
        let terms = before.chain(own);
        max.fill(f32::NEG_INFINITY);
        for (_, gate, bias) in terms.clone() {
            for (max, (g, b)) in max.iter_mut().zip(gate.iter().zip(bias)) {
                *max = if g + b > *max { g + b } else { *max };
            }
        }
        sum.fill(0.0);
        out.fill(0.0);
        for (kv, gate, bias) in terms {
            for (i, (g, b)) in gate.iter().zip(bias).enumerate() {
                let weight = exp(g + b - max[i]);
                sum[i] += weight;
                out[i] = weight.mul_add(kv[i], out[i]);
            }
        }
        out.iter_mut().zip(sum).for_each(|(o, sum)| *o /= *sum);
    }
}

/// kv, gate and bias of the row `lag` rows before `row`, at `place` in its window.
fn term<'a>(
    part: &Part<'a>,
    bias: &'a [f32],
    row: usize,
    place: usize,
    lag: usize,
) -> (&'a [f32], &'a [f32], &'a [f32]) {
    let bias = &bias[place * part.gate.stride + part.gate.first..][..part.gate.count];
    (part.kv.row(row, lag), part.gate.row(row, lag), bias)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close, assert_same_bits};

    const W: usize = 11;

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
                let got = run(&c, &kv, &gate, &bias, width, 0, end);
                assert_close(&got, &want, 2e-6);
                for start in 1..=end {
                    assert_same_bits(&run(&c, &kv, &gate, &bias, width, start, end), &got);
                }
            }
        }
    }

    /// The window that ends at `end`, in a step that begins at `start`, with no more of a tail than is needed.
    fn run(
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
        Kernels::detect().compress(c, &parts, bias, at, &mut max, &mut sum, &mut out);
        out
    }
}

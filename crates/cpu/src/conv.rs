//! Causal depthwise convolution over the rows of one sequence, for a range of channels.
//!
//! In: rows of this step and the tail of rows before them. Out: one row at a time, and the tail that the
//! next step needs. A row's result is `silu(sum_j w[j] * x[t - (kernel - 1 - j) * dilation])`, `j`
//! ascending, one rounding per term, from 0; rows before the sequence are zeros. Where the tail lies and
//! which rows are one sequence is the caller's affair.

use minfer_graph::Conv1d;

use crate::Kernels;

/// Some channels of the rows of one sequence: a tail from earlier steps, then this step's rows.
#[derive(Clone, Copy, Debug)]
pub struct History<'a> {
    /// `[tail rows, channels of the range]`, oldest first.
    pub tail: &'a [f32],
    /// This step's rows of the sequence, `[rows, stride]`.
    pub rows: &'a [f32],
    /// Numbers from row to row.
    pub stride: usize,
    /// First channel of the range in `rows`.
    pub first: usize,
    /// Channels of the range.
    pub count: usize,
}

impl<'a> History<'a> {
    /// The range's channels of the row `lag` rows before this step's row `row`.
    ///
    /// # Panics
    /// When that is before the tail.
    pub fn row(&self, row: usize, lag: usize) -> &'a [f32] {
        match row.checked_sub(lag) {
            Some(row) => &self.rows[row * self.stride + self.first..][..self.count],
            None => &self.tail[self.tail.len() + (row * self.count) - lag * self.count..][..self.count],
        }
    }
}

/// A convolution's weight `[channels, kernel]` as `[kernel, channels]`, so that channels are neighbours.
pub fn by_tap(weight: &[f32], kernel: usize) -> Vec<f32> {
    (0..kernel).flat_map(|j| weight.chunks_exact(kernel).map(move |w| w[j])).collect()
}

impl Kernels {
    /// Row `row` of the convolution. `taps` is `[kernel, stride]` ([`by_tap`]); `sum` is scratch.
    ///
    /// # Panics
    /// When `sum` or `out` is not as long as the range, or the history as the convolution's tail.
    pub fn conv1d(
        &self,
        conv: &Conv1d,
        taps: &[f32],
        history: &History<'_>,
        row: usize,
        sum: &mut [f32],
        out: &mut [f32],
    ) {
        sum.fill(0.0);
        for j in 0..conv.kernel {
            let w = &taps[j * history.stride + history.first..][..history.count];
            self.fold(w, history.row(row, (conv.kernel - 1 - j) * conv.dilation), sum);
        }
        self.silu(sum, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close, assert_same_bits};

    const CHANNELS: usize = 19;

    fn run(k: &Kernels, conv: &Conv1d, w: &[f32], tail: &[f32], x: &[f32], first: usize) -> Vec<f32> {
        let count = CHANNELS - first;
        let tail: Vec<f32> = tail.chunks(CHANNELS).flat_map(|row| &row[first..]).copied().collect();
        let history = History { tail: &tail, rows: x, stride: CHANNELS, first, count };
        let (taps, mut sum) = (by_tap(w, conv.kernel), vec![0.0; count]);
        let mut out = vec![0.0; x.len() / CHANNELS * count];
        for (row, out) in out.chunks_mut(count).enumerate() {
            k.conv1d(conv, &taps, &history, row, &mut sum, out);
        }
        out
    }

    /// Against f64: at most 4 products of |x| <= 2 and one silu; bound 2e-6.
    #[test]
    fn equals_the_sum_over_the_whole_sequence() {
        let mut rng = Rng::new(80);
        for conv in [(4, 1), (4, 3), (1, 1), (2, 5)].map(|(kernel, dilation)| Conv1d { kernel, dilation }) {
            let (x, w) = (rng.floats(30 * CHANNELS, 2.0), rng.floats(CHANNELS * conv.kernel, 1.0));
            let term = |t: usize, c: usize, j: usize| {
                let lag = (conv.kernel - 1 - j) * conv.dilation;
                let x = t.checked_sub(lag).map_or(0.0, |t| f64::from(x[t * CHANNELS + c]));
                x * f64::from(w[c * conv.kernel + j])
            };
            let want: Vec<f64> = (0..x.len())
                .map(|i| (0..conv.kernel).map(|j| term(i / CHANNELS, i % CHANNELS, j)).sum::<f64>())
                .map(|y| y / (1.0 + (-y).exp()))
                .collect();
            let zeros = vec![0.0; conv.tail() * CHANNELS];
            let got = run(&Kernels::detect(), &conv, &w, &zeros, &x, 0);
            assert_close(&got, &want, 2e-6);
            assert_same_bits(&got, &run(&Kernels::scalar(), &conv, &w, &zeros, &x, 0));
            // The second half after the tail of the first, and channels from 8 on alone.
            let tail = &[&zeros[..], &x].concat()[15 * CHANNELS..][..zeros.len()];
            let late = run(&Kernels::detect(), &conv, &w, tail, &x[15 * CHANNELS..], 0);
            assert_same_bits(&late, &got[15 * CHANNELS..]);
            let part = run(&Kernels::detect(), &conv, &w, &zeros, &x, 8);
            let want: Vec<f32> = got.chunks(CHANNELS).flat_map(|row| &row[8..]).copied().collect();
            assert_same_bits(&part, &want);
        }
    }
}

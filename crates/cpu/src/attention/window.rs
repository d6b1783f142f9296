//! Attention of one row to a window of positions and to compressed rows, with a sink per head.
//!
//! Keys are also the values. The rows that are seen (the window, oldest first, then compressed rows,
//! ascending) are gathered into tiles; the sink is a score without a value, folded in before the first tile.

use std::ops::Range;

use minfer_graph::{PAGE, PagedPart};

use super::{AttendShape, CacheRows, HeadRows, Running, Scratch, take_runs};
use crate::Kernels;

/// A query row and what it may see.
#[derive(Clone, Copy, Debug)]
pub struct WindowRow<'a> {
    /// `[heads * k_dim]`.
    pub q: &'a [f32],
    /// Its absolute position.
    pub position: usize,
    /// Positions that it sees, its own included.
    pub window: usize,
    /// Their pages: position `j` lies in row `(window_pages[j / PAGE] - first_page) * PAGE + j % PAGE`. Entries before
    /// the window are not looked at.
    pub window_pages: &'a [i32],
    /// Number of the first page of the cache.
    pub first_page: usize,
    /// Pages of compressed rows: one lies in row `pages[j / PAGE] * PAGE + j % PAGE`, divided by the positions of a
    /// page that share it, for the last position `j` that it stands for.
    pub pages: &'a [i32],
    /// Positions per compressed row; 0: there are none.
    pub ratio: usize,
    /// Compressed rows, ascending, all complete at `position`; `None`: all that are.
    pub chosen: Option<&'a [i32]>,
}

impl WindowRow<'_> {
    /// Cache (0: positions, 1: compressed rows) and row in it of each row that is seen.
    fn seen(&self) -> impl Iterator<Item = (usize, usize)> {
        let end = self.position + 1;
        let complete = end.checked_div(self.ratio).unwrap_or(0);
        let all = 0..if self.chosen.is_none() { complete } else { 0 };
        let chosen = self.chosen.unwrap_or_default().iter().map(|&i| i as usize);
        let window = (end.saturating_sub(self.window)..end).map(|p| (0, self.window_row(p)));
        window.chain(all.chain(chosen).map(|i| (1, self.compressed_row(i))))
    }

    fn window_row(&self, position: usize) -> usize {
        (self.window_pages[position / PAGE] as usize - self.first_page) * PAGE + position % PAGE
    }

    fn compressed_row(&self, i: usize) -> usize {
        let last = (i + 1) * self.ratio - 1;
        let slot = self.pages[last / PAGE] as usize * PAGE + last % PAGE;
        PagedPart::each(1).every(self.ratio).row(slot)
    }
}

impl Kernels {
    /// Attention of query heads `heads` of one row over one KV head; returns `[heads.len(), k_dim]`. `caches`
    /// are the rows of positions and the compressed rows. Heads do not depend on which others are asked for.
    ///
    /// # Panics
    /// When a slice does not have the shape's size, or the page list does not cover a position or names a
    /// slot outside the cache. The caller validates position, pages and chosen rows.
    pub fn attend_window<'a>(
        &self,
        shape: &AttendShape,
        caches: [CacheRows<'_>; 2],
        sinks: &[f32],
        row: &WindowRow<'_>,
        heads: Range<usize>,
        scratch: &'a mut Scratch,
    ) -> &'a [f32] {
        let dim = shape.k_dim;
        assert!(
            shape.kv_heads == 1 && shape.v_dim == dim && sinks.len() == shape.heads,
            "attend_window: shape"
        );
        assert!(row.q.len() == shape.heads * dim && row.window > 0, "attend_window: query");
        assert!(heads.len() <= scratch.queries, "attend_window: scratch");
        let Scratch { room, fold, runs, .. } = scratch;
        fold.begin();
        fold.begin_range();
        for (running, &sink) in fold.running.iter_mut().zip(&sinks[heads.clone()]) {
            *running = Running { max: sink, sum: 1.0 };
        }
        let q = &row.q[heads.start * dim..heads.end * dim];
        let caches = caches.map(|cache| HeadRows { cache, head: 0, heads: 1, dim });
        let mut seen = row.seen().peekable();
        while seen.peek().is_some() {
            take_runs(&mut seen, |taken, _| taken < PAGE, |row| row, runs);
            let rows = self.tile_of_runs(&caches, runs, heads.len(), &mut room.k);
            fold.fold(self, q, rows, rows, shape.scale);
        }
        fold.end_range(self, 0..heads.len(), shape.v_dim);
        fold.end(0..heads.len(), shape.v_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close, assert_same_bits};

    /// Against f64 over all rows that may be seen; weights of sum 1 on |v| <= 2, exponents good to 1e-6: 5e-6.
    /// Half of the heads alone, and every instruction set, give the same bits.
    #[test]
    fn equals_one_softmax_over_window_rows_and_sink() {
        let mut rng = Rng::new(112);
        let (heads, dim, ratio, position) = (4, 24, 4, 200);
        let shape = AttendShape { heads, kv_heads: 1, k_dim: dim, v_dim: dim, scale: 0.2 };
        let pages = [2, 0, 3, 1];
        let [raw, compressed] = [4 * PAGE, 4 * PAGE / ratio].map(|rows| rng.floats(rows * dim, 2.0));
        let (q, sinks) = (rng.floats(heads * dim, 2.0), rng.floats(heads, 2.0));
        let slot = |p: usize| pages[p / PAGE] as usize * PAGE + p % PAGE;
        for (window, chosen, ratio) in
            [(100, None, 0), (7, None, ratio), (1000, Some(&[0, 3, 49][..]), ratio), (1, Some(&[]), ratio)]
        {
            let first_page = 5;
            let mut window_pages = pages.map(|p| p + first_page as i32);
            let first_seen = (position + 1usize).saturating_sub(window) / PAGE;
            window_pages[..first_seen].fill(-1);
            let row = WindowRow {
                q: &q,
                position,
                window,
                window_pages: &window_pages,
                first_page,
                pages: &pages,
                ratio,
                chosen,
            };
            let complete: Vec<i32> = (0..(position as i32 + 1) / ratio.max(1) as i32).collect();
            let listed = if ratio == 0 { &[][..] } else { chosen.unwrap_or(&complete) };
            let mut rows: Vec<&[f32]> = ((position + 1).saturating_sub(window)..=position)
                .map(|p| &raw[slot(p) * dim..][..dim])
                .collect();
            rows.extend(
                listed
                    .iter()
                    .map(|&i| &compressed[slot((i as usize + 1) * ratio - 1) / ratio * dim..][..dim]),
            );
            let mut want = Vec::new();
            for h in 0..heads {
                let dot = |k: &[f32]| k.iter().zip(&q[h * dim..]).map(|(a, b)| f64::from(a * b)).sum::<f64>();
                let weights: Vec<f64> = rows.iter().map(|k| (dot(k) * 0.2).exp()).collect();
                let sum = weights.iter().sum::<f64>() + f64::from(sinks[h]).exp();
                want.extend(
                    (0..dim).map(|i| {
                        rows.iter().zip(&weights).map(|(k, w)| f64::from(k[i]) * w).sum::<f64>() / sum
                    }),
                );
            }
            let run = |k: &Kernels, heads: Range<usize>| {
                let caches = [CacheRows::F32(&raw), CacheRows::F32(&compressed)];
                let mut scratch = Scratch::new(&shape);
                k.attend_window(&shape, caches, &sinks, &row, heads, &mut scratch).to_vec()
            };
            let got = run(&Kernels::detect(), 0..heads);
            assert_close(&got, &want, 5e-6);
            assert_same_bits(&run(&Kernels::detect(), 2..4), &got[2 * dim..]);
            assert_same_bits(&run(&Kernels::scalar(), 0..heads), &got);
        }
    }
}

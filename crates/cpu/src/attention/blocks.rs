//! Attention of one row over chosen blocks of positions and its incomplete last block.
//!
//! Tiles are the pages, as in dense attention, with only the allowed rows in them; pages without any are
//! skipped, and so are ranges. With every block chosen the bits are those of dense attention.

use std::ops::Range;

use minfer_graph::PAGE;

use super::{AttendShape, HeadRows, KvView, RANGE, Scratch, take_runs};
use crate::Kernels;

/// A query row and what it may see.
#[derive(Clone, Copy, Debug)]
pub struct SparseRow<'a> {
    /// `[heads * k_dim]`.
    pub q: &'a [f32],
    /// Its absolute position.
    pub position: usize,
    /// The sequence's pages: position `j` lies in slot `pages[j / PAGE] * PAGE + j % PAGE`.
    pub pages: &'a [i32],
    /// Chosen blocks, ascending, all of them complete at `position`.
    pub blocks: &'a [i32],
    /// Positions per block.
    pub block: usize,
}

impl SparseRow<'_> {
    /// Allowed positions, ascending: those of the chosen blocks, then those after the last complete block.
    fn allowed(&self) -> impl Iterator<Item = usize> {
        let (seen, block) = (self.position + 1, self.block);
        let chosen = self.blocks.iter().flat_map(move |&b| b as usize * block..(b as usize + 1) * block);
        chosen.chain(seen / block * block..seen)
    }

    fn slot(&self, position: usize) -> usize {
        self.pages[position / PAGE] as usize * PAGE + position % PAGE
    }
}

impl Kernels {
    /// Attention of query heads `heads`, all of one KV head, for one row; returns `[heads.len(), v_dim]`. Heads
    /// do not depend on which others are asked for. A row that may see nothing gives NaN.
    ///
    /// # Panics
    /// When a slice does not have the shape's size, or the page list does not cover a position or names a
    /// slot outside the cache. The caller validates position, pages and blocks.
    pub fn attend_blocks<'a>(
        &self,
        shape: &AttendShape,
        kv: &KvView<'_>,
        row: &SparseRow<'_>,
        heads: Range<usize>,
        scratch: &'a mut Scratch,
    ) -> &'a [f32] {
        let kv_head = heads.start / shape.group();
        assert!(heads.end <= (kv_head + 1) * shape.group(), "attend_blocks: heads of two KV heads");
        assert!(row.q.len() == shape.heads * shape.k_dim && kv_head < shape.kv_heads, "attend_blocks: heads");
        assert!(heads.len() <= scratch.queries && row.block > 0, "attend_blocks: scratch or block");
        let Scratch { room, fold, runs, .. } = scratch;
        fold.begin();
        let q = &row.q[heads.start * shape.k_dim..heads.end * shape.k_dim];

        let k_head = HeadRows { cache: kv.k, head: kv_head, heads: shape.kv_heads, dim: shape.k_dim };
        let v_head = HeadRows { cache: kv.v, dim: shape.v_dim, ..k_head };
        let one = shape.k_dim == shape.v_dim && kv.k.is(&kv.v);
        let mut allowed = row.allowed().peekable();
        fold.begin_range();
        while let Some(&first) = allowed.peek() {
            let in_page = |_: usize, p: &usize| p / PAGE == first / PAGE;
            take_runs(&mut allowed, in_page, |p| (0, row.slot(p)), runs);
            let keys = self.tile_of_runs(&[k_head], runs, heads.len(), &mut room.k);
            let values =
                if one { keys } else { self.tile_of_runs(&[v_head], runs, heads.len(), &mut room.v) };
            fold.fold(self, q, keys, values, shape.scale);
            if allowed.peek().is_none_or(|next| next / RANGE > first / RANGE) {
                fold.end_range(self, 0..heads.len(), shape.v_dim);
                fold.begin_range();
            }
        }
        fold.end(0..heads.len(), shape.v_dim)
    }
}

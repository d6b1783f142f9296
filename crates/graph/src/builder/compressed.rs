//! Nodes of compression, of attention over windows and compressed rows, and of their routing.

use super::GraphBuilder;
use crate::compressed::{AttendWindow, Compress, ExpertWeights, RoundTrip, StorePart};
use crate::graph::{StateId, ValueId, WeightId};
use crate::op::Op;
use crate::payload::{Rope, RopeStyle};

impl GraphBuilder {
    /// Compressed rows of the windows that this step completes; `slots` are `state_from` and `state_to`.
    pub fn compress(
        &mut self,
        [kv, gate, positions]: [ValueId; 3],
        slots: [ValueId; 2],
        bias: WeightId,
        state: StateId,
        compress: Compress,
    ) -> ValueId {
        let inputs = [kv, gate, positions, slots[0], slots[1]];
        self.one(Op::Compress(compress), &inputs, Some(bias), Some(state), "compressed")
    }

    /// `x`, with zeros in rows at position 0.
    pub fn zero_first(&mut self, x: ValueId, positions: ValueId) -> ValueId {
        self.one(Op::ZeroFirst, &[x, positions], None, None, "zero_first")
    }

    /// First position of each row's window of `ratio` positions.
    pub fn window_start(&mut self, positions: ValueId, ratio: usize) -> ValueId {
        self.one(Op::WindowStart(ratio), &[positions], None, None, "window_start")
    }

    /// Writes rows that complete `store.every` positions into a part of `state`.
    pub fn store_part(
        &mut self,
        x: ValueId,
        positions: ValueId,
        slots: ValueId,
        state: StateId,
        store: StorePart,
    ) {
        self.push(Op::StorePart(store), &[x, positions, slots], None, Some(state), "");
    }

    /// Attention to a window, whose page lists are among the tables, and to compressed rows, which lie in `pages`:
    /// those listed in `chosen`, or all complete ones.
    #[allow(clippy::too_many_arguments)]
    pub fn attend_window(
        &mut self,
        q: ValueId,
        [positions, table_at, window_pages]: [ValueId; 3],
        pages: ValueId,
        chosen: Option<ValueId>,
        sinks: WeightId,
        state: StateId,
        attend: AttendWindow,
    ) -> ValueId {
        let inputs: Vec<_> =
            [q, positions, table_at, window_pages, pages].into_iter().chain(chosen).collect();
        self.one(Op::AttendWindow(attend), &inputs, Some(sinks), Some(state), "attended")
    }

    /// Rotates adjacent pairs of the last dimensions of each head.
    pub fn rope_tail(&mut self, x: ValueId, table: ValueId, head_dim: usize) -> ValueId {
        let rope = Rope { style: RopeStyle::Interleaved, head_dim };
        self.one(Op::RopeTail(rope), &[x, table], None, None, "rotated")
    }

    /// Ids that a table lists for each id.
    pub fn gather_ids(&mut self, ids: ValueId, table: WeightId) -> ValueId {
        self.one(Op::GatherIds, &[ids], Some(table), None, "listed")
    }

    /// Weights of experts that are already chosen.
    pub fn expert_weights(&mut self, logits: ValueId, ids: ValueId, weights: ExpertWeights) -> ValueId {
        self.one(Op::ExpertWeights(weights), &[logits, ids], None, None, "expert_weights")
    }

    /// Groups of each row, rounded to a small float format and back.
    pub fn round_trip(&mut self, x: ValueId, round: RoundTrip) -> ValueId {
        self.one(Op::RoundTrip(round), &[x], None, None, "rounded")
    }
}

//! What the graph of every architecture is put together from: the inputs of a step, weights by their names,
//! projections, norms, experts, and state. How they are wired is the architecture's own file.

use minfer_graph::{
    Act, ActKind, Clamp, Dim, Graph, GraphBuilder, PagedPart, Slice, StateDecl, StateId, StateKind,
    StorePart, ValueId, ValueType, WeightId,
};

use crate::checkpoint::{Checkpoint, Names};
use crate::error::ModelError;
use crate::hyper::Hyper;

pub(crate) const SIGMOID: Act = Act { kind: ActKind::Sigmoid, pre: 1.0, post: 1.0 };

/// The graph of a step under construction.
pub(crate) struct Parts<'a> {
    pub(crate) b: GraphBuilder,
    pub(crate) ck: &'a Checkpoint,
    norm_eps: f32,
    layer: Option<usize>,
    pub(crate) tokens: ValueId,
    /// Where each row's paged state goes.
    pub(crate) slots: ValueId,
    /// Positions, start of each row's page list, page lists.
    pub(crate) tables: [ValueId; 3],
    /// Slots that recurrent state is read from and written to, once something has asked for them.
    state_slots: Option<[ValueId; 2]>,
    /// The same two for state of which only a window is kept, once something has asked for them.
    windows: Option<[ValueId; 2]>,
    page_table: usize,
    /// Rows whose logits are wanted.
    pub(crate) out_rows: ValueId,
}

impl<'a> Parts<'a> {
    /// Declares the inputs that every step has.
    pub(crate) fn new(ck: &'a Checkpoint, h: &Hyper, page_table: usize) -> Parts<'a> {
        let mut b = GraphBuilder::new();
        let mut per_row = |name| b.input(name, ValueType::i32(Dim::Rows, []));
        let (tokens, positions) = (per_row("tokens"), per_row("positions"));
        let (slots, table_at) = (per_row("slots"), per_row("table_at"));
        let pages = b.input("pages", ValueType::i32(Dim::Const(page_table), []));
        let out_rows = b.input("out_rows", ValueType::i32(Dim::Outs, []));
        let tables = [positions, table_at, pages];
        let (layer, state_slots, windows) = (None, None, None);
        let norm_eps = h.norm_eps;
        Parts { b, ck, norm_eps, layer, tokens, slots, tables, state_slots, windows, page_table, out_rows }
    }

    /// The tokens' embeddings `[rows, hidden]`, and the table.
    pub(crate) fn embed(&mut self, names: Names, h: &Hyper) -> Result<(ValueId, WeightId), ModelError> {
        let table = self.b.weight(self.ck.weight(names, None, "weight", &[h.vocab, h.hidden])?);
        Ok((self.b.embed(self.tokens, table), table))
    }

    /// The nodes and weights that follow belong to layer `layer`.
    pub(crate) fn enter(&mut self, layer: usize) {
        self.layer = Some(layer);
        self.b.set_layer(Some(layer as u32));
    }

    /// The nodes and weights that follow belong to no layer.
    pub(crate) fn leave(&mut self) {
        self.layer = None;
        self.b.set_layer(None);
    }

    pub(crate) fn layer(&self) -> Option<usize> {
        self.layer
    }

    pub(crate) fn number(&self) -> usize {
        self.layer.unwrap_or(0)
    }

    pub(crate) fn positions(&self) -> ValueId {
        self.tables[0]
    }

    /// Slots that recurrent state is read from and written to: inputs of models that have such state.
    pub(crate) fn state_slots(&mut self) -> [ValueId; 2] {
        let b = &mut self.b;
        let mut input = |name| b.input(name, ValueType::i32(Dim::Rows, []));
        *self.state_slots.get_or_insert_with(|| [input("state_from"), input("state_to")])
    }

    /// Where each row's state of a window goes, and page lists beside those of all state, without the pages that
    /// have fallen out of the window: inputs of models that have such state.
    fn windows(&mut self) -> [ValueId; 2] {
        let (b, pages) = (&mut self.b, Dim::Const(self.page_table));
        *self.windows.get_or_insert_with(|| {
            [
                b.input("window_slots", ValueType::i32(Dim::Rows, [])),
                b.input("window_pages", ValueType::i32(pages, [])),
            ]
        })
    }

    /// Positions, start of each row's page list, page lists of windows.
    pub(crate) fn window_tables(&mut self) -> [ValueId; 3] {
        let [_, pages] = self.windows();
        [self.tables[0], self.tables[1], pages]
    }

    /// Keeps a row per position in a part of which all is kept.
    pub(crate) fn store(&mut self, x: ValueId, state: StateId, part: usize) {
        let positions = self.positions();
        self.b.store_part(x, positions, self.slots, state, StorePart { part, every: 1 });
    }

    /// Keeps a row per position in a part of which a window is kept.
    pub(crate) fn store_windowed(&mut self, x: ValueId, state: StateId, part: usize) {
        let (positions, [slots, _]) = (self.positions(), self.windows());
        self.b.store_part(x, positions, slots, state, StorePart { part, every: 1 });
    }

    pub(crate) fn weight(
        &mut self,
        names: Names,
        suffix: &str,
        shape: &[usize],
    ) -> Result<WeightId, ModelError> {
        let decl = self.ck.weight(names, self.layer, suffix, shape)?;
        Ok(self.b.weight(decl))
    }

    /// RMS norm of groups of `n`.
    pub(crate) fn norm(&mut self, x: ValueId, names: Names, n: usize) -> Result<ValueId, ModelError> {
        let w = self.weight(names, "weight", &[n])?;
        Ok(self.b.rms_norm(x, w, self.norm_eps))
    }

    /// `x W^T`, with the tensor's scale and then its bias where the file has them.
    pub(crate) fn linear(
        &mut self,
        x: ValueId,
        names: Names,
        shape: [usize; 2],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.weight(names, "weight", &shape)?;
        let y = self.b.matmul(x, w, name);
        let y = self.scaled(y, names)?;
        self.biased(y, names, shape[0], false)
    }

    /// `y` times the tensor's scale, where the file has one.
    pub(crate) fn scaled(&mut self, y: ValueId, names: Names) -> Result<ValueId, ModelError> {
        match self.ck.optional(names, self.layer, "scale", &[1])? {
            Some(scale) => {
                let scale = self.b.weight(scale);
                Ok(self.b.scale(y, scale))
            }
            None => Ok(y),
        }
    }

    /// `y` plus the tensor's bias, which must be there or may be.
    pub(crate) fn biased(
        &mut self,
        y: ValueId,
        names: Names,
        n: usize,
        needed: bool,
    ) -> Result<ValueId, ModelError> {
        let bias = match needed {
            true => Some(self.ck.weight(names, self.layer, "bias", &[n])?),
            false => self.ck.optional(names, self.layer, "bias", &[n])?,
        };
        match bias {
            Some(bias) => {
                let bias = self.b.weight(bias);
                Ok(self.b.bias_add(y, bias))
            }
            None => Ok(y),
        }
    }

    /// A product in two steps, `[n, rank] [rank, k]`.
    pub(crate) fn low_rank(
        &mut self,
        x: ValueId,
        [a, b]: [Names; 2],
        [n, rank, k]: [usize; 3],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let low = self.linear(x, a, [rank, k], name)?;
        self.linear(low, b, [n, rank], name)
    }

    /// `W (e; a_s)` for each of the `n` streams of `a [n, hidden]`, side by side: how GGUF files keep the two
    /// projections of a draft head in one tensor.
    pub(crate) fn join_streams(
        &mut self,
        e: ValueId,
        a: ValueId,
        names: Names,
        [n, hidden]: [usize; 2],
    ) -> Result<ValueId, ModelError> {
        let group = n * hidden;
        let a = self.b.reshape(a, &[group]);
        let mut streams = Vec::with_capacity(n);
        for s in 0..n {
            let a = self.b.slice(a, Slice { group, from: s * hidden, len: hidden }, "draft_stream");
            let both = self.b.concat(&[e, a], "draft_input");
            streams.push(self.linear(both, names, [hidden, 2 * hidden], "draft_joined")?);
        }
        Ok(self.b.concat(&streams, "draft_streams"))
    }

    /// Products with each row's experts, and scales where the file has those.
    pub(crate) fn experts(
        &mut self,
        x: ValueId,
        ids: ValueId,
        names: Names,
        shape: [usize; 3],
        name: &str,
    ) -> Result<ValueId, ModelError> {
        let w = self.b.weight(self.ck.experts(names, self.number(), shape)?);
        let y = self.b.grouped_matmul(x, ids, w, name);
        self.expert_scaled(y, ids, names, shape[0])
    }

    /// `y` times the scale of each row's experts, where the file has those.
    pub(crate) fn expert_scaled(
        &mut self,
        y: ValueId,
        ids: ValueId,
        names: Names,
        count: usize,
    ) -> Result<ValueId, ModelError> {
        match self.ck.optional(names, self.layer, "scale", &[count])? {
            Some(scales) => {
                let scales = self.b.weight(scales);
                Ok(self.b.expert_scale(y, ids, scales))
            }
            None => Ok(y),
        }
    }

    /// `silu(gate) * up`.
    pub(crate) fn swiglu(&mut self, gate: ValueId, up: ValueId) -> ValueId {
        let gate = self.b.silu(gate);
        self.b.mul(gate, up)
    }

    /// `silu(min(gate, limit)) * clamp(up, -limit, limit)`, since large inputs spoil low precisions.
    pub(crate) fn bounded_swiglu(&mut self, gate: ValueId, up: ValueId, limit: f32) -> ValueId {
        if !limit.is_finite() {
            return self.swiglu(gate, up);
        }
        let gate = self.b.clamp(gate, Clamp { low: f32::NEG_INFINITY, high: limit });
        let up = self.b.clamp(up, Clamp { low: -limit, high: limit });
        self.swiglu(gate, up)
    }

    /// State of this layer whose rows belong to positions.
    pub(crate) fn paged(&mut self, name: &str, parts: Vec<PagedPart>) -> StateId {
        self.state(name, StateKind::Paged { parts })
    }

    /// State of this layer that every token replaces.
    pub(crate) fn recurrent(&mut self, name: &str, width: usize) -> StateId {
        self.state(name, StateKind::Recurrent { width })
    }

    fn state(&mut self, name: &str, kind: StateKind) -> StateId {
        let layer = self.number();
        self.b.state(StateDecl { name: format!("{name}.{layer}"), layer: layer as u32, kind })
    }

    pub(crate) fn finish(self) -> Result<Graph, ModelError> {
        self.b.finish().map_err(|source| ModelError::Graph { source_name: self.ck.name(), source })
    }
}

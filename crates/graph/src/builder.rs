//! Builds a graph node by node. A model reads like its paper; shape errors surface at the node that
//! causes them, through [`GraphBuilder::finish`] at the latest.

mod compressed;

use std::collections::HashMap;

use crate::error::GraphError;
use crate::graph::{Graph, Input, Node, Output, StateId, Value, ValueId, WeightDecl, WeightId};
use crate::op::Op;
use crate::payload::{
    Act, Attend, AttendBlocks, Clamp, Conv1d, DeltaRule, HyperMix, IndexSelect, Norm, PoolGated, PoolKeys,
    Rope, RopeStyle, RopeTable, Router, Slice, Streams,
};
use crate::state::StateDecl;
use crate::types::{DType, ValueType};

/// A graph under construction.
///
/// The first operand error is kept and returned by [`GraphBuilder::finish`], so that model code needs no
/// `?` on each line; values made after it are placeholders.
#[derive(Default)]
pub struct GraphBuilder {
    graph: Graph,
    layer: Option<u32>,
    error: Option<GraphError>,
    /// One quantised copy of a value feeds all its products.
    quantized: HashMap<ValueId, ValueId>,
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new() -> GraphBuilder {
        GraphBuilder::default()
    }

    /// Sets the layer of the nodes that follow.
    pub fn set_layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// Declares an input of the step.
    pub fn input(&mut self, name: &'static str, ty: ValueType) -> ValueId {
        let value = self.value(ty, name);
        self.graph.inputs.push(Input { name, value });
        value
    }

    /// Declares a weight.
    pub fn weight(&mut self, decl: WeightDecl) -> WeightId {
        self.graph.weights.push(decl);
        WeightId(self.graph.weights.len() as u32 - 1)
    }

    /// Declares a piece of state.
    pub fn state(&mut self, decl: StateDecl) -> StateId {
        self.graph.states.push(decl);
        StateId(self.graph.states.len() as u32 - 1)
    }

    /// Names a value as a result of the step.
    pub fn output(&mut self, name: &'static str, value: ValueId) {
        self.graph.outputs.push(Output { name, value });
    }

    /// Rows of an embedding table.
    pub fn embed(&mut self, ids: ValueId, table: WeightId) -> ValueId {
        self.one(Op::Embed, &[ids], Some(table), None, "embed")
    }

    /// RMS norm over whole rows, or over groups (heads) as long as the weight.
    pub fn rms_norm(&mut self, x: ValueId, weight: WeightId, eps: f32) -> ValueId {
        let group = self.graph.weights[weight.index()].shape.first().copied().unwrap_or(0);
        self.grouped_norm(x, weight, Norm { eps, group })
    }

    /// RMS norm over groups, with a weight for one group or for the whole row.
    pub fn grouped_norm(&mut self, x: ValueId, weight: WeightId, norm: Norm) -> ValueId {
        self.one(Op::RmsNorm(norm), &[x], Some(weight), None, "norm")
    }

    /// RMS norm over groups, without a weight.
    pub fn unit_norm(&mut self, x: ValueId, norm: Norm) -> ValueId {
        self.one(Op::UnitNorm(norm), &[x], None, None, "norm")
    }

    /// Layer norm over groups; the weight holds weight and bias.
    pub fn layer_norm(&mut self, x: ValueId, weight: WeightId, norm: Norm) -> ValueId {
        self.one(Op::LayerNorm(norm), &[x], Some(weight), None, "norm")
    }

    /// `x W^T`; inserts the `Quantize` node that a quantised weight wants, once per value.
    pub fn matmul(&mut self, x: ValueId, weight: WeightId, name: &str) -> ValueId {
        let x = self.activation(x, weight);
        self.one(Op::MatMul, &[x], Some(weight), None, name)
    }

    /// Products of each row with the experts chosen for it.
    pub fn grouped_matmul(&mut self, x: ValueId, ids: ValueId, weight: WeightId, name: &str) -> ValueId {
        let x = self.activation(x, weight);
        self.one(Op::GroupedMatMul, &[x, ids], Some(weight), None, name)
    }

    /// Each head of `x`, one after the other, times its matrix.
    pub fn head_matmul(&mut self, x: ValueId, weight: WeightId, name: &str) -> ValueId {
        let shape = &self.graph.weights[weight.index()].shape;
        let inner = [shape.first(), shape.last()].map(|d| d.copied().unwrap_or(0));
        let x = self.reshape(x, &inner);
        let x = self.activation(x, weight);
        self.one(Op::HeadMatMul, &[x], Some(weight), None, name)
    }

    /// `x + bias`.
    pub fn bias_add(&mut self, x: ValueId, bias: WeightId) -> ValueId {
        self.one(Op::BiasAdd, &[x], Some(bias), None, "biased")
    }

    /// `x * scale`, one number for the whole product.
    pub fn scale(&mut self, x: ValueId, scale: WeightId) -> ValueId {
        self.one(Op::Scale, &[x], Some(scale), None, "scaled")
    }

    /// Each expert's output times its scale.
    pub fn expert_scale(&mut self, y: ValueId, ids: ValueId, scales: WeightId) -> ValueId {
        self.one(Op::ExpertScale, &[y, ids], Some(scales), None, "scaled")
    }

    /// `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.one(Op::Add, &[a, b], None, None, "sum")
    }

    /// `a * b`, element by element.
    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.one(Op::Mul, &[a, b], None, None, "product")
    }

    /// `silu(x)`.
    pub fn silu(&mut self, x: ValueId) -> ValueId {
        self.one(Op::Silu, &[x], None, None, "silu")
    }

    /// Cosines and sines of the step's positions.
    pub fn rope_table(&mut self, positions: ValueId, table: RopeTable) -> ValueId {
        self.one(Op::RopeTable(table), &[positions], None, None, "rope_table")
    }

    /// Rotates the heads of `x`.
    pub fn rope(&mut self, x: ValueId, table: ValueId, style: RopeStyle, head_dim: usize) -> ValueId {
        self.one(Op::Rope(Rope { style, head_dim }), &[x, table], None, None, "rotated")
    }

    /// Writes rows of the first parts of `state` (K, V, ..) into their slots.
    pub fn store_kv(&mut self, rows: &[ValueId], slots: ValueId, state: StateId) {
        let inputs: Vec<_> = rows.iter().copied().chain([slots]).collect();
        self.push(Op::StoreKv, &inputs, None, Some(state), "");
    }

    /// Attention of each row over its sequence's pages.
    pub fn attend(
        &mut self,
        q: ValueId,
        [positions, table_at, pages]: [ValueId; 3],
        state: StateId,
        attend: Attend,
    ) -> ValueId {
        self.one(Op::Attend(attend), &[q, positions, table_at, pages], None, Some(state), "attended")
    }

    /// Attention over the chosen blocks.
    pub fn attend_blocks(
        &mut self,
        q: ValueId,
        [positions, table_at, pages]: [ValueId; 3],
        blocks: ValueId,
        state: StateId,
        attend: AttendBlocks,
    ) -> ValueId {
        let inputs = [q, positions, table_at, pages, blocks];
        self.one(Op::AttendBlocks(attend), &inputs, None, Some(state), "attended")
    }

    /// Completes the index keys of blocks that this step fills.
    pub fn pool_keys(
        &mut self,
        [positions, table_at, pages]: [ValueId; 3],
        slots: ValueId,
        norm: WeightId,
        state: StateId,
        pool: PoolKeys,
    ) {
        let inputs = [positions, table_at, pages, slots];
        self.push(Op::PoolKeys(pool), &inputs, Some(norm), Some(state), "");
    }

    /// The same by gates; `bias` is one per position of a block.
    pub fn pool_gated(
        &mut self,
        [positions, table_at, pages]: [ValueId; 3],
        slots: ValueId,
        bias: WeightId,
        state: StateId,
        pool: PoolGated,
    ) {
        let inputs = [positions, table_at, pages, slots];
        self.push(Op::PoolGated(pool), &inputs, Some(bias), Some(state), "");
    }

    /// The best blocks of each row; `weights` are those of the heads, where heads have any.
    pub fn index_select(
        &mut self,
        q: ValueId,
        [positions, table_at, pages]: [ValueId; 3],
        weights: Option<ValueId>,
        state: StateId,
        select: IndexSelect,
    ) -> ValueId {
        let inputs: Vec<_> = [q, positions, table_at, pages].into_iter().chain(weights).collect();
        self.one(Op::IndexSelect(select), &inputs, None, Some(state), "blocks")
    }

    /// Causal depthwise convolution; `slots` are `state_from` and `state_to`.
    pub fn conv1d(
        &mut self,
        x: ValueId,
        slots: [ValueId; 2],
        weight: WeightId,
        state: StateId,
        conv: Conv1d,
    ) -> ValueId {
        self.one(Op::Conv1d(conv), &[x, slots[0], slots[1]], Some(weight), Some(state), "conv")
    }

    /// Gated delta rule; `slots` are `state_from` and `state_to`.
    pub fn delta_rule(
        &mut self,
        [qkv, g, beta]: [ValueId; 3],
        slots: [ValueId; 2],
        state: StateId,
        rule: DeltaRule,
    ) -> ValueId {
        self.one(Op::DeltaRule(rule), &[qkv, g, beta, slots[0], slots[1]], None, Some(state), "delta")
    }

    /// A function on each number.
    pub fn act(&mut self, x: ValueId, act: Act) -> ValueId {
        self.one(Op::Act(act), &[x], None, None, "act")
    }

    /// `x` within bounds.
    pub fn clamp(&mut self, x: ValueId, clamp: Clamp) -> ValueId {
        self.one(Op::Clamp(clamp), &[x], None, None, "clamped")
    }

    /// `x` times a weight, element by element.
    pub fn scale_vec(&mut self, x: ValueId, weight: WeightId) -> ValueId {
        self.one(Op::ScaleVec, &[x], Some(weight), None, "scaled")
    }

    /// Part of each group of a row.
    pub fn slice(&mut self, x: ValueId, slice: Slice, name: &str) -> ValueId {
        self.one(Op::Slice(slice), &[x], None, None, name)
    }

    /// Rows side by side.
    pub fn concat(&mut self, parts: &[ValueId], name: &str) -> ValueId {
        self.one(Op::Concat, parts, None, None, name)
    }

    /// The same numbers under another shape.
    pub fn reshape(&mut self, x: ValueId, inner: &[usize]) -> ValueId {
        self.one(Op::Reshape(inner.to_vec()), &[x], None, None, "reshaped")
    }

    /// Weights `pre`, `post` and `comb` of a hyper-connection; the weight is base and scales.
    pub fn hyper_mix(&mut self, m: ValueId, weight: WeightId, mix: HyperMix) -> [ValueId; 3] {
        let out = self.push(Op::HyperMix(mix), &[m], Some(weight), None, "mix");
        [out[0], out[1], out[2]]
    }

    /// An op on residual streams: `Repeat`, or one whose name begins with `Stream`.
    pub fn streams(
        &mut self,
        op: fn(Streams) -> Op,
        streams: Streams,
        inputs: &[ValueId],
        name: &str,
    ) -> ValueId {
        self.one(op(streams), inputs, None, None, name)
    }

    /// Expert ids and weights of each row.
    pub fn router(&mut self, logits: ValueId, bias: Option<WeightId>, router: Router) -> (ValueId, ValueId) {
        let out = self.push(Op::Router(router), &[logits], bias, None, "experts");
        (out[0], out[1])
    }

    /// Sum of expert outputs by weight, in rank order.
    pub fn combine_experts(&mut self, y: ValueId, weights: ValueId) -> ValueId {
        self.one(Op::CombineExperts, &[y, weights], None, None, "combined")
    }

    /// The rows listed in `index`.
    pub fn gather_rows(&mut self, x: ValueId, index: ValueId) -> ValueId {
        self.one(Op::GatherRows, &[x, index], None, None, "gathered")
    }

    /// Index of each row's largest number.
    pub fn argmax(&mut self, x: ValueId) -> ValueId {
        self.one(Op::ArgMax, &[x], None, None, "argmax")
    }

    /// The finished graph, or the first error.
    pub fn finish(self) -> Result<Graph, GraphError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.graph.validate()?;
        Ok(self.graph)
    }

    fn activation(&mut self, x: ValueId, weight: WeightId) -> ValueId {
        let wants = self.graph.weights[weight.index()].activation();
        if wants != DType::Q8 || self.graph.ty(x).dtype == DType::Q8 {
            return x;
        }
        if let Some(&q) = self.quantized.get(&x) {
            return q;
        }
        let q = self.one(Op::Quantize, &[x], None, None, "quantized");
        self.quantized.insert(x, q);
        q
    }

    fn value(&mut self, ty: ValueType, name: &str) -> ValueId {
        self.graph.values.push(Value { ty, name: name.to_string() });
        ValueId(self.graph.values.len() as u32 - 1)
    }

    fn one(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        weight: Option<WeightId>,
        state: Option<StateId>,
        name: &str,
    ) -> ValueId {
        self.push(op, inputs, weight, state, name)[0]
    }

    fn push(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        weight: Option<WeightId>,
        state: Option<StateId>,
        name: &str,
    ) -> Vec<ValueId> {
        let mut node = Node {
            op,
            inputs: inputs.to_vec(),
            outputs: vec![],
            weight,
            state,
            layer: self.layer,
            place: None,
        };
        let types = match self.graph.infer(&node) {
            Ok(types) => types,
            Err(why) => {
                let error = self.graph.operand_error(self.graph.nodes.len(), &node, why);
                self.error.get_or_insert(error);
                // Three placeholders: no operation has more outputs.
                let like = inputs.first().map(|&v| self.graph.ty(v).clone());
                let ty = like.unwrap_or_else(|| ValueType::f32(crate::Dim::Rows, [1]));
                return (0..3).map(|_| self.value(ty.clone(), name)).collect();
            }
        };
        node.outputs = types.into_iter().map(|ty| self.value(ty, name)).collect();
        let outputs = node.outputs.clone();
        self.graph.nodes.push(node);
        outputs
    }
}

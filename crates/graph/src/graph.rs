//! The graph itself: values, nodes, weights and states by reference, and validation.

use std::collections::HashSet;

use minfer_format::BlockType;

use crate::error::GraphError;
use crate::op::Op;
use crate::place::DeviceId;
use crate::state::StateDecl;
use crate::types::{DType, ValueType};

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);
        impl $name {
            /// As an index into the graph's table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    )*};
}

ids! {
    /// Index of a value.
    ValueId,
    /// Index of a node in build order, which is also execution order.
    NodeId,
    /// Index of a weight.
    WeightId,
    /// Index of a piece of state.
    StateId
}

/// A value: an input of the graph or an output of one node.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Value {
    pub ty: ValueType,
    /// Name in exports, such as `q`.
    pub name: String,
}

/// A weight, by the name that the model file gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightDecl {
    /// The name in messages: the tensor's, or a pattern such as `experts.*.down_proj`.
    pub name: String,
    /// How the file stores its numbers.
    pub ty: BlockType,
    /// Outermost first: `[n]`, `[n, k]` or `[experts, n, k]`.
    pub shape: Vec<usize>,
    /// Tensors of the file that make it up, stacked along the outermost dimension; usually one.
    pub tensors: Vec<String>,
    /// What the loader does to its numbers; anything but [`WeightMap::None`] gives F32.
    pub map: WeightMap,
}

/// A change of a weight's numbers on loading, where a file format stores something else than the maths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightMap {
    /// As in the file.
    #[default]
    None,
    /// `1 + w`: norm weights stored as their distance from one.
    AddOne,
    /// `-exp(w)`: decay rates stored as logarithms.
    NegExp,
    /// Some rows of each head's matrix.
    HeadRows(HeadRows),
    /// Whole numbers below 2^24 (ids), exact as F32.
    Ids,
}

/// A matrix per head, cut out of `[heads * group, k]`: rows `from..from + len` of each group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct HeadRows {
    pub group: usize,
    pub from: usize,
    pub len: usize,
    /// Whether the result is `[heads, k, len]` instead of `[heads, len, k]`.
    pub transposed: bool,
}

impl WeightDecl {
    /// The activation type that a product with this weight takes.
    pub const fn activation(&self) -> DType {
        if self.ty.is_quantized() { DType::Q8 } else { DType::F32 }
    }

    /// Bytes in the file's encoding; `None` on overflow or when rows are not whole blocks.
    pub fn bytes(&self) -> Option<usize> {
        let (k, outer) = self.shape.split_last()?;
        outer.iter().try_fold(self.ty.row_bytes(*k)?, |n, &d| n.checked_mul(d))
    }
}

/// How nodes read a weight: a device may keep a different layout for each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightUse {
    /// Single rows are looked up.
    Rows,
    /// A small vector that is applied element by element (norms, biases).
    Vector,
    /// The right-hand side of a product.
    Matrix,
    /// A stack of matrices chosen by expert id.
    Experts,
    /// A stack of matrices, one per head.
    Heads,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Node {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    pub weight: Option<WeightId>,
    pub state: Option<StateId>,
    /// Transformer layer, for offload policies and messages.
    pub layer: Option<u32>,
    /// The device it runs on; empty until assignment.
    pub place: Option<DeviceId>,
}

impl Node {
    /// How the node reads its weight, if it has one.
    pub fn weight_use(&self) -> Option<(WeightId, WeightUse)> {
        let how = match self.op {
            Op::Embed | Op::GatherIds => WeightUse::Rows,
            Op::MatMul => WeightUse::Matrix,
            Op::GroupedMatMul => WeightUse::Experts,
            Op::HeadMatMul => WeightUse::Heads,
            _ => WeightUse::Vector,
        };
        self.weight.map(|w| (w, how))
    }
}

/// A named input of a step.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Input {
    pub name: &'static str,
    pub value: ValueId,
}

/// A named result of a step.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Output {
    pub name: &'static str,
    pub value: ValueId,
}

/// A whole step as data. Nodes are in execution order; a node that touches state runs after earlier nodes
/// that touch the same state.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub values: Vec<Value>,
    pub weights: Vec<WeightDecl>,
    pub states: Vec<StateDecl>,
    pub inputs: Vec<Input>,
    pub outputs: Vec<Output>,
}

impl Graph {
    /// Type of a value.
    pub fn ty(&self, v: ValueId) -> &ValueType {
        &self.values[v.index()].ty
    }

    /// Nodes with their ids, in execution order.
    pub fn nodes(&self) -> impl DoubleEndedIterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().map(|(i, n)| (NodeId(i as u32), n))
    }

    /// For each value the nodes that read it, in execution order.
    pub fn readers(&self) -> Vec<Vec<NodeId>> {
        let mut readers = vec![Vec::new(); self.values.len()];
        for (id, node) in self.nodes() {
            for v in &node.inputs {
                readers[v.index()].push(id);
            }
        }
        readers
    }

    /// Whether `v` is a result of the step.
    pub fn is_output(&self, v: ValueId) -> bool {
        self.outputs.iter().any(|o| o.value == v)
    }

    /// Each weight with each way in which nodes read it, in order of first use.
    pub fn weight_uses(&self) -> Vec<(WeightId, WeightUse)> {
        let mut seen = HashSet::new();
        self.nodes.iter().filter_map(Node::weight_use).filter(|u| seen.insert(*u)).collect()
    }

    /// Checks definitions before use, single assignment, references, names, and every operation's operands.
    pub fn validate(&self) -> Result<(), GraphError> {
        self.unique_names()?;
        let mut defined = vec![false; self.values.len()];
        for input in &self.inputs {
            match defined.get_mut(input.value.index()) {
                Some(d) if !*d => *d = true,
                _ => {
                    let (name, value) = (input.name.to_string(), input.value.index());
                    return Err(GraphError::BadInput { name, value });
                }
            }
        }
        for (id, node) in self.nodes() {
            self.validate_node(id, node, &mut defined)?;
        }
        match self.outputs.iter().find(|o| !defined.get(o.value.index()).is_some_and(|d| *d)) {
            Some(o) => Err(GraphError::DanglingOutput { name: o.name.to_string(), value: o.value.index() }),
            None => Ok(()),
        }
    }

    fn unique_names(&self) -> Result<(), GraphError> {
        let inputs: Vec<_> = self.inputs.iter().map(|i| i.name).collect();
        let outputs: Vec<_> = self.outputs.iter().map(|o| o.name).collect();
        for (what, names) in [("input", inputs), ("output", outputs)] {
            let mut seen = HashSet::new();
            if let Some(name) = names.iter().find(|n| !seen.insert(**n)) {
                return Err(GraphError::DuplicateName { what, name: name.to_string() });
            }
        }
        Ok(())
    }

    fn validate_node(&self, id: NodeId, node: &Node, defined: &mut [bool]) -> Result<(), GraphError> {
        let (i, op) = (id.index(), node.op.name());
        self.validate_references(i, node)?;
        if let Some(v) = node.inputs.iter().find(|v| !defined.get(v.index()).is_some_and(|d| *d)) {
            return Err(GraphError::Undefined { node: i, op, value: v.index() });
        }
        for v in &node.outputs {
            let (value, count) = (v.index(), defined.len());
            match defined.get_mut(value) {
                Some(d) if !*d => *d = true,
                Some(_) => return Err(GraphError::Redefined { node: i, op, value }),
                None => {
                    return Err(GraphError::BadReference { node: i, op, what: "value", index: value, count });
                }
            }
        }
        let inferred = self.infer(node).map_err(|why| self.operand_error(i, node, why))?;
        let declared: Vec<_> = node.outputs.iter().map(|&v| self.ty(v).clone()).collect();
        if inferred != declared {
            let list = |t: &[ValueType]| t.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let why = format!("outputs are declared as {} but are {}", list(&declared), list(&inferred));
            return Err(self.operand_error(i, node, why));
        }
        Ok(())
    }

    fn validate_references(&self, i: usize, node: &Node) -> Result<(), GraphError> {
        for (what, index, count) in [
            ("weight", node.weight.map(WeightId::index), self.weights.len()),
            ("state", node.state.map(StateId::index), self.states.len()),
        ] {
            if let Some(index) = index.filter(|&x| x >= count) {
                return Err(GraphError::BadReference { node: i, op: node.op.name(), what, index, count });
            }
        }
        Ok(())
    }

    pub(crate) fn infer(&self, node: &Node) -> Result<Vec<ValueType>, String> {
        let inputs: Vec<_> = node.inputs.iter().map(|&v| self.ty(v)).collect();
        let weight = node.weight.map(|w| &self.weights[w.index()]);
        let state = node.state.map(|s| &self.states[s.index()]);
        node.op.infer(&inputs, weight, state)
    }

    pub(crate) fn operand_error(&self, node: usize, n: &Node, why: String) -> GraphError {
        GraphError::Operands { node, op: n.op.name(), layer: n.layer, why }
    }
}

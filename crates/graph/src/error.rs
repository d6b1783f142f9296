//! Errors of building and validating a graph.

use thiserror::Error;

/// A graph that does not hold together. Each message names the node, its operation and the shapes.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum GraphError {
    /// An operation does not accept its operands.
    #[error("node {node} ({op}{}): {why}", layer_suffix(.layer))]
    Operands { node: usize, op: &'static str, layer: Option<u32>, why: String },
    /// A node reads a value that no earlier node or input defines.
    #[error("node {node} ({op}) reads value {value}, which is not defined before it")]
    Undefined { node: usize, op: &'static str, value: usize },
    /// Two nodes define one value.
    #[error("node {node} ({op}) defines value {value} a second time")]
    Redefined { node: usize, op: &'static str, value: usize },
    /// An input of the graph has no value of its own.
    #[error("graph input '{name}' refers to value {value}, which does not exist or is another input's")]
    BadInput { name: String, value: usize },
    /// An output of the graph is not defined by any node.
    #[error("graph output '{name}' refers to value {value}, which nothing defines")]
    DanglingOutput { name: String, value: usize },
    /// Two inputs, or two outputs, have one name.
    #[error("graph {what} '{name}' is declared twice")]
    DuplicateName { what: &'static str, name: String },
    /// A weight, state or output value refers outside its table.
    #[error("node {node} ({op}) refers to {what} {index}, but only {count} are declared")]
    BadReference { node: usize, op: &'static str, what: &'static str, index: usize, count: usize },
}

fn layer_suffix(layer: &Option<u32>) -> String {
    layer.map(|l| format!(", layer {l}")).unwrap_or_default()
}

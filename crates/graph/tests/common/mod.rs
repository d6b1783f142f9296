//! Short ways to declare types, weights and state.
#![allow(dead_code, unreachable_pub)]

use minfer_format::BlockType;
use minfer_graph::{
    DType, Dim, GraphBuilder, PagedPart, StateDecl, StateKind, ValueType, WeightDecl, WeightId,
};

pub fn f32s(inner: &[usize]) -> ValueType {
    ValueType::f32(Dim::Rows, inner)
}

pub fn i32s(inner: &[usize]) -> ValueType {
    ValueType::i32(Dim::Rows, inner)
}

pub fn q8s(inner: &[usize]) -> ValueType {
    ValueType { dtype: DType::Q8, ..f32s(inner) }
}

pub fn decl(name: &str, ty: BlockType, shape: &[usize]) -> WeightDecl {
    WeightDecl {
        name: name.to_string(),
        ty,
        shape: shape.to_vec(),
        tensors: vec![name.to_string()],
        map: Default::default(),
    }
}

pub fn weight(b: &mut GraphBuilder, name: &str, ty: BlockType, shape: &[usize]) -> WeightId {
    b.weight(decl(name, ty, shape))
}

/// State whose last parts, from `first` on, have a row for every so many positions.
pub fn pooled(widths: &[usize], first: usize, every: usize) -> StateDecl {
    let rows = |(i, &width)| PagedPart::each(width).every(if i < first { 1 } else { every });
    let parts = widths.iter().enumerate().map(rows).collect();
    StateDecl { kind: StateKind::Paged { parts }, ..kv(0, &[]) }
}

pub fn kv(layer: u32, widths: &[usize]) -> StateDecl {
    StateDecl { name: format!("kv{layer}"), layer, kind: StateKind::paged(widths) }
}

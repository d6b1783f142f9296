//! The declarative compute graph.
//!
//! A model describes one step (any number of token rows in, logits out) as a list of typed operations in
//! static single assignment form. What comes in: declarations from `minfer-model`. What goes out: a
//! validated [`Graph`] that `minfer-runtime` fuses, places on devices and compiles. Nothing here knows
//! how an operation is computed, where it runs, or how many rows a step has: sizes are constants or one
//! of the two symbols [`Dim::Rows`] and [`Dim::Outs`], bound when a step runs.

mod builder;
mod compressed;
mod error;
mod export;
mod fusion;
mod graph;
mod op;
mod operands;
mod payload;
mod place;
mod state;
mod types;

pub use builder::GraphBuilder;
pub use compressed::{AttendWindow, Compress, ExpertWeights, RoundFormat, RoundTrip, StorePart};
pub use error::GraphError;
pub use fusion::{FUSIONS, Fusion, Takes, fuse};
pub use graph::{
    Graph, HeadRows, Input, Node, NodeId, Output, StateId, Value, ValueId, WeightDecl, WeightId, WeightMap,
    WeightUse,
};
pub use op::Op;
pub use payload::{
    Act, ActKind, Attend, AttendBlocks, Clamp, Conv1d, DeltaRule, HyperMix, IndexSelect, Norm, PoolGated,
    PoolKeys, Rope, RopeStyle, RopeTable, Router, Scoring, Slice, Streams,
};
pub use place::{DeviceId, DeviceKind};
pub use state::{PAGE, PagedPart, StateDecl, StateKind, state_from};
pub use types::{Bind, DType, Dim, Shape, ValueType};

//! From a graph to a plan: fuse, assign, remove islands, split ([`Placed`], once per model), then lay out
//! memory for one size of step ([`Plan`], once per bucket). Plans are immutable; a step only binds inputs.

mod assign;
mod memory;
mod place;
mod split;

pub use assign::Policy;
pub use memory::{DeviceMemory, Plan};
pub use place::Placed;
pub use split::{Send, Split};

use minfer_graph::Bind;

/// The bucket of a step: sizes rounded up to powers of two, at most `max`, so that a handful of plans serves
/// prefill, decode, verification and mixed batches.
pub fn bucket(step: Bind, max: Bind) -> Bind {
    let up = |n: usize, max: usize| n.max(1).next_power_of_two().min(max);
    Bind { rows: up(step.rows, max.rows), outs: up(step.outs, max.outs) }
}

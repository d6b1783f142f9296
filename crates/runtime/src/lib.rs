//! Devices as everyone else sees them, and the way from a graph to a finished step.
//!
//! In comes a [`minfer_graph::Graph`] and a list of opened devices; out come the step's results. The way:
//! the [`Registry`] opens the devices that a [`Fence`] leaves; [`plan::Placed`] fuses the graph, gives every
//! node a device and cuts the graph into splits; [`plan::Plan`] lays out memory for one size of step; the
//! [`Executor`] loads weights, compiles splits into programs and runs them, moving values between devices in
//! two phases. Kernels live in the device crates; what a step means lives in the engine.

mod counters;
mod device;
mod error;
mod exec;
mod fence;
pub mod plan;
mod registry;

pub use counters::Counters;
pub use device::{
    Arena, Device, DeviceError, KvFormat, Memory, Program, ProgramSpec, ReadBack, Region, Speed, StateBuffer,
    StateSpec, WaitError, WeightHandle,
};
pub use error::RuntimeError;
pub use exec::{Executor, ExecutorOptions, Progress, SourceError, StepOutputs, WeightSource};
pub use fence::{BackendError, BackendName, Fence, not_compiled};
pub use minfer_graph::{DeviceId, DeviceKind};
pub use registry::{Descriptor, OpenInstance, OpenOptions, Registry, Unavailable, WeightOptions};

//! Running steps: weights, state and arenas on their devices, programs per bucket, and the two-phase copies
//! between splits.

mod executor;
mod load;
mod state;
mod transfer;

pub use executor::{Executor, ExecutorOptions, StepOutputs};
pub use load::{Progress, SourceError, WeightSource};

//! Errors of planning and of running a step.

use minfer_graph::{DeviceId, GraphError};
use thiserror::Error;

use crate::device::{DeviceError, WaitError};
use crate::exec::SourceError;

/// What went wrong between a graph and its results.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum RuntimeError {
    #[error(transparent)]
    Graph(#[from] GraphError),
    #[error("no device can run {node}: asked {asked}")]
    Unsupported { node: String, asked: String },
    #[error("{node} runs on {placed}, but --require-device allows only {required}")]
    NotOnRequired { node: String, placed: DeviceId, required: String },
    #[error(
        "{device} has {available} MiB free, but this needs {needed} MiB: weights {weights}, state {state}, \
         workspace {workspace} MiB; use a shorter context, a smaller batch or a smaller quantisation"
    )]
    OverBudget { device: DeviceId, available: u64, needed: u64, weights: u64, state: u64, workspace: u64 },
    #[error("cannot tell how much memory {device} has: {why}")]
    BudgetUnknown { device: DeviceId, why: String },
    #[error("sizes of {what} overflow")]
    SizeOverflow { what: String },
    #[error("loading {what} on {device}: {source}")]
    Load { what: String, device: DeviceId, source: DeviceError },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("{what} on {device}: {source}")]
    Device { what: String, device: DeviceId, source: DeviceError },
    #[error("waiting for {what} from {device}: {source}")]
    Wait { what: String, device: DeviceId, source: WaitError },
    #[error("input '{name}' {why}")]
    Input { name: String, why: String },
    #[error(
        "a step of {rows} rows and {outs} outputs is outside the limits of 1 to {max_rows} rows and 0 to \
         {max_outs} outputs"
    )]
    StepTooLarge { rows: usize, outs: usize, max_rows: usize, max_outs: usize },
    #[error("the engine is stopped: {device} did not come back after an error ({why})")]
    Broken { device: DeviceId, why: String },
    #[error("internal: {0}")]
    Internal(String),
}

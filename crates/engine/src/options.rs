//! How an engine is opened.

use std::sync::Arc;
use std::time::Duration;

use minfer_format::Reading;
use minfer_format::table::TableOptions;
use minfer_graph::Bind;
use minfer_runtime::{Device, DeviceKind, ExecutorOptions, KvFormat};

use crate::error::EngineError;
use crate::speculate::Speculate;

/// How an engine is opened.
#[derive(Clone)]
pub struct EngineOptions {
    /// Devices that may take part, most preferred first.
    pub devices: Vec<Arc<dyn Device>>,
    /// Longest sequence in tokens; `None`: the model's context, at most [`EngineOptions::DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Sequences that can be at full length at one time.
    pub sequences: usize,
    /// Most rows in a step, and so the chunk in which prompts are processed.
    pub max_rows: usize,
    /// Most rows of a step whose logits may be wanted.
    pub max_outs: usize,
    /// Format of keys and values.
    pub kv_format: KvFormat,
    /// The blocking reference path for copies between devices.
    pub sync_copies: bool,
    /// Layers that may leave the CPU; `None`: all.
    pub gpu_layers: Option<u32>,
    /// Kinds on which every node must land; empty: anywhere.
    pub require: Vec<DeviceKind>,
    /// For models with recurrent state: a checkpoint of it is kept every so many tokens (0: never), so that
    /// a sequence can be taken back to there.
    pub checkpoint_every: usize,
    /// How many checkpoints there is memory for, over all sequences. The oldest give way.
    pub checkpoints: usize,
    /// Rows of the largest window of guesses; recurrent state has a slot for each.
    pub max_window: usize,
    /// Open the model's draft head too, if it has one.
    pub draft: bool,
    /// Round rows as the graph of the model's makers does (deepseek_v4 alone): what is cached and compared then is what
    /// its weights were trained with, and the numbers are no longer those of transformers.
    pub official_rounding: bool,
    /// How weights are read from their files.
    pub reading: Reading,
    /// How an n-gram table is read from its file.
    pub table: TableOptions,
}

impl EngineOptions {
    /// Context when none is asked for: memory for it is reserved when the engine opens.
    pub const DEFAULT_CONTEXT: usize = 4096;

    /// One sequence on these devices.
    pub fn new(devices: Vec<Arc<dyn Device>>) -> EngineOptions {
        EngineOptions {
            devices,
            context: None,
            sequences: 1,
            max_rows: 256,
            max_outs: 8,
            kv_format: KvFormat::F16,
            sync_copies: false,
            gpu_layers: None,
            require: Vec::new(),
            checkpoint_every: 64,
            checkpoints: 32,
            max_window: Speculate::MAX_DEPTH + 1,
            draft: false,
            official_rounding: false,
            reading: Reading::Mapped,
            table: TableOptions::default(),
        }
    }
}

impl EngineOptions {
    pub(crate) fn executor(&self) -> ExecutorOptions {
        ExecutorOptions {
            max: Bind { rows: self.max_rows, outs: self.max_outs },
            wait_timeout: Duration::from_secs(60),
            sync_copies: self.sync_copies,
        }
    }

    pub(crate) fn check(&self, context: usize, allowed: usize) -> Result<(), EngineError> {
        if context > allowed {
            return Err(EngineError::ContextTooLong { asked: context, allowed });
        }
        let positive = [
            ("the context size", context),
            ("the number of sequences", self.sequences),
            ("the number of rows per step", self.max_rows),
            ("the number of outputs per step", self.max_outs),
        ];
        for (what, value) in positive {
            if value == 0 {
                return Err(EngineError::BadOption { what, value: value.to_string(), allowed: "at least 1" });
            }
        }
        if self.sequences > 4096 {
            let value = self.sequences.to_string();
            return Err(EngineError::BadOption {
                what: "the number of sequences",
                value,
                allowed: "at most 4096",
            });
        }
        Ok(())
    }
}

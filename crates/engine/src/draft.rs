//! A model's own draft head, opened beside the model: it shares the embedding, the output matrix, the page
//! tables and nothing else.

use minfer_graph::Bind;
use minfer_model::{Checkpoint, Model};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{Executor, ExecutorOptions, Progress, RuntimeError, StateSpec, WeightSource};

use crate::error::EngineError;
use crate::options::EngineOptions;
use crate::sequence::Sequence;

/// An open draft head.
pub(crate) struct Draft {
    pub(crate) executor: Executor,
    /// Numbers per row of the residual streams that it continues from.
    pub(crate) width: usize,
}

/// Rows for the head: row `i` stands at position `start + i`, whose next token is `next[i]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftRows<'a> {
    pub(crate) start: usize,
    pub(crate) next: &'a [u32],
    /// `[rows, width]`.
    pub(crate) streams: &'a [f32],
}

/// What the head says after its last row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drafted {
    pub(crate) logits: Vec<f32>,
    pub(crate) stream: Vec<f32>,
}

impl Draft {
    /// Opens the head of `model`, if the checkpoint has one.
    pub(crate) fn open(
        trunk: &Executor,
        model: &dyn Model,
        checkpoint: &Checkpoint,
        options: &EngineOptions,
        (pages, policy): (usize, &Policy),
        source: &dyn WeightSource,
        progress: Progress<'_>,
    ) -> Result<Option<Draft>, EngineError> {
        let Some(graph) = model.draft_graph(checkpoint, pages)? else { return Ok(None) };
        let streams = graph.inputs.iter().find(|i| i.name == "streams");
        let width = streams.map_or(0, |i| graph.ty(i.value).shape.width());
        let states: Vec<_> = graph
            .states
            .iter()
            .map(|decl| StateSpec { decl: decl.clone(), format: options.kv_format, pages })
            .collect();
        let placed = Placed::new(graph, options.devices.clone(), policy)?;
        let executor_options =
            ExecutorOptions { max: Bind { rows: options.max_rows, outs: 1 }, ..options.executor() };
        let executor = trunk.open_beside(placed, &states, source, executor_options, progress)?;
        Ok(Some(Draft { executor, width }))
    }

    /// Runs rows of one sequence, whose pages cover them; with `wanted`, returns what follows the last one.
    pub(crate) fn run(
        &mut self,
        sequence: &Sequence,
        rows: DraftRows<'_>,
        wanted: bool,
    ) -> Result<Drafted, RuntimeError> {
        let count = rows.next.len();
        let to_i32 = |x: &[u32]| x.iter().map(|&v| v as i32).collect::<Vec<i32>>();
        let positions: Vec<i32> = (rows.start..rows.start + count).map(|p| p as i32).collect();
        let slots: Vec<i32> = (rows.start..rows.start + count).map(|p| sequence.slot(p)).collect();
        let streams: Vec<i32> = rows.streams.iter().map(|x| x.to_bits() as i32).collect();
        let out_rows: Vec<i32> = if wanted { vec![count as i32 - 1] } else { vec![] };
        let inputs: [(&str, &[i32]); 7] = [
            ("tokens", &to_i32(rows.next)),
            ("positions", &positions),
            ("slots", &slots),
            ("table_at", &vec![0; count]),
            ("pages", &to_i32(&sequence.pages)),
            ("out_rows", &out_rows),
            ("streams", &streams),
        ];
        let outputs = self.executor.execute(Bind { rows: count, outs: out_rows.len() }, &inputs)?;
        let floats = |name: &str| {
            let bytes = outputs.bytes(name).unwrap_or_default();
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        Ok(Drafted { logits: floats("logits"), stream: floats("streams") })
    }

    /// Copies a page of every state.
    pub(crate) fn copy_page(&self, from: u32, to: u32) -> Result<(), RuntimeError> {
        crate::engine::copy_page_of(&self.executor, from, to)
    }
}

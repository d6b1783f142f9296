//! Draft heads without an engine: executors of one sequence whose positions are its slots.

use std::time::Duration;

use minfer_cpu::Isa;
use minfer_engine::Checkpoint;
use minfer_graph::{Bind, Graph};
use minfer_model::DraftHead;
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{Executor, ExecutorOptions, SourceError, StepOutputs, WeightSource};

use super::cpu;
use super::parts::{states, windows};

pub use super::parts::PAGES;

struct Source<'a>(&'a Checkpoint);

impl WeightSource for Source<'_> {
    fn load(&self, decl: &minfer_graph::WeightDecl) -> Result<minfer_format::TensorBytes, SourceError> {
        self.0.load(decl).map_err(|e| SourceError(e.to_string()))
    }
}

/// An executor of up to 300 rows; `beside` another one, whose states of the same names it uses.
pub fn executor(model: &Checkpoint, graph: Graph, beside: Option<&Executor>) -> Executor {
    let states = states(&graph);
    let devices = match beside {
        Some(other) => other.placed().devices.clone(),
        None => cpu(2, Isa::detect()),
    };
    let placed = Placed::new(graph, devices, &Policy::default()).unwrap();
    let max = Bind { rows: 300, outs: 300 };
    let options = ExecutorOptions { max, wait_timeout: Duration::from_secs(1), sync_copies: false };
    let (source, progress) = (Source(model), &mut |_: u64, _: u64| ());
    match beside {
        Some(other) => other.open_beside(placed, &states, &source, options, progress).unwrap(),
        None => Executor::open(placed, &states, &source, options, progress).unwrap(),
    }
}

/// Rows of the one sequence from position `start`, all of them wanted where `outs` says so.
pub fn run<'e>(
    executor: &'e mut Executor,
    start: usize,
    tokens: &[u32],
    outs: bool,
    further: &[(&str, &[i32])],
) -> &'e StepOutputs {
    let rows = tokens.len();
    let positions: Vec<i32> = (start..start + rows).map(|p| p as i32).collect();
    let tokens: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    let pages: Vec<i32> = (0..PAGES as i32).collect();
    let out_rows: Vec<i32> = if outs { (0..rows as i32).collect() } else { vec![] };
    let table_at = vec![0; rows];
    let mut inputs: Vec<(&str, &[i32])> = vec![
        ("tokens", &tokens),
        ("positions", &positions),
        ("slots", &positions),
        ("table_at", &table_at),
        ("pages", &pages),
        ("out_rows", &out_rows),
    ];
    let windows = windows(&positions);
    if executor.placed().graph.inputs.iter().any(|i| i.name == "window_slots") {
        inputs.extend([("window_slots", &windows[0][..]), ("window_pages", &windows[1][..])]);
    }
    inputs.extend(further);
    executor.execute(Bind { rows, outs: out_rows.len() }, &inputs).unwrap()
}

pub fn floats(outputs: &StepOutputs, name: &str) -> Vec<f32> {
    let bytes = outputs.bytes(name).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn rows_of(numbers: Vec<f32>, rows: usize) -> Vec<Vec<f32>> {
    numbers.chunks(numbers.len() / rows).map(<[f32]>::to_vec).collect()
}

pub fn bits(numbers: &[f32]) -> Vec<i32> {
    numbers.iter().map(|x| x.to_bits() as i32).collect()
}

/// A chain alone, on one sequence.
pub struct Chain {
    executor: Executor,
    pub width: usize,
}

impl Chain {
    pub fn open(model: &Checkpoint) -> Chain {
        let head = minfer_model::load(model).unwrap().draft_head(model, PAGES).unwrap();
        let Some(DraftHead::Chain(graph)) = head else { panic!("a chain") };
        let width = graph.ty(graph.inputs.iter().find(|i| i.name == "streams").unwrap().value).shape.width();
        Chain { executor: executor(model, graph, None), width }
    }

    /// Logits and streams of each row from position `start`.
    pub fn run(&mut self, start: usize, next: &[u32], streams: &[f32]) -> (Vec<Vec<f32>>, Vec<f32>) {
        let outputs = run(&mut self.executor, start, next, true, &[("streams", &bits(streams))]);
        (rows_of(floats(outputs, "logits"), next.len()), floats(outputs, "streams"))
    }
}

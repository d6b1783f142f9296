//! Values of a model's parts, read out of its graph, and prompts beside other prompts.

use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, Chunk, Engine, EngineOptions, KvFormat, Outs};
use minfer_graph::{Bind, Graph, Node, Op, Output, PAGE, StateDecl, StateKind, ValueId};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{Executor, ExecutorOptions, SourceError, StateSpec, WeightSource};

use super::{bits, cpu, logits_in_chunks, open};

struct Source<'a>(&'a Checkpoint);

impl WeightSource for Source<'_> {
    fn load(&self, decl: &minfer_graph::WeightDecl) -> Result<minfer_format::TensorBytes, SourceError> {
        self.0.load(decl).map_err(|e| SourceError(e.to_string()))
    }
}

/// Adds values to the graph's outputs under the names that the goldens give them.
pub fn tap(graph: &mut Graph, name: String, value: ValueId) {
    graph.outputs.push(Output { name: Box::leak(name.into_boxed_str()), value });
}

/// Nodes of a layer (`None`: before and after the layers), in order.
pub fn nodes<'a>(graph: &'a Graph, layer: Option<u32>, is: impl Fn(&Op) -> bool + 'a) -> Vec<&'a Node> {
    graph.nodes.iter().filter(|n| n.layer == layer && is(&n.op)).collect()
}

/// Pages of one sequence of up to 512 positions, and as many for windows behind them.
pub const PAGES: usize = 8;

/// State of one sequence.
pub fn states(graph: &Graph) -> Vec<StateSpec> {
    let units = |kind: &StateKind| if matches!(kind, StateKind::Recurrent { .. }) { 1 } else { PAGES };
    let spec = |decl: &StateDecl| StateSpec {
        decl: decl.clone(),
        format: KvFormat::F32,
        pages: units(&decl.kind),
        window_pages: PAGES,
    };
    graph.states.iter().map(spec).collect()
}

/// Where positions lie in the pages for windows, and the list of those pages.
pub fn windows(positions: &[i32]) -> [Vec<i32>; 2] {
    let first = PAGES as i32;
    [positions.iter().map(|p| first * PAGE as i32 + p).collect(), (first..2 * first).collect()]
}

pub fn executor(model: &Checkpoint, graph: Graph) -> Executor {
    let states = states(&graph);
    let placed = Placed::new(graph, cpu(2, Isa::detect()), &Policy::default()).unwrap();
    let options = ExecutorOptions {
        max: Bind { rows: 128, outs: 128 },
        wait_timeout: std::time::Duration::from_secs(1),
        sync_copies: false,
    };
    Executor::open(placed, &states, &Source(model), options, &mut |_, _| ()).unwrap()
}

/// Integer inputs of a step that begins a sequence, whose state is kept in slot 0 after the last row.
pub struct Inputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    zeros: Vec<i32>,
    from: Vec<i32>,
    to: Vec<i32>,
    windows: [Vec<i32>; 2],
}

impl Inputs {
    pub fn new(tokens: &[u32]) -> Inputs {
        let rows = tokens.len();
        let positions: Vec<i32> = (0..rows as i32).collect();
        Inputs {
            windows: windows(&positions),
            tokens: tokens.iter().map(|&t| t as i32).collect(),
            positions,
            zeros: vec![0; rows],
            from: (0..rows).map(|r| if r == 0 { -2 } else { -1 }).collect(),
            to: (0..rows).map(|r| if r + 1 == rows { 0 } else { -1 }).collect(),
        }
    }

    /// By name; `pages` is as long as the sequence needs, in order.
    pub fn by_name<'a>(&'a self, pages: &'a [i32]) -> Vec<(&'static str, &'a [i32])> {
        vec![
            ("tokens", &self.tokens),
            ("positions", &self.positions),
            ("slots", &self.positions),
            ("table_at", &self.zeros),
            ("pages", pages),
            ("out_rows", &self.positions),
            ("state_from", &self.from),
            ("state_to", &self.to),
            ("window_slots", &self.windows[0]),
            ("window_pages", &self.windows[1][..pages.len()]),
        ]
    }
}

pub fn integers(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The keys that each row sees, from the blocks chosen for it and its incomplete last block.
pub fn visible(blocks: &[i32], rows: usize, top: usize, block: usize) -> Vec<bool> {
    let mut mask = vec![false; rows * rows];
    for (row, chosen) in blocks.chunks(top).enumerate() {
        let complete = (row + 1) / block;
        let tail = complete * block..row + 1;
        let chosen =
            chosen.iter().filter(|b| **b >= 0).flat_map(|&b| b as usize * block..(b as usize + 1) * block);
        chosen.chain(tail).for_each(|key| mask[row * rows + key] = true);
    }
    mask
}

/// The prompt's logits while another sequence is in the same steps.
fn batched(engine: &mut Engine, prompt: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let (other, main) = (engine.new_sequence(), engine.new_sequence());
    let others: Vec<u32> = prompt.iter().rev().copied().collect();
    let mut logits = Vec::new();
    for (i, tokens) in prompt.chunks(chunk).enumerate() {
        // The other sequence is a little behind, and ends before.
        let there = i * chunk.saturating_sub(2);
        let theirs = &others[there.min(100)..(there + chunk.saturating_sub(2).max(1)).min(100)];
        let mut chunks = vec![Chunk { sequence: main, tokens, outs: Outs::All, window: false }];
        if !theirs.is_empty() {
            chunks.insert(0, Chunk { sequence: other, tokens: theirs, outs: Outs::None, window: false });
        }
        let out = engine.step(&chunks).unwrap();
        logits.extend((0..out.len()).map(|i| out.row(i).to_vec()));
    }
    engine.release(other).unwrap();
    engine.release(main).unwrap();
    logits
}

/// A row's logits have the same bits however the prompt is cut, on any number of threads, whatever else is in
/// the batch. Reference: the whole prompt in one step, alone, on one thread.
pub fn rows_stand_alone(model: &Checkpoint) {
    let prompt: Vec<u32> = (0..150u32).map(|i| (i * i * 7 + 13 * i + i / 3) % 131).collect();
    for kv_format in KvFormat::ALL {
        let options = |threads, isa| EngineOptions {
            kv_format,
            context: Some(192),
            sequences: 2,
            max_rows: 300,
            max_outs: 150,
            ..EngineOptions::new(cpu(threads, isa))
        };
        let whole = prompt.len();
        let mut engine = open(model, options(1, Isa::detect()));
        let want = bits(&logits_in_chunks(&mut engine, &prompt, &[whole]));
        assert!(want.iter().flatten().all(|b| f32::from_bits(*b).is_finite()), "logits are numbers");
        for (threads, isa) in [(1, Isa::detect()), (2, Isa::detect()), (2, Isa::Scalar)] {
            let mut engine = open(model, options(threads, isa));
            for chunk in [1, 7, 64, whole] {
                let name = format!("{} KV, {threads} threads, {isa:?}, chunks of {chunk}", kv_format.name());
                let got = bits(&logits_in_chunks(&mut engine, &prompt, &[chunk]));
                assert!(got == want, "{name}");
                let got = bits(&batched(&mut engine, &prompt, chunk));
                assert!(got == want, "{name}, batched");
            }
        }
    }
}

//! A model's own draft head, opened beside the model: it shares the embedding, the output matrix, the page
//! tables, and state that the model writes for it.

use minfer_graph::{Bind, Graph};
use minfer_model::{BlockHead, Checkpoint, DraftHead, Model};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{
    Executor, ExecutorOptions, Progress, RuntimeError, StateSpec, StepOutputs, WeightSource,
};

use crate::block_table::BlockTable;
use crate::engine::takes;
use crate::error::EngineError;
use crate::options::EngineOptions;
use crate::sequence::Sequence;

/// An open draft head.
pub(crate) enum Draft {
    /// One token after the other.
    Chain(Box<Chain>),
    /// Several at once.
    Block(Box<Block>),
}

/// Rows for a [`Chain`]: row `i` stands at position `start + i`, whose next token is `next[i]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftRows<'a> {
    pub(crate) start: usize,
    pub(crate) next: &'a [u32],
    /// `[rows, width]`.
    pub(crate) streams: &'a [f32],
}

/// What a chain says after its last row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drafted {
    pub(crate) logits: Vec<f32>,
    pub(crate) stream: Vec<f32>,
}

/// What heads are opened with.
pub(crate) struct Opening<'a> {
    pub(crate) trunk: &'a Executor,
    pub(crate) options: &'a EngineOptions,
    pub(crate) policy: &'a Policy,
    pub(crate) source: &'a dyn WeightSource,
    pub(crate) pages: usize,
    pub(crate) window_pages: usize,
}

impl Opening<'_> {
    fn executor(&self, graph: Graph, max: Bind, progress: Progress<'_>) -> Result<Executor, EngineError> {
        let format = self.options.kv_format;
        let (pages, window_pages) = (self.pages, self.window_pages);
        let spec = |decl: &_| StateSpec { decl: Clone::clone(decl), format, pages, window_pages };
        let states: Vec<_> = graph.states.iter().map(spec).collect();
        let placed = Placed::new(graph, self.options.devices.clone(), self.policy)?;
        let options = ExecutorOptions { max, ..self.options.executor() };
        Ok(self.trunk.open_beside(placed, &states, self.source, options, progress)?)
    }
}

impl Draft {
    /// Opens the head of `model`, if the checkpoint has one.
    pub(crate) fn open(
        model: &dyn Model,
        checkpoint: &Checkpoint,
        opening: &Opening<'_>,
        progress: Progress<'_>,
    ) -> Result<Option<Draft>, EngineError> {
        Ok(match model.draft_head(checkpoint, opening.pages)? {
            None => None,
            Some(DraftHead::Chain(graph)) => {
                Some(Draft::Chain(Box::new(Chain::open(graph, opening, progress)?)))
            }
            Some(DraftHead::Block(head)) => {
                Some(Draft::Block(Box::new(Block::open(head, opening, progress)?)))
            }
        })
    }

    /// Numbers per row of the streams that it continues from; 0 for a block.
    pub(crate) fn width(&self) -> usize {
        match self {
            Draft::Chain(chain) => chain.width,
            Draft::Block(_) => 0,
        }
    }

    /// What holds the states that are the head's own; a block's are the model's.
    pub(crate) fn own(&self) -> Option<&Executor> {
        match self {
            Draft::Chain(chain) => Some(&chain.executor),
            Draft::Block(_) => None,
        }
    }

    pub(crate) fn own_mut(&mut self) -> Option<&mut Executor> {
        match self {
            Draft::Chain(chain) => Some(&mut chain.executor),
            Draft::Block(_) => None,
        }
    }
}

/// A head that drafts one token after the other.
pub(crate) struct Chain {
    executor: Executor,
    width: usize,
}

impl Chain {
    fn open(graph: Graph, opening: &Opening<'_>, progress: Progress<'_>) -> Result<Chain, EngineError> {
        let streams = graph.inputs.iter().find(|i| i.name == "streams");
        let width = streams.map_or(0, |i| graph.ty(i.value).shape.width());
        let max = Bind { rows: opening.options.max_rows, outs: 1 };
        Ok(Chain { executor: opening.executor(graph, max, progress)?, width })
    }

    /// Runs rows of one sequence, whose pages cover them; with `wanted`, returns what follows the last one.
    pub(crate) fn run(
        &mut self,
        sequence: &Sequence,
        rows: DraftRows<'_>,
        wanted: bool,
    ) -> Result<Drafted, RuntimeError> {
        let count = rows.next.len();
        let out_rows: Vec<i32> = if wanted { vec![count as i32 - 1] } else { vec![] };
        let streams = bits(rows.streams);
        let further: [(&str, &[i32]); 2] = [("out_rows", &out_rows), ("streams", &streams)];
        let outputs = run_rows(&mut self.executor, sequence, rows.start, rows.next, out_rows.len(), further)?;
        Ok(Drafted { logits: floats(outputs, "logits"), stream: floats(outputs, "streams") })
    }
}

/// A head that drafts several tokens at once, and then corrects each by the one before it.
pub(crate) struct Block {
    block: Executor,
    correct: Executor,
    /// Drafts per block.
    pub(crate) size: usize,
    noise: u32,
}

/// Drafts stay in a block while the product of their confidences is at least this (ds4's choice); the first
/// always stays.
const MIN_CONFIDENCE: f32 = 0.7;

impl Block {
    fn open(head: BlockHead, opening: &Opening<'_>, progress: Progress<'_>) -> Result<Block, EngineError> {
        let BlockHead { block, correct, size, noise } = head;
        let block = opening.executor(block, Bind { rows: size, outs: size }, progress)?;
        let correct = opening.executor(correct, Bind { rows: 1, outs: 1 }, progress)?;
        Ok(Block { block, correct, size, noise })
    }

    /// Drafts up to `depth` tokens after `token`, which comes next in a sequence whose pages cover the block;
    /// `choose` picks a draft from its logits.
    pub(crate) fn run(
        &mut self,
        sequence: &Sequence,
        token: u32,
        depth: usize,
        choose: &dyn Fn(&[f32]) -> Option<u32>,
    ) -> Result<Vec<u32>, RuntimeError> {
        let (start, size) = (sequence.len(), self.size);
        let tokens: Vec<u32> = [token].into_iter().chain([self.noise].repeat(size - 1)).collect();
        let out_rows: Vec<i32> = (0..size as i32).collect();
        let ends = vec![(start + size - 1) as i32; size];
        let further: [(&str, &[i32]); 2] = [("out_rows", &out_rows), ("ends", &ends)];
        let outputs = run_rows(&mut self.block, sequence, start, &tokens, size, further)?;
        let (base, hidden) = (floats(outputs, "logits"), floats(outputs, "hidden"));
        let row =
            |numbers: &[f32], i: usize| bits(&numbers[i * numbers.len() / size..][..numbers.len() / size]);
        let (mut before, mut sure, mut drafts) = (token, 1.0, Vec::new());
        for i in 0..depth.min(size) {
            let (base, hidden) = (row(&base, i), row(&hidden, i));
            let inputs: [(&str, &[i32]); 3] =
                [("tokens", &[before as i32]), ("base", &base), ("hidden", &hidden)];
            let outputs = self.correct.execute(Bind { rows: 1, outs: 0 }, &inputs)?;
            sure *= floats(outputs, "confidence").first().copied().unwrap_or(0.0);
            let Some(draft) = choose(&floats(outputs, "logits")) else { break };
            if i > 0 && sure < MIN_CONFIDENCE {
                break;
            }
            drafts.push(draft);
            before = draft;
        }
        Ok(drafts)
    }
}

/// Runs rows of one sequence from position `start`, with the inputs that all graphs of heads have and `further` ones.
fn run_rows<'e>(
    executor: &'e mut Executor,
    sequence: &Sequence,
    start: usize,
    tokens: &[u32],
    outs: usize,
    further: [(&str, &[i32]); 2],
) -> Result<&'e StepOutputs, RuntimeError> {
    let rows = tokens.len();
    let to_i32 = |x: &[u32]| x.iter().map(|&v| v as i32).collect::<Vec<i32>>();
    let positions: Vec<i32> = (start..start + rows).map(|p| p as i32).collect();
    let slots_in = |table: &BlockTable| (start..start + rows).map(|p| table.slot(p)).collect::<Vec<i32>>();
    let recent = &sequence.state.recent;
    let page_in = |table: &BlockTable, at: usize| table.page(at).map_or(-1, |page| page as i32);
    let pages_in = |table| (0..sequence.table.end()).map(|at| page_in(table, at)).collect::<Vec<i32>>();
    let (tokens, slots, table_at) = (to_i32(tokens), slots_in(&sequence.table), vec![0; rows]);
    let (pages, window_slots, window_pages) = (pages_in(&sequence.table), slots_in(recent), pages_in(recent));
    let mut inputs: Vec<(&str, &[i32])> = vec![
        ("tokens", &tokens),
        ("positions", &positions),
        ("slots", &slots),
        ("table_at", &table_at),
        ("pages", &pages),
    ];
    inputs.extend(further);
    if takes(executor, "window_slots") {
        inputs.extend([("window_slots", &window_slots[..]), ("window_pages", &window_pages[..])]);
    }
    executor.execute(Bind { rows, outs }, &inputs)
}

/// f32 by their bits.
fn bits(numbers: &[f32]) -> Vec<i32> {
    numbers.iter().map(|x| x.to_bits() as i32).collect()
}

fn floats(outputs: &StepOutputs, name: &str) -> Vec<f32> {
    let bytes = outputs.bytes(name).unwrap_or_default();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

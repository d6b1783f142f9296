//! The engine: a placed model with its executor, its page pool and its sequences.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use minfer_graph::{Bind, PAGE, StateId, WeightDecl};
use minfer_model::{Checkpoint, Hyper};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{
    Counters, Device, DeviceKind, Executor, ExecutorOptions, KvFormat, OpenOptions, Progress, Registry,
    SourceError, StateSpec, WeightSource,
};

use crate::error::EngineError;
use crate::pages::PagePool;
use crate::sequence::{PageCopy, Sequence, SequenceId};
use crate::session::Session;

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
        }
    }
}

/// The CPU alone, with `threads` threads or one per physical core.
///
/// # Errors
/// When threads cannot be started.
pub fn cpu_devices(threads: Option<usize>) -> Result<Vec<Arc<dyn Device>>, EngineError> {
    let registry = Registry::new(&[minfer_cpu::DESCRIPTOR])?;
    let options = OpenOptions { threads, ..OpenOptions::default() };
    Ok(registry.open(&minfer_runtime::Fence::all(), &options)?)
}

/// Which rows' logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Outs {
    None,
    Last,
    All,
}

/// Tokens that one sequence adds in a step.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Chunk<'a> {
    pub sequence: SequenceId,
    pub tokens: &'a [u32],
    pub outs: Outs,
}

/// Logits of a step: one row of `vocab` numbers per wanted row, in the order of the step.
pub struct Logits<'a> {
    data: &'a [f32],
    vocab: usize,
}

impl<'a> Logits<'a> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.data.len() / self.vocab
    }

    /// Whether no logits were wanted.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.vocab..(i + 1) * self.vocab]
    }
}

/// Inputs of a step, kept so that a step allocates nothing in the long run.
#[derive(Default)]
struct StepInputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    table_at: Vec<i32>,
    pages: Vec<i32>,
    out_rows: Vec<i32>,
}

/// An open model.
pub struct Engine {
    hyper: Hyper,
    executor: Executor,
    pool: PagePool,
    sequences: BTreeMap<u32, Sequence>,
    next_id: u32,
    context: usize,
    limits: Limits,
    inputs: StepInputs,
    logits: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Limits {
    rows: usize,
    sequences: usize,
}

struct Source<'a>(&'a Checkpoint);

impl WeightSource for Source<'_> {
    fn load(&self, decl: &WeightDecl) -> Result<minfer_format::TensorBytes, SourceError> {
        self.0.load(decl).map_err(|e| SourceError(e.to_string()))
    }
}

impl Engine {
    /// Builds the model's graph, places it, checks memory, and loads the weights.
    ///
    /// # Errors
    /// An unsupported or damaged model, an impossible option, or too little memory (with the numbers).
    pub fn open(
        model: &Checkpoint,
        options: EngineOptions,
        progress: Progress<'_>,
    ) -> Result<Engine, EngineError> {
        let loaded = minfer_model::load(model)?;
        let hyper = loaded.hyper().clone();
        let context = options.context.unwrap_or(hyper.context.min(EngineOptions::DEFAULT_CONTEXT));
        options.check(context, hyper.context)?;
        let pages_per_sequence = context.div_ceil(PAGE);
        let pages = pages_per_sequence * options.sequences;
        let graph = loaded.graph(model, pages)?;
        let states: Vec<StateSpec> = graph
            .states
            .iter()
            .map(|decl| StateSpec { decl: decl.clone(), format: options.kv_format, pages })
            .collect();
        let policy = Policy {
            kv_format: options.kv_format,
            gpu_layers: options.gpu_layers,
            require: options.require.clone(),
        };
        let placed = Placed::new(graph, options.devices.clone(), &policy)?;
        let executor_options = ExecutorOptions {
            max: Bind { rows: options.max_rows, outs: options.max_outs },
            wait_timeout: Duration::from_secs(60),
            sync_copies: options.sync_copies,
        };
        let executor = Executor::open(placed, &states, &Source(model), executor_options, progress)?;
        Ok(Engine {
            hyper,
            executor,
            pool: PagePool::new(pages),
            sequences: BTreeMap::new(),
            next_id: 0,
            context,
            limits: Limits { rows: options.max_rows, sequences: options.sequences },
            inputs: StepInputs::default(),
            logits: Vec::new(),
        })
    }

    /// The model's sizes.
    pub fn hyper(&self) -> &Hyper {
        &self.hyper
    }

    /// Longest sequence in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Most rows of a step.
    pub fn max_rows(&self) -> usize {
        self.limits.rows
    }

    /// Counters of copies and waits.
    pub fn counters(&self) -> Counters {
        self.executor.counters()
    }

    /// The placed graph, for exports.
    pub fn placed(&self) -> &Placed {
        self.executor.placed()
    }

    /// Pages that no sequence uses.
    pub fn free_pages(&self) -> usize {
        self.pool.free()
    }

    /// A new empty sequence with a session around it.
    pub fn session(&mut self) -> Session<'_> {
        let id = self.new_sequence();
        Session::new(self, id)
    }

    /// A new empty sequence. It takes pages as it grows.
    pub fn new_sequence(&mut self) -> SequenceId {
        self.insert(Sequence::default())
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = self.next_id;
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        SequenceId(id)
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence, EngineError> {
        self.sequences.get(&id.0).ok_or(EngineError::UnknownSequence(id.0))
    }

    /// The tokens of a sequence.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn tokens(&self, id: SequenceId) -> Result<&[u32], EngineError> {
        Ok(&self.sequence(id)?.tokens)
    }

    /// A sequence with the same tokens. Pages are shared until one of the two writes to them.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, EngineError> {
        let parent = self.sequence(id)?;
        let child = Sequence { tokens: parent.tokens.clone(), pages: parent.pages.clone() };
        child.pages.iter().for_each(|&p| self.pool.share(p));
        Ok(self.insert(child))
    }

    /// Forgets all but the first `len` tokens.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::BadTruncation`] when the sequence is shorter.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<(), EngineError> {
        let sequence = self.sequences.get_mut(&id.0).ok_or(EngineError::UnknownSequence(id.0))?;
        if len > sequence.len() {
            return Err(EngineError::BadTruncation { len: sequence.len(), to: len });
        }
        sequence.tokens.truncate(len);
        sequence.trim(&mut self.pool);
        Ok(())
    }

    /// Forgets a sequence and gives its pages back.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn release(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let mut sequence = self.sequences.remove(&id.0).ok_or(EngineError::UnknownSequence(id.0))?;
        sequence.tokens.clear();
        sequence.trim(&mut self.pool);
        Ok(())
    }

    /// Runs one step: each chunk's tokens join its sequence, and the wanted logits come back. A row's logits
    /// depend on its own sequence only, not on the other chunks nor on how a prompt is cut into chunks.
    ///
    /// # Errors
    /// Limits, context and pages are checked before anything changes; after any error every sequence is as
    /// it was before the step.
    pub fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<Logits<'_>, EngineError> {
        self.check_step(chunks)?;
        let result = self.reserve(chunks).and_then(|()| self.run(chunks));
        for chunk in chunks {
            let Some(sequence) = self.sequences.get_mut(&chunk.sequence.0) else { continue };
            match result {
                Ok(()) => sequence.tokens.extend_from_slice(chunk.tokens),
                Err(_) => sequence.trim(&mut self.pool),
            }
        }
        result?;
        Ok(Logits { data: &self.logits, vocab: self.hyper.vocab })
    }

    fn check_step(&self, chunks: &[Chunk<'_>]) -> Result<(), EngineError> {
        if chunks.iter().all(|c| c.tokens.is_empty()) {
            return Err(EngineError::EmptyStep);
        }
        let mut needed = 0;
        for (i, chunk) in chunks.iter().enumerate() {
            let sequence = self.sequence(chunk.sequence)?;
            if chunks[..i].iter().any(|c| c.sequence == chunk.sequence) {
                return Err(EngineError::SequenceTwice);
            }
            if let Some(&id) = chunk.tokens.iter().find(|&&t| t as usize >= self.hyper.vocab) {
                return Err(EngineError::TokenOutOfRange { id, vocab: self.hyper.vocab });
            }
            let (have, add) = (sequence.len(), chunk.tokens.len());
            self.check_context(have, add)?;
            needed += sequence.pages_needed(add, &self.pool);
        }
        let live = self.sequences.len();
        if chunks.len() > self.limits.sequences.max(live) {
            return Err(EngineError::TooManySequences { asked: chunks.len(), limit: self.limits.sequences });
        }
        self.pool.check(needed)
    }

    /// Fails with the numbers if `add` tokens after `have` do not fit the context.
    pub(crate) fn check_context(&self, have: usize, add: usize) -> Result<(), EngineError> {
        if have + add <= self.context {
            return Ok(());
        }
        let model_limit = self.hyper.context;
        Err(EngineError::ContextOverflow { have, add, limit: self.context, model_limit })
    }

    /// Pages for every chunk, copies of shared ones included.
    fn reserve(&mut self, chunks: &[Chunk<'_>]) -> Result<(), EngineError> {
        for chunk in chunks {
            let Some(sequence) = self.sequences.get_mut(&chunk.sequence.0) else { continue };
            if let Some(copy) = sequence.reserve(chunk.tokens.len(), &mut self.pool)? {
                self.copy_page(copy)?;
            }
        }
        Ok(())
    }

    fn copy_page(&self, PageCopy { from, to }: PageCopy) -> Result<(), EngineError> {
        for id in 0..self.executor.placed().graph.states.len() as u32 {
            let Some(state) = self.executor.state(StateId(id)) else { continue };
            state.copy_page(from, to).map_err(|source| minfer_runtime::RuntimeError::Device {
                what: "copying a KV page".to_string(),
                device: minfer_runtime::DeviceId::CPU,
                source,
            })?;
        }
        Ok(())
    }

    fn run(&mut self, chunks: &[Chunk<'_>]) -> Result<(), EngineError> {
        self.bind(chunks)?;
        let i = &self.inputs;
        let bind = Bind { rows: i.tokens.len(), outs: i.out_rows.len() };
        let inputs: [(&str, &[i32]); 6] = [
            ("tokens", &i.tokens),
            ("positions", &i.positions),
            ("slots", &i.slots),
            ("table_at", &i.table_at),
            ("pages", &i.pages),
            ("out_rows", &i.out_rows),
        ];
        let outputs = self.executor.execute(bind, &inputs)?;
        let bytes = outputs.bytes("logits").unwrap_or_default();
        self.logits.clear();
        self.logits.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        Ok(())
    }

    /// Fills the step's inputs from the chunks and their block tables.
    fn bind(&mut self, chunks: &[Chunk<'_>]) -> Result<(), EngineError> {
        let i = &mut self.inputs;
        for list in
            [&mut i.tokens, &mut i.positions, &mut i.slots, &mut i.table_at, &mut i.pages, &mut i.out_rows]
        {
            list.clear();
        }
        for chunk in chunks {
            let sequence = self.sequences.get(&chunk.sequence.0);
            let sequence = sequence.ok_or(EngineError::UnknownSequence(chunk.sequence.0))?;
            let table_at = i.pages.len() as i32;
            i.pages.extend(sequence.pages.iter().map(|&p| p as i32));
            let first_row = i.tokens.len();
            for (n, &token) in chunk.tokens.iter().enumerate() {
                let position = sequence.len() + n;
                i.tokens.push(token as i32);
                i.positions.push(position as i32);
                i.slots.push(sequence.slot(position));
                i.table_at.push(table_at);
            }
            let rows = first_row as i32..i.tokens.len() as i32;
            match chunk.outs {
                Outs::None => {}
                Outs::Last => i.out_rows.extend(rows.last()),
                Outs::All => i.out_rows.extend(rows),
            }
        }
        Ok(())
    }
}

impl EngineOptions {
    fn check(&self, context: usize, allowed: usize) -> Result<(), EngineError> {
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

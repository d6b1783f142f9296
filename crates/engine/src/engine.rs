//! The engine: a placed model with its executor, its page pool and its sequences.

mod snapshot;
mod step;

use std::collections::BTreeMap;
use std::sync::Arc;

use minfer_format::Reading;
use minfer_format::table::TableCounters;
use minfer_graph::{PAGE, StateDecl, StateKind, WeightDecl};
use minfer_model::{Checkpoint, Hyper};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{
    Counters, Device, Executor, OpenOptions, Progress, Registry, SourceError, StateSpec, WeightOptions,
    WeightSource,
};

use crate::block_table::PageCopy;
use crate::draft::{Draft, DraftRows, Drafted, Opening};
use crate::error::EngineError;
use crate::ngrams::Ngrams;
use crate::options::EngineOptions;
use crate::pages::PagePool;
use crate::reuse::ReuseCounters;
use crate::sequence::{Sequence, SequenceId};
use crate::session::Session;
use crate::snapshot::Origin;
use crate::states::Recurrent;
use step::StepInputs;

/// The CPU alone, with `threads` threads or one per physical core.
///
/// # Errors
/// When threads cannot be started.
pub fn cpu_devices(threads: Option<usize>) -> Result<Vec<Arc<dyn Device>>, EngineError> {
    cpu_devices_with(threads, WeightOptions::default())
}

/// The same with a choice of how weights are kept.
///
/// # Errors
/// As [`cpu_devices`].
pub fn cpu_devices_with(
    threads: Option<usize>,
    weights: WeightOptions,
) -> Result<Vec<Arc<dyn Device>>, EngineError> {
    let registry = Registry::new(&[minfer_cpu::DESCRIPTOR])?;
    let options = OpenOptions { threads, weights, ..OpenOptions::default() };
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
    /// The tokens are guesses: after looking at the logits, [`Engine::commit`] says how many to keep. Until
    /// then the sequence takes no other step.
    pub window: bool,
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

/// An open model.
pub struct Engine {
    hyper: Hyper,
    origin: Arc<Origin>,
    executor: Executor,
    pool: PagePool,
    /// For models with recurrent state.
    recurrent: Option<Recurrent>,
    ngrams: Option<Ngrams>,
    draft: Option<Draft>,
    /// Residual streams of the last step's rows, for the draft head.
    streams: Vec<f32>,
    sequences: BTreeMap<u32, Sequence>,
    next_id: u32,
    context: usize,
    limits: Limits,
    reuse: ReuseCounters,
    inputs: StepInputs,
    logits: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Limits {
    rows: usize,
    sequences: usize,
}

struct Source<'a>(&'a Checkpoint, Reading);

impl WeightSource for Source<'_> {
    fn load(&self, decl: &WeightDecl) -> Result<minfer_format::TensorBytes, SourceError> {
        self.0.load_by(decl, self.1).map_err(|e| SourceError(e.to_string()))
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
        let mut loaded = minfer_model::load(model)?;
        if options.official_rounding {
            loaded.round_officially(model)?;
        }
        let hyper = loaded.hyper().clone();
        let context = options.context.unwrap_or(hyper.context.min(EngineOptions::DEFAULT_CONTEXT));
        options.check(context, hyper.context)?;
        let pages_per_sequence = context.div_ceil(PAGE);
        let pages = pages_per_sequence * options.sequences;
        let graph = match options.draft {
            true => loaded.graph_with_streams(model, pages)?,
            false => loaded.graph(model, pages)?,
        };
        let is_recurrent = |s: &StateDecl| matches!(s.kind, StateKind::Recurrent { .. });
        let window = graph.states.iter().filter_map(|s| s.kind.window()).max();
        let recurrent = window.is_some() || graph.states.iter().any(is_recurrent);
        let recurrent = recurrent.then(|| Recurrent::new(&options, window, pages));
        let window_pages = recurrent.as_ref().map_or(0, Recurrent::recent_pages);
        let spec = |decl: &StateDecl| {
            let slots = recurrent.as_ref().map_or(0, Recurrent::slots);
            let pages = if is_recurrent(decl) { slots } else { pages };
            StateSpec { decl: decl.clone(), format: options.kv_format, pages, window_pages }
        };
        let states: Vec<StateSpec> = graph.states.iter().map(spec).collect();
        let policy = Policy {
            kv_format: options.kv_format,
            gpu_layers: options.gpu_layers,
            require: options.require.clone(),
        };
        let placed = Placed::new(graph, options.devices.clone(), &policy)?;
        let source = Source(model, options.reading);
        let executor = Executor::open(placed, &states, &source, options.executor(), progress)?;
        let opening = Opening {
            trunk: &executor,
            options: &options,
            policy: &policy,
            source: &source,
            pages,
            window_pages,
        };
        let draft = match options.draft {
            true => Draft::open(&*loaded, model, &opening, progress)?,
            false => None,
        };
        let origin = Origin::of(model, &hyper, &options, &executor, draft.as_ref())?;
        Ok(Engine {
            hyper,
            origin,
            executor,
            pool: PagePool::new(0, pages),
            recurrent,
            ngrams: Ngrams::open(&*loaded, model, options.table)?,
            draft,
            streams: Vec::new(),
            sequences: BTreeMap::new(),
            next_id: 0,
            context,
            limits: Limits { rows: options.max_rows, sequences: options.sequences },
            reuse: ReuseCounters::default(),
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

    /// What the n-gram table has read, for models that have one.
    pub fn table_counters(&self) -> Option<TableCounters> {
        self.ngrams.as_ref().map(Ngrams::counters)
    }

    /// Pages for rows of which only the last ones are kept that no sequence uses; 0 for models without.
    pub fn free_window_pages(&self) -> usize {
        self.recurrent.as_ref().map_or(0, Recurrent::free_recent_pages)
    }

    /// Slots of recurrent state that no sequence uses; 0 for models without.
    pub fn free_state_slots(&self) -> usize {
        self.recurrent.as_ref().map_or(0, Recurrent::free)
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
    /// [`EngineError::UnknownSequence`], [`EngineError::OpenWindow`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, EngineError> {
        let parent = self.sequence(id)?;
        parent.check_no_window()?;
        let child = Sequence {
            tokens: parent.tokens.clone(),
            table: parent.table.clone(),
            state: parent.state.clone(),
        };
        child.table.share(&mut self.pool);
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.share(&child.state);
        }
        Ok(self.insert(child))
    }

    /// Forgets all but the first `len` tokens and returns how many are left: a sequence with recurrent state
    /// goes back to its last checkpoint at or before `len`, and the caller appends the rest again.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`], [`EngineError::OpenWindow`], [`EngineError::BadTruncation`] when the
    /// sequence is shorter.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<usize, EngineError> {
        let sequence = self.sequences.get_mut(&id.0).ok_or(EngineError::UnknownSequence(id.0))?;
        sequence.check_no_window()?;
        if len > sequence.len() {
            return Err(EngineError::BadTruncation { len: sequence.len(), to: len });
        }
        let mut kept = len;
        if let Some(recurrent) = self.recurrent.as_mut().filter(|_| len < sequence.len()) {
            kept = recurrent.go_back(&mut sequence.state, len);
        }
        sequence.tokens.truncate(kept);
        self.trim(id);
        self.reuse.asked += len as u64;
        self.reuse.kept += kept as u64;
        Ok(kept)
    }

    /// Keeps the first `keep` tokens of the window that the sequence's last step opened, exactly as if only
    /// they had been appended. Nothing is computed again.
    ///
    /// # Errors
    /// [`EngineError::NoWindow`], [`EngineError::BadTruncation`] when the window is shorter.
    pub fn commit(&mut self, id: SequenceId, keep: usize) -> Result<(), EngineError> {
        let sequence = self.sequences.get_mut(&id.0).ok_or(EngineError::UnknownSequence(id.0))?;
        let window = sequence.state.window.take().ok_or(EngineError::NoWindow)?;
        let (start, len) = (window.start, sequence.len() - window.start);
        if keep > len {
            sequence.state.window = Some(window);
            return Err(EngineError::BadTruncation { len, to: keep });
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.settle(&mut sequence.state, window, keep);
        }
        sequence.tokens.truncate(start + keep);
        self.trim(id);
        Ok(())
    }

    /// Forgets a sequence and gives its pages back.
    ///
    /// # Errors
    /// [`EngineError::UnknownSequence`].
    pub fn release(&mut self, id: SequenceId) -> Result<(), EngineError> {
        let sequence = self.sequences.remove(&id.0).ok_or(EngineError::UnknownSequence(id.0))?;
        self.give_back(sequence);
        Ok(())
    }

    fn give_back(&mut self, sequence: Sequence) {
        sequence.table.release(&mut self.pool);
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.release(sequence.state);
        }
    }

    /// Gives back pages that hold none of a sequence's tokens.
    fn trim(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id.0) else { return };
        let len = sequence.len();
        sequence.table.trim(len, &mut self.pool);
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.trim_recent(&mut sequence.state, len);
        }
    }

    /// Makes room for `add` more tokens of a sequence. Pages that it shares with others and that these will be
    /// written to are replaced by copies, which are added to `copies`.
    fn make_pages(
        &mut self,
        id: SequenceId,
        add: usize,
        copies: &mut Vec<(SequenceId, PageCopy)>,
    ) -> Result<(), EngineError> {
        let sequence = self.sequences.get_mut(&id.0).ok_or(EngineError::UnknownSequence(id.0))?;
        let len = sequence.len();
        let mut shared = [sequence.table.reserve(len, add, &mut self.pool)?, None];
        copies.extend(shared[0].map(|copy| (id, copy)));
        if let Some(recurrent) = &mut self.recurrent {
            shared[1] = recurrent.reserve_recent(&mut sequence.state, len, add)?;
            copies.extend(shared[1].map(|copy| (id, copy)));
        }
        shared.into_iter().flatten().try_for_each(|copy| self.copy_page(copy))
    }

    /// Takes copies of pages back, after a failure.
    fn undo_copies(&mut self, copies: Vec<(SequenceId, PageCopy)>) {
        for (id, copy) in copies {
            let Some(sequence) = self.sequences.get_mut(&id.0) else { continue };
            let len = sequence.len();
            sequence.table.undo_copy(len, copy, &mut self.pool);
            if let Some(recurrent) = &mut self.recurrent {
                recurrent.undo_copy(&mut sequence.state, len, copy);
            }
        }
    }

    /// Fails with the numbers if `add` tokens after `have` do not fit the context.
    pub(crate) fn check_context(&self, have: usize, add: usize) -> Result<(), EngineError> {
        if have + add <= self.context {
            return Ok(());
        }
        let model_limit = self.hyper.context;
        Err(EngineError::ContextOverflow { have, add, limit: self.context, model_limit })
    }

    fn copy_page(&self, PageCopy { from, to }: PageCopy) -> Result<(), EngineError> {
        copy_page_of(&self.executor, from, to)?;
        if let Some(own) = self.draft.as_ref().and_then(Draft::own) {
            copy_page_of(own, from, to)?;
        }
        Ok(())
    }

    /// Says which tokens will follow the sequence and `between` in a later step, so that their rows of an n-gram
    /// table are read meanwhile.
    pub(crate) fn look_ahead(&mut self, id: SequenceId, between: &[u32], next: &[u32]) {
        let (Some(ngrams), Some(sequence)) = (&mut self.ngrams, self.sequences.get(&id.0)) else { return };
        ngrams.look_ahead(&sequence.tokens, between, next);
    }

    /// Whether the model's draft head is open.
    pub fn has_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Numbers per row of [`Engine::streams`].
    pub(crate) fn draft_width(&self) -> usize {
        self.draft.as_ref().map_or(0, Draft::width)
    }

    /// Tokens that the head drafts at once; 1 for a chain.
    pub(crate) fn draft_block(&self) -> usize {
        match &self.draft {
            Some(Draft::Block(block)) => block.size,
            _ => 1,
        }
    }

    pub(crate) fn streams(&self) -> &[f32] {
        &self.streams
    }

    /// Runs rows of a chain of drafts; they may reach past the sequence's last token.
    pub(crate) fn draft_chain(
        &mut self,
        id: SequenceId,
        rows: DraftRows<'_>,
        wanted: bool,
    ) -> Result<Drafted, EngineError> {
        self.draft_with(id, rows.start + rows.next.len(), |draft, sequence| match draft {
            Draft::Chain(chain) => Ok(chain.run(sequence, rows, wanted)?),
            Draft::Block(_) => Err(EngineError::NoDraftHead),
        })
    }

    /// Drafts up to `depth` tokens after `token`, all at once.
    pub(crate) fn draft_at_once(
        &mut self,
        id: SequenceId,
        token: u32,
        depth: usize,
        choose: &dyn Fn(&[f32]) -> Option<u32>,
    ) -> Result<Vec<u32>, EngineError> {
        let end = self.sequence(id)?.len() + self.draft_block();
        self.draft_with(id, end, |draft, sequence| match draft {
            Draft::Block(block) => Ok(block.run(sequence, token, depth, choose)?),
            Draft::Chain(_) => Err(EngineError::NoDraftHead),
        })
    }

    /// Lets the head run on a sequence whose pages cover the positions before `end`.
    fn draft_with<T>(
        &mut self,
        id: SequenceId,
        end: usize,
        run: impl FnOnce(&mut Draft, &Sequence) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let ahead = end.saturating_sub(self.sequence(id)?.len());
        let mut copies = Vec::new();
        if let Err(error) = self.make_pages(id, ahead, &mut copies) {
            self.undo_copies(copies);
            self.trim(id);
            return Err(error);
        }
        let drafted = match (&mut self.draft, self.sequences.get(&id.0)) {
            (Some(draft), Some(sequence)) => run(draft, sequence),
            _ => Err(EngineError::NoDraftHead),
        };
        if drafted.is_err() {
            self.trim(id);
        }
        drafted
    }
}

/// Whether an executor's graph has an input of this name.
pub(crate) fn takes(executor: &Executor, input: &str) -> bool {
    executor.placed().graph.inputs.iter().any(|i| i.name == input)
}

/// Copies a page of every paged state of an executor.
pub(crate) fn copy_page_of(
    executor: &Executor,
    from: u32,
    to: u32,
) -> Result<(), minfer_runtime::RuntimeError> {
    executor.copy_page(from, to)
}

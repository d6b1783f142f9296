//! The n-gram table of a model: hashes of tokens on one side, rows of a file on the other. Rows are known as
//! soon as tokens are, so those of a prompt's next chunk are read while the one before it runs.

use std::collections::VecDeque;

use minfer_format::table::{RowTable, RowsAhead, TableCounters, TableOptions};
use minfer_model::{Checkpoint, Model, Ngram};

use crate::error::EngineError;

/// An open table with its hash.
pub(crate) struct Ngrams {
    hash: Ngram,
    table: RowTable,
    ids: Vec<i32>,
    numbers: Vec<f32>,
    /// Rows of the steps that come next, as far as their caller said so.
    ahead: VecDeque<RowsAhead>,
}

impl Ngrams {
    /// Opens the table of `model`, if it has one.
    pub(crate) fn open(
        model: &dyn Model,
        checkpoint: &Checkpoint,
        options: TableOptions,
    ) -> Result<Option<Ngrams>, EngineError> {
        let (Some(hash), Some(decl)) = (model.ngram(), model.ngram_table(checkpoint)?) else {
            return Ok(None);
        };
        let table = checkpoint.row_table(&decl, options)?;
        Ok(Some(Ngrams {
            hash: hash.clone(),
            table,
            ids: Vec::new(),
            numbers: Vec::new(),
            ahead: VecDeque::new(),
        }))
    }

    /// Begins a step.
    pub(crate) fn clear(&mut self) {
        self.ids.clear();
    }

    /// Adds the rows of `new` tokens that follow `before`.
    pub(crate) fn ask(&mut self, before: &[u32], new: &[u32]) {
        rows(&self.hash, before, new, &mut self.ids);
    }

    /// Begins to read the rows of `new` tokens that will follow `before` and `between` in a later step.
    pub(crate) fn look_ahead(&mut self, before: &[u32], between: &[u32], new: &[u32]) {
        let mut ids = Vec::new();
        let missing = self.hash.history().saturating_sub(between.len());
        let before = [&before[before.len().saturating_sub(missing)..], between].concat();
        rows(&self.hash, &before, new, &mut ids);
        // This step's and the next one's; older ones were for steps that did not come.
        self.ahead.truncate(1);
        // The step reports what cannot be read.
        self.ahead.extend(self.table.start(&ids));
    }

    /// Reads what was asked for and appends it to `bits`, as an f32 input takes it.
    pub(crate) fn read(&mut self, bits: &mut Vec<i32>) -> Result<(), EngineError> {
        self.numbers.clear();
        let numbers = &mut self.numbers;
        let known = self.ahead.iter().position(|ahead| ahead.ids() == self.ids);
        let read = match known.and_then(|at| self.ahead.remove(at)) {
            Some(ahead) => self.table.finish(ahead, numbers),
            None => self.table.read(&self.ids, numbers),
        };
        read.map_err(minfer_model::ModelError::from)?;
        bits.extend(self.numbers.iter().map(|x| x.to_bits() as i32));
        Ok(())
    }

    pub(crate) fn counters(&self) -> TableCounters {
        self.table.counters()
    }
}

fn rows(hash: &Ngram, before: &[u32], new: &[u32], ids: &mut Vec<i32>) {
    let known = &before[before.len().saturating_sub(hash.history())..];
    let tokens: Vec<u32> = known.iter().chain(new).copied().collect();
    (known.len()..tokens.len()).for_each(|at| hash.rows(&tokens, at, ids));
}

//! The n-gram table of a model: hashes of tokens on one side, rows of a file on the other. Rows are known as
//! soon as tokens are, so they are read before a step begins.

use minfer_format::table::{RowTable, TableCounters, TableOptions};
use minfer_model::{Checkpoint, Model, Ngram};

use crate::error::EngineError;

/// An open table with its hash.
pub(crate) struct Ngrams {
    hash: Ngram,
    table: RowTable,
    ids: Vec<i32>,
    numbers: Vec<f32>,
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
        Ok(Some(Ngrams { hash: hash.clone(), table, ids: Vec::new(), numbers: Vec::new() }))
    }

    /// Begins a step.
    pub(crate) fn clear(&mut self) {
        self.ids.clear();
    }

    /// Adds the rows of `new` tokens that follow `before`.
    pub(crate) fn ask(&mut self, before: &[u32], new: &[u32]) {
        let known = &before[before.len().saturating_sub(self.hash.history())..];
        let tokens: Vec<u32> = known.iter().chain(new).copied().collect();
        (known.len()..tokens.len()).for_each(|at| self.hash.rows(&tokens, at, &mut self.ids));
    }

    /// Reads what was asked for and appends it to `bits`, as an f32 input takes it.
    pub(crate) fn read(&mut self, bits: &mut Vec<i32>) -> Result<(), EngineError> {
        self.numbers.clear();
        self.table.read(&self.ids, &mut self.numbers).map_err(minfer_model::ModelError::from)?;
        bits.extend(self.numbers.iter().map(|x| x.to_bits() as i32));
        Ok(())
    }

    pub(crate) fn counters(&self) -> TableCounters {
        self.table.counters()
    }
}

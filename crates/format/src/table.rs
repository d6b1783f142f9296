//! Rows of a table that stays in its file: the n-gram embeddings of some models are larger than memory.
//!
//! In: where the table's parts lie (files and offsets) and row numbers. Out: the rows as numbers. Rows are
//! read by position, by a few readers at a time, each distinct row once per request; recently used rows are
//! kept in a cache of fixed size, which requests of many rows (long prompts) do not disturb. What a row means
//! is not known here.

mod cache;
mod readers;

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::block::BlockType;
use crate::bytes::TensorBytes;
use crate::decode::decode_row;
use crate::error::Error;
use crate::hf::Packed;
use cache::Cache;
use readers::{Place, Readers, Reading};

/// Consecutive rows of a table in one place.
#[derive(Clone, Debug)]
pub enum TablePart {
    /// In a file, from this byte on.
    File {
        /// The file.
        path: PathBuf,
        /// First byte of the first row.
        offset: u64,
        /// Number of rows.
        rows: usize,
    },
    /// In memory: a model inside of the binary.
    Bytes(TensorBytes),
    /// Spread over several tensors of mapped files; each row is gathered when it is read.
    Packed(Packed),
}

/// How a table is read.
#[derive(Clone, Copy, Debug)]
pub struct TableOptions {
    /// Bytes of recently used rows that are kept.
    pub cache_bytes: usize,
    /// Reads under way at one time.
    pub readers: usize,
    /// Requests of more rows than this neither look into the cache nor fill it.
    pub bypass_rows: usize,
}

impl Default for TableOptions {
    fn default() -> TableOptions {
        TableOptions { cache_bytes: 16 << 20, readers: 4, bypass_rows: 2048 }
    }
}

/// What a table has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableCounters {
    /// Rows asked for.
    pub rows: u64,
    /// Of these, rows that occurred before in the same request.
    pub repeats: u64,
    /// Distinct rows found in the cache.
    pub hits: u64,
    /// Distinct rows read from the file.
    pub reads: u64,
    /// Requests that went past the cache.
    pub bypasses: u64,
}

/// An open table.
pub struct RowTable {
    ty: BlockType,
    width: usize,
    row_bytes: usize,
    /// First row of each part, and of what would follow.
    starts: Vec<usize>,
    readers: Readers,
    options: TableOptions,
    state: Mutex<(Cache, TableCounters)>,
}

/// Rows that have been asked for ([`RowTable::start`]).
pub struct RowsAhead {
    ids: Vec<i32>,
    distinct: Vec<i32>,
    /// Of the distinct rows; those found in the cache are there already.
    bytes: Vec<u8>,
    /// Which of the distinct rows are being read.
    missing: Vec<usize>,
    bypass: bool,
    reading: Reading,
}

impl RowsAhead {
    /// The rows, as they were asked for.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }
}

impl RowTable {
    /// Opens a table of rows of `width` numbers of type `ty`.
    ///
    /// # Errors
    /// A file that cannot be opened, or rows that are not whole blocks.
    pub fn open(
        parts: Vec<TablePart>,
        ty: BlockType,
        width: usize,
        options: TableOptions,
    ) -> Result<RowTable, Error> {
        let row_bytes = ty.row_bytes(width).filter(|&b| b > 0);
        let row_bytes = row_bytes.ok_or(Error::TableRows { ty: ty.name(), width })?;
        let mut starts = vec![0usize];
        for part in &parts {
            let rows = match part {
                TablePart::File { rows, .. } => *rows,
                TablePart::Bytes(bytes) => bytes.len() / row_bytes,
                TablePart::Packed(packed) => packed.rows(),
            };
            starts.push(starts[starts.len() - 1].saturating_add(rows));
        }
        let readers = Readers::open(parts, row_bytes, options.readers)?;
        let state = Mutex::new((Cache::new(row_bytes, options.cache_bytes), TableCounters::default()));
        Ok(RowTable { ty, width, row_bytes, starts, readers, options, state })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Numbers in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// What happened so far.
    pub fn counters(&self) -> TableCounters {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Appends the rows `ids` to `out`, one after the other.
    ///
    /// # Errors
    /// A row outside of the table, or a file that cannot be read (any more).
    pub fn read(&self, ids: &[i32], out: &mut Vec<f32>) -> Result<(), Error> {
        self.finish(self.start(ids)?, out)
    }

    /// Begins to read the rows `ids`, without waiting for the file.
    ///
    /// # Errors
    /// A row outside of the table.
    pub fn start(&self, ids: &[i32]) -> Result<RowsAhead, Error> {
        let mut distinct = ids.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let mut bytes = vec![0; distinct.len() * self.row_bytes];
        let bypass = distinct.len() > self.options.bypass_rows;
        let (mut missing, mut places) = (Vec::new(), Vec::new());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (cache, counters) = &mut *state;
        counters.rows += ids.len() as u64;
        counters.repeats += (ids.len() - distinct.len()) as u64;
        counters.bypasses += u64::from(bypass);
        for (i, (row, &id)) in bytes.chunks_exact_mut(self.row_bytes).zip(&distinct).enumerate() {
            let place = self.place(id)?;
            if bypass || !cache.get(id, row) {
                missing.push(i);
                places.push(place);
            }
        }
        counters.hits += (distinct.len() - missing.len()) as u64;
        counters.reads += missing.len() as u64;
        Ok(RowsAhead {
            ids: ids.to_vec(),
            distinct,
            bytes,
            missing,
            bypass,
            reading: self.readers.start(places),
        })
    }

    /// Waits for rows and appends them to `out`, in the order in which they were asked for.
    ///
    /// # Errors
    /// A file that cannot be read (any more).
    pub fn finish(&self, ahead: RowsAhead, out: &mut Vec<f32>) -> Result<(), Error> {
        let RowsAhead { ids, distinct, mut bytes, missing, bypass, reading } = ahead;
        // Without the lock: other requests may go on.
        let read = reading.wait()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for (&i, row) in missing.iter().zip(read.chunks_exact(self.row_bytes)) {
            bytes[i * self.row_bytes..(i + 1) * self.row_bytes].copy_from_slice(row);
            if !bypass {
                state.0.put(distinct[i], row);
            }
        }
        drop(state);
        let mut numbers = vec![0.0; self.width];
        let first = out.len();
        out.resize(first + ids.len() * self.width, 0.0);
        for (row, id) in out[first..].chunks_exact_mut(self.width).zip(ids) {
            // Every id is in `distinct`, since that was made from `ids`.
            let at = distinct.partition_point(|&d| d < id) * self.row_bytes;
            decode_row(self.ty, &bytes[at..at + self.row_bytes], &mut numbers)
                .map_err(|_| Error::TableRows { ty: self.ty.name(), width: self.width })?;
            row.copy_from_slice(&numbers);
        }
        Ok(())
    }

    fn place(&self, id: i32) -> Result<Place, Error> {
        let outside = || Error::TableRow { row: id.into(), rows: self.rows() };
        let row = usize::try_from(id).ok().filter(|&r| r < self.rows()).ok_or_else(outside)?;
        let part = self.starts.partition_point(|&s| s <= row) - 1;
        Ok(Place { part, row: row - self.starts[part] })
    }
}

//! A split as the CPU runs it: a flat list of steps with resolved memory, run by all threads together.
//!
//! Every worker walks the whole list. A step shares its work out by rows, heads or groups of outputs, never
//! by the inner dimension of a sum. Workers meet at a barrier only where a step touches memory that others
//! may have touched since the last meeting; this is decided when the program is compiled.

mod attend;
mod compile;
mod compressed;
mod gated;
mod meetings;
mod products;
mod recurrent;
mod rows;
mod sparse;
mod streams;
mod swiglu;

use std::cell::UnsafeCell;
use std::sync::{Arc, Mutex, PoisonError};

use minfer_graph::{Bind, Dim};
use minfer_runtime::{Arena, DeviceError, Program};

use crate::Kernels;
use crate::device::Shared;
use crate::memory::CpuArena;
use crate::pool::{ChunkCounter, Worker};
use crate::quantize::QuantizeFn;
use crate::weights::PackScratch;

pub(crate) use compile::compile;

/// Where a value lives: row `r` is `row_bytes` bytes at `offset + r * row_bytes` of the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loc {
    offset: usize,
    row_bytes: usize,
    lead: Dim,
}

/// What a step sees of a run.
pub(crate) struct Run<'a> {
    base: *mut u8,
    bind: Bind,
    kernels: &'a Kernels,
    quantize: QuantizeFn,
    pack_scratch: &'a PerWorker<PackScratch>,
    failure: &'a Mutex<Option<String>>,
}

// SAFETY: `base` points to the arena of the run, whose memory the workers share by the rules of `Step`.
unsafe impl Sync for Run<'_> {}

impl Run<'_> {
    fn rows(&self, loc: &Loc) -> usize {
        self.bind.len(loc.lead)
    }

    fn at(&self, loc: &Loc, row: usize) -> *mut u8 {
        debug_assert!(row <= self.rows(loc));
        self.base.wrapping_add(loc.offset + row * loc.row_bytes)
    }

    /// Rows `from..from + count` as numbers.
    ///
    /// # Safety
    /// `T` is the value's element type, the rows exist, and nobody writes them meanwhile.
    unsafe fn get<T: Copy>(&self, loc: &Loc, from: usize, count: usize) -> &[T] {
        let len = count * loc.row_bytes / size_of::<T>();
        // SAFETY: regions are aligned to 64 and lie inside the arena; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at(loc, from).cast(), len) }
    }

    /// One row for writing.
    ///
    /// # Safety
    /// As [`Run::get`], and nobody else uses the row meanwhile.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get_mut<T: Copy>(&self, loc: &Loc, row: usize) -> &mut [T] {
        // SAFETY: as in `get`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at(loc, row).cast(), loc.row_bytes / size_of::<T>()) }
    }

    /// Reports that the step cannot be right, such as a token id outside the table.
    fn fail(&self, why: String) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
    }
}

/// One node, compiled.
pub(crate) trait Step: Send + Sync {
    /// Does this worker's share. Called by every worker; shares of one step do not overlap.
    ///
    /// # Safety
    /// What the step reads is complete, and nobody else touches what it writes.
    unsafe fn run(&self, run: &Run<'_>, worker: &Worker<'_>);

    /// Prepares the next run, on one thread.
    fn reset(&self) {}
}

/// A step, with whether workers meet before it.
struct Entry {
    step: Box<dyn Step>,
    barrier: bool,
}

pub(crate) struct CpuProgram {
    shared: Arc<Shared>,
    entries: Vec<Entry>,
    quantize: QuantizeFn,
}

impl Program for CpuProgram {
    fn run(&mut self, arena: &Arc<dyn Arena>, bind: Bind) -> Result<(), DeviceError> {
        let Some(arena) = arena.as_any().downcast_ref::<CpuArena>() else {
            return Err(DeviceError::Failed("the arena belongs to another device".to_string()));
        };
        let _stream = self.shared.stream();
        self.entries.iter().for_each(|e| e.step.reset());
        let failure = Mutex::new(None);
        let run = Run {
            base: arena.base(),
            bind,
            kernels: &self.shared.kernels,
            quantize: self.quantize,
            pack_scratch: &self.shared.pack_scratch,
            failure: &failure,
        };
        let result = self.shared.pool.run(&|worker| {
            for entry in &self.entries {
                if entry.barrier {
                    worker.barrier();
                }
                // SAFETY: the stream lock is held, and barriers separate steps that share memory.
                unsafe { entry.step.run(&run, worker) }
            }
        });
        result.map_err(|e| DeviceError::Failed(e.to_string()))?;
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(why) => Err(DeviceError::Failed(why)),
            None => Ok(()),
        }
    }
}

/// One value per worker.
pub(crate) struct PerWorker<T>(Vec<Slot<T>>);

/// Padded, so that workers do not share cache lines.
#[repr(align(128))]
struct Slot<T>(UnsafeCell<T>);

// SAFETY: a worker touches only the slot of its own index, and a run has one worker per index.
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T> PerWorker<T> {
    pub(crate) fn new(workers: usize, make: impl Fn() -> T) -> PerWorker<T> {
        PerWorker((0..workers).map(|_| Slot(UnsafeCell::new(make()))).collect())
    }

    /// # Safety
    /// Called by the worker itself, and the last borrow has ended.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get(&self, worker: &Worker<'_>) -> &mut T {
        // SAFETY: by the caller's promise the slot is borrowed once.
        unsafe { &mut *self.0[worker.index].0.get() }
    }
}

/// Shares `len` items out in chunks as workers become free.
fn for_each_chunk(
    counter: &ChunkCounter,
    len: usize,
    chunk: usize,
    mut body: impl FnMut(std::ops::Range<usize>),
) {
    while let Some(range) = counter.claim(len, chunk) {
        body(range);
    }
}

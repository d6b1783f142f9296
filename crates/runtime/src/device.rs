//! The contract of a device: what it can do, what memory it has, and how work is handed to it.
//!
//! A device owns its weights, state and arenas; the runtime holds them as opaque handles that free
//! themselves. Work is enqueued in order on the device's one stream. A synchronous device (the CPU)
//! finishes each call before it returns; an asynchronous one returns at once, and its results are waited
//! for through [`ReadBack`].

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use minfer_format::TensorBytes;
use minfer_graph::{
    Bind, DeviceId, Graph, Node, NodeId, PAGE, PagedPart, StateDecl, StateId, StateKind, ValueId, WeightDecl,
    WeightId, WeightUse,
};
use thiserror::Error;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// As computed.
    F32,
    /// Rounded to nearest, ties to even.
    F16,
    /// Blocks of [`KvFormat::BLOCK`] numbers as GGUF's Q8_0 has them: an f16 scale, then int8 codes. The last block
    /// of a row that is not whole blocks wide has fewer codes.
    Q8_0,
}

impl KvFormat {
    /// Every format.
    pub const ALL: [KvFormat; 3] = [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0];
    /// Numbers that share a scale in `Q8_0`.
    pub const BLOCK: usize = 32;

    /// Lower-case name, as flags spell it.
    pub const fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::F16 => "f16",
            KvFormat::Q8_0 => "q8_0",
        }
    }

    /// Bytes of the first `width` numbers of a row.
    pub const fn row_bytes(self, width: usize) -> usize {
        match self {
            KvFormat::F32 => 4 * width,
            KvFormat::F16 => 2 * width,
            KvFormat::Q8_0 => width + 2 * width.div_ceil(KvFormat::BLOCK),
        }
    }

    /// The same; `None` on overflow.
    pub const fn checked_row_bytes(self, width: usize) -> Option<usize> {
        // No format takes more than 4 bytes for a number.
        match width.checked_mul(4) {
            Some(_) => Some(self.row_bytes(width)),
            None => None,
        }
    }
}

/// What a device says about its memory. A failed query is not zero: it is its own outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Bytes that may still be taken.
    Available(u64),
    /// The platform offers no figure; allocation decides.
    Unbounded,
    /// The question was asked and failed, with the device's reason.
    QueryFailed(String),
}

/// Rough figures for deciding whether moving a value is worth it. Only ratios matter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Bytes per second that products stream from this device's memory.
    pub bytes_per_second: f64,
    /// Seconds that a copy to or from this device takes however small it is; 0 on the host.
    pub copy_latency: f64,
    /// Bytes per second of such copies.
    pub copy_bytes_per_second: f64,
}

/// An error of a device, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceError {
    /// An allocation was refused.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// Size of the request.
        bytes: usize,
        /// What it was for.
        what: String,
    },
    /// The device cannot run what it was asked to: assignment and device disagree.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// Anything else, such as a failed launch or a lost device.
    #[error("{0}")]
    Failed(String),
}

/// Why a wait ended without the value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WaitError {
    /// The bound was reached; the text is the device's status.
    #[error("no answer in time; device status: {0}")]
    TimedOut(String),
    /// The work behind the wait failed.
    #[error(transparent)]
    Failed(#[from] DeviceError),
}

/// A weight in a device's memory and layout. The device that made it knows the type inside.
pub type WeightHandle = Arc<dyn Any + Send + Sync>;

/// A copy of a value on its way to the host.
pub trait ReadBack: Send + Sync {
    /// Waits until the bytes are there, at most `timeout`. May be called again and from several threads.
    fn wait(&self, timeout: Duration) -> Result<&[u8], WaitError>;

    /// For a device that can take the bytes from this one without the host.
    fn as_any(&self) -> &dyn Any;
}

/// Scratch memory of a device, in which a plan lays out its values.
pub trait Arena: Send + Sync {
    /// Size in bytes.
    fn bytes(&self) -> usize;

    /// Copies host bytes to `offset`, behind the work enqueued so far.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Issues a copy of a region to the host behind the work enqueued so far, without waiting.
    fn read(&self, region: Region) -> Result<Arc<dyn ReadBack>, DeviceError>;

    /// Copies a value that is on its way from another device to `offset`. An asynchronous device lets its
    /// stream wait for `source`, at most `timeout`; the host goes on. `len` bytes are copied.
    fn receive(
        &self,
        offset: usize,
        len: usize,
        source: Arc<dyn ReadBack>,
        timeout: Duration,
    ) -> Result<(), WaitError>;

    /// For the device's own programs.
    fn as_any(&self) -> &dyn Any;
}

/// A range of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Region {
    pub offset: usize,
    pub bytes: usize,
}

impl Region {
    /// Whether the two ranges share a byte.
    pub const fn overlaps(&self, other: &Region) -> bool {
        self.offset < other.offset + other.bytes && other.offset < self.offset + self.bytes
    }
}

/// Size and format of a piece of state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// What the model declares.
    pub decl: StateDecl,
    /// How its numbers are stored.
    pub format: KvFormat,
    /// Pages of [`PAGE`] positions; slots of recurrent state.
    pub pages: usize,
    /// Pages for the parts of which a window is kept. They are numbered behind the others.
    pub window_pages: usize,
}

impl StateSpec {
    /// The numbers of the pages in which a part has rows.
    pub fn part_pages(&self, part: &PagedPart) -> Range<usize> {
        match part.window {
            None => 0..self.pages,
            Some(_) => self.pages..self.pages.saturating_add(self.window_pages),
        }
    }

    /// Bytes of the first `rows` positions of a page in all parts that have rows there, or of a slot of recurrent
    /// state, which is one row; `None` on overflow and for more rows than a unit has.
    pub fn unit_bytes(&self, unit: u32, rows: usize) -> Option<usize> {
        self.rows_bytes(unit as usize >= self.pages, rows)
    }

    /// [`StateSpec::unit_bytes`] of any page for windows, or of any other unit.
    pub fn rows_bytes(&self, window: bool, rows: usize) -> Option<usize> {
        match &self.decl.kind {
            StateKind::Paged { parts } if rows <= PAGE => {
                let parts = parts.iter().filter(|p| p.window.is_some() == window);
                parts.map(|p| self.part_bytes(p, rows)).try_fold(0usize, |sum, bytes| sum.checked_add(bytes?))
            }
            StateKind::Recurrent { width } if rows == 1 => width.checked_mul(4),
            _ => None,
        }
    }

    /// Bytes of the first `rows` positions of a page in one part.
    pub fn part_bytes(&self, part: &PagedPart, rows: usize) -> Option<usize> {
        self.format.checked_row_bytes(part.width)?.checked_mul(part.rows(rows))
    }

    /// Bytes of the whole state; `None` on overflow.
    pub fn bytes(&self) -> Option<usize> {
        match &self.decl.kind {
            StateKind::Paged { parts } => parts.iter().try_fold(0usize, |sum, part| {
                sum.checked_add(self.part_bytes(part, PAGE)?.checked_mul(self.part_pages(part).len())?)
            }),
            // Always f32: what every token multiplies would drift in f16.
            StateKind::Recurrent { width } => width.checked_mul(4)?.checked_mul(self.pages),
            _ => None,
        }
    }
}

/// State in a device's memory. Operations are ordered with the programs that use it.
pub trait StateBuffer: Send + Sync {
    /// Copies every part of page `from` over page `to` (copy on write).
    fn copy_page(&self, from: u32, to: u32) -> Result<(), DeviceError>;

    /// Issues a copy of the first `rows` positions of a page, or of a slot (`rows` is 1), to the host, without
    /// waiting. These are [`StateSpec::unit_bytes`] bytes, in an order that only devices of this kind know.
    fn read(&self, unit: u32, rows: usize) -> Result<Arc<dyn ReadBack>, DeviceError>;

    /// Writes back what [`StateBuffer::read`] gave for as many rows, to any unit of a state that is declared
    /// the same. The rest of the unit is left as it is.
    fn write(&self, unit: u32, rows: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// For the device's own programs.
    fn as_any(&self) -> &dyn Any;
}

/// What a program is compiled from: the nodes of one split, with memory and handles resolved.
pub struct ProgramSpec<'a> {
    /// The placed graph.
    pub graph: &'a Graph,
    /// Nodes of the split, in order.
    pub nodes: &'a [NodeId],
    /// Upper bound of the symbols; a run binds at most these.
    pub bound: Bind,
    /// Region of a value in this device's arena; every value that the nodes touch has one.
    pub region: &'a dyn Fn(ValueId) -> Option<Region>,
    /// Weight by reference and use.
    pub weight: &'a dyn Fn(WeightId, WeightUse) -> Option<WeightHandle>,
    /// State by reference.
    pub state: &'a dyn Fn(StateId) -> Option<Arc<dyn StateBuffer>>,
}

/// A compiled split.
pub trait Program: Send {
    /// Enqueues one run on the device's stream. `bind` is within the bound that it was compiled for.
    fn run(&mut self, arena: &Arc<dyn Arena>, bind: Bind) -> Result<(), DeviceError>;
}

/// A device, opened. Support questions have one authority: [`Device::supports`].
pub trait Device: Send + Sync {
    /// Its identity.
    fn id(&self) -> DeviceId;

    /// One line for people: model, cores, instruction sets.
    fn describe(&self) -> String;

    /// Whether it runs this node, fused ops included, judged from op, types, shapes and weight type.
    fn supports(&self, graph: &Graph, node: &Node) -> bool;

    /// Whether its attention reads this format.
    fn reads_kv(&self, format: KvFormat) -> bool;

    /// What it can still allocate.
    fn memory(&self) -> Memory;

    /// Rough speeds, for placement.
    fn speed(&self) -> Speed;

    /// Whether enqueued work is still running when calls return.
    fn is_async(&self) -> bool;

    /// Bytes that [`Device::load_weight`] will allocate; `None` if sizes overflow.
    fn weight_bytes(&self, decl: &WeightDecl, how: WeightUse) -> Option<u64>;

    /// Takes a weight in the file's encoding into its own memory and layout.
    fn load_weight(
        &self,
        decl: &WeightDecl,
        how: WeightUse,
        data: TensorBytes,
    ) -> Result<WeightHandle, DeviceError>;

    /// Allocates state.
    fn open_state(&self, spec: &StateSpec) -> Result<Arc<dyn StateBuffer>, DeviceError>;

    /// Allocates scratch memory.
    fn open_arena(&self, bytes: usize) -> Result<Arc<dyn Arena>, DeviceError>;

    /// Compiles a split.
    fn compile(&self, spec: &ProgramSpec<'_>) -> Result<Box<dyn Program>, DeviceError>;

    /// Waits until everything enqueued is done, at most `timeout`, and reports its first error.
    fn synchronize(&self, timeout: Duration) -> Result<(), WaitError>;

    /// After an error: waits until the stream is idle, at most `timeout`, and forgets what failed.
    fn recover(&self, timeout: Duration) -> Result<(), WaitError>;
}

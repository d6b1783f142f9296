//! State of the CPU device: paged rows (keys, values and what else a layer keeps per position) and slots of
//! recurrent numbers. Their bytes follow the rules of `memory`. Which sequence owns which page or slot is
//! the engine's affair.

use std::any::Any;
use std::sync::Arc;

use half::f16;
use minfer_graph::{PAGE, StateKind};
use minfer_runtime::{DeviceError, KvFormat, StateBuffer, StateSpec};

use crate::attention::{CacheRows, CacheRowsMut, KvView};
use crate::device::{Shared, out_of_memory};
use crate::memory::StreamBytes;

/// Opens the kind of state that a layer declares.
///
/// # Errors
/// When the memory is not there, or the kind is unknown to this device.
pub(crate) fn open(shared: Arc<Shared>, spec: &StateSpec) -> Result<Arc<dyn StateBuffer>, DeviceError> {
    let name = &spec.decl.name;
    let bytes = || spec.bytes().ok_or_else(|| out_of_memory(usize::MAX, name));
    match &spec.decl.kind {
        StateKind::Paged { widths } => {
            let bytes = StreamBytes::zeroed(bytes()?, name)?;
            Ok(Arc::new(PagedState::new(shared, spec, widths, bytes)))
        }
        StateKind::Recurrent { width } => {
            let bytes = StreamBytes::zeroed(bytes()?, name)?;
            Ok(Arc::new(SlotState { width: *width, slots: spec.pages, bytes }))
        }
        kind => Err(DeviceError::Unsupported(format!("state '{name}' {kind:?}"))),
    }
}

/// Rows of one layer, part by part: `[slots, width of the part]`.
pub(crate) struct PagedState {
    shared: Arc<Shared>,
    format: KvFormat,
    pages: usize,
    parts: Vec<Part>,
    bytes: StreamBytes,
}

/// Where a part lies.
struct Part {
    /// Numbers per slot.
    width: usize,
    /// Byte of its first page.
    start: usize,
    page_bytes: usize,
}

impl PagedState {
    /// `bytes` is as long as the specification says, which did not overflow.
    fn new(shared: Arc<Shared>, spec: &StateSpec, widths: &[usize], bytes: StreamBytes) -> PagedState {
        let mut start = 0;
        let part = |&width: &usize| {
            let page_bytes = spec.format.row_bytes(width) * PAGE;
            let part = Part { width, start, page_bytes };
            start += page_bytes * spec.pages;
            part
        };
        let parts = widths.iter().map(part).collect();
        PagedState { shared, format: spec.format, pages: spec.pages, parts, bytes }
    }

    /// Numbers per slot of a part.
    pub(crate) fn width(&self, part: usize) -> usize {
        self.parts[part].width
    }

    /// Number of parts.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Slots of the cache.
    pub(crate) fn slots(&self) -> usize {
        self.pages * PAGE
    }

    /// Keys (part 0) and values for reading. The parts exist, as graph validation has checked.
    ///
    /// # Safety
    /// As [`PagedState::rows`].
    pub(crate) unsafe fn view(&self, v_part: usize) -> KvView<'_> {
        // SAFETY: by the caller's promise.
        let [k, v] = [0, v_part].map(|part| unsafe { self.rows(part) });
        KvView { k, v }
    }

    /// A part for reading.
    ///
    /// # Safety
    /// The caller runs under the stream lock, and nobody writes the slots that it reads meanwhile.
    pub(crate) unsafe fn rows(&self, part: usize) -> CacheRows<'_> {
        let Part { start, page_bytes, .. } = self.parts[part];
        let len = page_bytes * self.pages;
        // SAFETY: the range lies inside the allocation, which is aligned to 64 and whole pages of 64 slots
        // long, so both element types are aligned; any bits are valid numbers.
        unsafe {
            let at = self.bytes.base().add(start);
            match self.format {
                KvFormat::F32 => CacheRows::F32(std::slice::from_raw_parts(at.cast::<f32>(), len / 4)),
                KvFormat::F16 => CacheRows::F16(std::slice::from_raw_parts(at.cast::<f16>(), len / 2)),
            }
        }
    }

    /// One slot of a part for writing, as a cache of one row.
    ///
    /// # Safety
    /// The caller runs under the stream lock, the slot is inside the cache, and nobody else uses it meanwhile.
    pub(crate) unsafe fn slot_mut(&self, part: usize, slot: usize) -> CacheRowsMut<'_> {
        let Part { width, start, .. } = self.parts[part];
        let bytes = self.format.row_bytes(width);
        debug_assert!(slot < self.slots());
        // SAFETY: as in `rows`, for one row; rows are whole elements, so it is aligned.
        unsafe {
            let at = self.bytes.base().add(start + slot * bytes);
            match self.format {
                KvFormat::F32 => CacheRowsMut::F32(std::slice::from_raw_parts_mut(at.cast::<f32>(), width)),
                KvFormat::F16 => CacheRowsMut::F16(std::slice::from_raw_parts_mut(at.cast::<f16>(), width)),
            }
        }
    }
}

impl StateBuffer for PagedState {
    fn copy_page(&self, from: u32, to: u32) -> Result<(), DeviceError> {
        let (from, to) = (from as usize, to as usize);
        if from.max(to) >= self.pages {
            return Err(DeviceError::Failed(format!("page {} of {}", from.max(to), self.pages)));
        }
        let _stream = self.shared.stream();
        // SAFETY: the stream lock is held.
        let bytes = unsafe { self.bytes.exclusive() };
        for &Part { start, page_bytes, .. } in &self.parts {
            let from = start + from * page_bytes;
            bytes.copy_within(from..from + page_bytes, start + to * page_bytes);
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Recurrent state of one layer: f32 `[slots, width]`.
pub(crate) struct SlotState {
    width: usize,
    slots: usize,
    bytes: StreamBytes,
}

impl SlotState {
    /// Number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Numbers `from..from + len` of a slot.
    ///
    /// # Safety
    /// The caller runs under the stream lock, and nobody writes these numbers meanwhile.
    pub(crate) unsafe fn get(&self, slot: usize, from: usize, len: usize) -> &[f32] {
        // SAFETY: `at` has checked the range; any bits are valid numbers.
        unsafe { std::slice::from_raw_parts(self.at(slot, from, len), len) }
    }

    /// The same for writing.
    ///
    /// # Safety
    /// As [`SlotState::get`], and nobody else uses these numbers meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get_mut(&self, slot: usize, from: usize, len: usize) -> &mut [f32] {
        // SAFETY: as in `get`; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at(slot, from, len), len) }
    }

    fn at(&self, slot: usize, from: usize, len: usize) -> *mut f32 {
        assert!(slot < self.slots && from + len <= self.width, "slot {slot}: {len} numbers from {from}");
        self.bytes.base().cast::<f32>().wrapping_add(slot * self.width + from)
    }
}

impl StateBuffer for SlotState {
    fn copy_page(&self, _from: u32, _to: u32) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("recurrent state has no pages; a step writes another slot".to_string()))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

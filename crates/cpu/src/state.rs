//! State of the CPU device: paged rows (keys, values and what else a layer keeps per position) and slots of
//! recurrent numbers. Their bytes follow the rules of `memory`. Which sequence owns which page or slot is
//! the engine's affair.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use half::f16;
use minfer_graph::{PAGE, PagedPart, StateKind};
use minfer_runtime::{DeviceError, KvFormat, ReadBack, StateBuffer, StateSpec};

use crate::attention::{CacheRows, CacheRowsMut, KvView};
use crate::device::{Shared, out_of_memory};
use crate::memory::{Copied, StreamBytes};

/// Opens the kind of state that a layer declares.
///
/// # Errors
/// When the memory is not there, or the kind is unknown to this device.
pub(crate) fn open(shared: Arc<Shared>, spec: &StateSpec) -> Result<Arc<dyn StateBuffer>, DeviceError> {
    let name = &spec.decl.name;
    let bytes = || spec.bytes().ok_or_else(|| out_of_memory(usize::MAX, name));
    match &spec.decl.kind {
        StateKind::Paged { parts } => {
            let bytes = StreamBytes::zeroed(bytes()?, name)?;
            Ok(Arc::new(PagedState::new(shared, spec, parts, bytes)))
        }
        StateKind::Recurrent { width } => {
            let bytes = StreamBytes::zeroed(bytes()?, name)?;
            Ok(Arc::new(SlotState { shared, width: *width, slots: spec.pages, bytes }))
        }
        kind => Err(DeviceError::Unsupported(format!("state '{name}' {kind:?}"))),
    }
}

/// Rows of one layer, part by part: `[rows, width of the part]`.
pub(crate) struct PagedState {
    shared: Arc<Shared>,
    format: KvFormat,
    parts: Vec<Part>,
    bytes: StreamBytes,
}

/// Where a part lies.
struct Part {
    kind: PagedPart,
    /// Numbers of the pages in which it has rows.
    pages: Range<usize>,
    /// Byte of the first of them.
    start: usize,
    page_bytes: usize,
}

impl PagedState {
    /// `bytes` is as long as the specification says, which did not overflow.
    fn new(shared: Arc<Shared>, spec: &StateSpec, parts: &[PagedPart], bytes: StreamBytes) -> PagedState {
        let mut start = 0;
        let part = |&kind: &PagedPart| {
            let page_bytes = spec.format.row_bytes(kind.width) * kind.rows(PAGE);
            let part = Part { kind, pages: spec.part_pages(&kind), start, page_bytes };
            start += page_bytes * part.pages.len();
            part
        };
        let parts = parts.iter().map(part).collect();
        PagedState { shared, format: spec.format, parts, bytes }
    }

    /// Numbers per row of a part.
    pub(crate) fn width(&self, part: usize) -> usize {
        self.parts[part].kind.width
    }

    /// Numbers of the pages in which a part has rows.
    pub(crate) fn pages(&self, part: usize) -> Range<usize> {
        self.parts[part].pages.clone()
    }

    /// The row of a part that belongs to the position in this slot of one of its pages.
    pub(crate) fn row(&self, part: usize, slot: usize) -> usize {
        let Part { kind, pages, .. } = &self.parts[part];
        kind.row(slot - pages.start * PAGE)
    }

    /// Number of parts.
    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
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
        let Part { start, page_bytes, ref pages, .. } = self.parts[part];
        let len = page_bytes * pages.len();
        // SAFETY: the range lies inside the allocation, which is aligned to 64, behind whole
        // rows, so both element types are aligned; any bits are valid numbers.
        unsafe {
            let at = self.bytes.base().add(start);
            match self.format {
                KvFormat::F32 => CacheRows::F32(std::slice::from_raw_parts(at.cast::<f32>(), len / 4)),
                KvFormat::F16 => CacheRows::F16(std::slice::from_raw_parts(at.cast::<f16>(), len / 2)),
                KvFormat::Q8_0 => CacheRows::Q8_0(std::slice::from_raw_parts(at, len)),
            }
        }
    }

    /// Where the first `rows` rows of a page lie, part by part.
    fn ranges(&self, page: u32, rows: usize) -> Result<Vec<Range<usize>>, DeviceError> {
        let index = page as usize;
        let parts: Vec<&Part> = self.parts.iter().filter(|p| p.pages.contains(&index)).collect();
        if parts.is_empty() || rows > PAGE {
            let pages = self.parts.iter().map(|p| p.pages.end).max().unwrap_or(0);
            let why = format!("{rows} rows of page {page}: there are {pages} pages of {PAGE}");
            return Err(DeviceError::Failed(why));
        }
        let range = |part: &Part| {
            let at = part.start + (index - part.pages.start) * part.page_bytes;
            at..at + part.kind.rows(rows) * self.format.row_bytes(part.kind.width)
        };
        Ok(parts.into_iter().map(range).collect())
    }

    /// The row of a part that belongs to the position in a slot, for writing, as a cache of one row.
    ///
    /// # Safety
    /// The caller runs under the stream lock, the slot is inside the cache, and nobody else uses it meanwhile.
    pub(crate) unsafe fn slot_mut(&self, part: usize, slot: usize) -> CacheRowsMut<'_> {
        let Part { kind, start, ref pages, .. } = self.parts[part];
        let (width, row) = (kind.width, self.row(part, slot));
        let bytes = self.format.row_bytes(width);
        debug_assert!(pages.contains(&(slot / PAGE)));
        // SAFETY: as in `rows`, for one row; rows are whole elements, so it is aligned.
        unsafe {
            let at = self.bytes.base().add(start + row * bytes);
            match self.format {
                KvFormat::F32 => CacheRowsMut::F32(std::slice::from_raw_parts_mut(at.cast::<f32>(), width)),
                KvFormat::F16 => CacheRowsMut::F16(std::slice::from_raw_parts_mut(at.cast::<f16>(), width)),
                KvFormat::Q8_0 => CacheRowsMut::Q8_0(std::slice::from_raw_parts_mut(at, bytes)),
            }
        }
    }
}

impl StateBuffer for PagedState {
    fn copy_page(&self, from: u32, to: u32) -> Result<(), DeviceError> {
        let (from, to) = (self.ranges(from, PAGE)?, self.ranges(to, PAGE)?);
        if from.iter().map(Range::len).ne(to.iter().map(Range::len)) {
            return Err(DeviceError::Failed("a page of a window and another one".to_string()));
        }
        let _stream = self.shared.stream();
        // SAFETY: the stream lock is held.
        let bytes = unsafe { self.bytes.exclusive() };
        from.into_iter().zip(to).for_each(|(from, to)| bytes.copy_within(from, to.start));
        Ok(())
    }

    fn read(&self, unit: u32, rows: usize) -> Result<Arc<dyn ReadBack>, DeviceError> {
        read_ranges(&self.shared, &self.bytes, &self.ranges(unit, rows)?)
    }

    fn write(&self, unit: u32, rows: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        write_ranges(&self.shared, &self.bytes, &self.ranges(unit, rows)?, bytes)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The bytes of these ranges, which lie inside the state, one after the other.
fn read_ranges(
    shared: &Shared,
    state: &StreamBytes,
    ranges: &[Range<usize>],
) -> Result<Arc<dyn ReadBack>, DeviceError> {
    let _stream = shared.stream();
    // SAFETY: the stream lock is held.
    let state = unsafe { state.exclusive() };
    let mut copy = Vec::with_capacity(ranges.iter().map(Range::len).sum());
    ranges.iter().for_each(|range| copy.extend_from_slice(&state[range.clone()]));
    Ok(Arc::new(Copied(copy)))
}

/// The other way.
fn write_ranges(
    shared: &Shared,
    state: &StreamBytes,
    ranges: &[Range<usize>],
    mut bytes: &[u8],
) -> Result<(), DeviceError> {
    let wanted: usize = ranges.iter().map(Range::len).sum();
    if bytes.len() != wanted {
        return Err(DeviceError::Failed(format!("{} bytes for {wanted} of state", bytes.len())));
    }
    let _stream = shared.stream();
    // SAFETY: the stream lock is held.
    let state = unsafe { state.exclusive() };
    for range in ranges {
        let (now, rest) = bytes.split_at(range.len());
        state[range.clone()].copy_from_slice(now);
        bytes = rest;
    }
    Ok(())
}

/// Recurrent state of one layer: f32 `[slots, width]`.
pub(crate) struct SlotState {
    shared: Arc<Shared>,
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

    /// Where a slot lies, which is one row.
    fn range(&self, slot: u32, rows: usize) -> Result<Range<usize>, DeviceError> {
        let (index, bytes) = (slot as usize, 4 * self.width);
        if index >= self.slots || rows != 1 {
            let why = format!("{rows} rows of slot {slot}: there are {} slots of one row", self.slots);
            return Err(DeviceError::Failed(why));
        }
        Ok(index * bytes..(index + 1) * bytes)
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

    fn read(&self, unit: u32, rows: usize) -> Result<Arc<dyn ReadBack>, DeviceError> {
        read_ranges(&self.shared, &self.bytes, &[self.range(unit, rows)?])
    }

    fn write(&self, unit: u32, rows: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        write_ranges(&self.shared, &self.bytes, &[self.range(unit, rows)?], bytes)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use minfer_graph::StateDecl;
    use minfer_runtime::Device;

    use super::*;
    use crate::{CpuDevice, Isa};

    fn spec(kind: StateKind, format: KvFormat) -> StateSpec {
        StateSpec {
            decl: StateDecl { name: "s".to_string(), layer: 0, kind },
            format,
            pages: 3,
            window_pages: 0,
        }
    }

    fn read(state: &dyn StateBuffer, unit: u32, rows: usize) -> Vec<u8> {
        state.read(unit, rows).unwrap().wait(Duration::ZERO).unwrap().to_vec()
    }

    /// Rows of one page go to another, in every part, and touch nothing else; so does a slot.
    #[test]
    fn units_to_the_host_and_back() {
        let device = CpuDevice::new(1, Isa::detect()).unwrap();
        for format in KvFormat::ALL {
            for (kind, whole, rows) in
                [(StateKind::paged(&[2, 5, 1]), PAGE, 7), (StateKind::Recurrent { width: 9 }, 1, 1)]
            {
                let spec = spec(kind, format);
                let state = device.open_state(&spec).unwrap();
                let len = spec.unit_bytes(0, whole).unwrap();
                assert_eq!(len * spec.pages, spec.bytes().unwrap());
                let fill =
                    |unit: u32| (0..len).map(|i| (i * 31 + unit as usize * 7) as u8).collect::<Vec<_>>();
                (0..3).for_each(|unit| state.write(unit, whole, &fill(unit)).unwrap());
                let part = read(&*state, 0, rows);
                assert_eq!(part.len(), spec.unit_bytes(0, rows).unwrap());
                state.write(2, rows, &part).unwrap();
                assert_eq!(read(&*state, 2, rows), part);
                assert_eq!((read(&*state, 0, whole), read(&*state, 1, whole)), (fill(0), fill(1)));
                let changed = read(&*state, 2, whole).iter().zip(fill(2)).filter(|(a, b)| **a != *b).count();
                assert!(changed > 0 && changed <= part.len(), "the other rows of the page stay");
            }
        }
    }

    #[test]
    fn units_outside_are_refused() {
        let device = CpuDevice::new(1, Isa::detect()).unwrap();
        let paged = device.open_state(&spec(StateKind::paged(&[4]), KvFormat::F16)).unwrap();
        let slots = device.open_state(&spec(StateKind::Recurrent { width: 4 }, KvFormat::F16)).unwrap();
        for (state, unit, rows) in [(&paged, 3, 1), (&paged, 0, PAGE + 1), (&slots, 3, 1), (&slots, 0, 2)] {
            let error = state.read(unit, rows).map(|_| ()).unwrap_err();
            assert_eq!(state.write(unit, rows, &[0; 8]).unwrap_err(), error);
            assert!(error.to_string().starts_with(&format!("{rows} rows of ")), "{error}");
        }
        let error = slots.write(0, 1, &[0; 12]).unwrap_err().to_string();
        assert_eq!(error, "12 bytes for 16 of state");
    }
}

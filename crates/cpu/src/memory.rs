//! Arenas and states of the CPU device. Their bytes are touched only by the holder of the stream lock and
//! by the pool's workers during a run that the holder started.

use std::any::Any;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;

use half::f16;
use minfer_graph::StateKind;
use minfer_runtime::{Arena, DeviceError, KvFormat, ReadBack, Region, StateBuffer, StateSpec, WaitError};

use crate::attention::{CacheRows, CacheRowsMut, KvView};
use crate::device::{Shared, out_of_memory};
use crate::pack::AlignedBytes;

/// Bytes that programs write through raw pointers while the stream lock is held.
struct StreamBytes(UnsafeCell<AlignedBytes>);

// SAFETY: every access holds the device's stream lock (see the module's text), and workers of one run
// write disjoint parts or are separated by barriers.
unsafe impl Sync for StreamBytes {}

impl StreamBytes {
    fn zeroed(len: usize, what: &str) -> Result<StreamBytes, DeviceError> {
        let bytes = AlignedBytes::zeroed(len).ok_or_else(|| out_of_memory(len, what))?;
        Ok(StreamBytes(UnsafeCell::new(bytes)))
    }

    /// # Safety
    /// The caller holds the stream lock and no program runs.
    #[allow(clippy::mut_from_ref)]
    unsafe fn exclusive(&self) -> &mut [u8] {
        // SAFETY: by the caller's promise nobody else looks at the bytes.
        unsafe { (*self.0.get()).as_mut_slice() }
    }

    fn base(&self) -> *mut u8 {
        // SAFETY: only the address is taken; the allocation never moves.
        unsafe { (*self.0.get()).as_mut_slice().as_mut_ptr() }
    }
}

/// Scratch memory.
pub(crate) struct CpuArena {
    shared: Arc<Shared>,
    len: usize,
    bytes: StreamBytes,
}

impl CpuArena {
    pub(crate) fn new(shared: Arc<Shared>, len: usize) -> Result<CpuArena, DeviceError> {
        Ok(CpuArena { shared, len, bytes: StreamBytes::zeroed(len, "workspace")? })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.bytes.base()
    }

    fn check(&self, offset: usize, len: usize) -> Result<(), DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(DeviceError::Failed(format!(
                "{len} bytes at {offset} are outside of an arena of {} bytes",
                self.len
            ))),
        }
    }
}

impl Arena for CpuArena {
    fn bytes(&self) -> usize {
        self.len
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len())?;
        let _stream = self.shared.stream();
        // SAFETY: the stream lock is held.
        let arena = unsafe { self.bytes.exclusive() };
        arena[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, region: Region) -> Result<Arc<dyn ReadBack>, DeviceError> {
        self.check(region.offset, region.bytes)?;
        let _stream = self.shared.stream();
        // SAFETY: the stream lock is held.
        let bytes = unsafe { self.bytes.exclusive() }[region.offset..][..region.bytes].to_vec();
        Ok(Arc::new(Copied(bytes)))
    }

    fn receive(
        &self,
        offset: usize,
        len: usize,
        source: Arc<dyn ReadBack>,
        timeout: Duration,
    ) -> Result<(), WaitError> {
        let bytes = source.wait(timeout)?;
        let short = || DeviceError::Failed(format!("{len} bytes were expected, {} came", bytes.len()));
        Ok(self.write(offset, bytes.get(..len).ok_or_else(short)?)?)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Bytes that were there at once.
struct Copied(Vec<u8>);

impl ReadBack for Copied {
    fn wait(&self, _timeout: Duration) -> Result<&[u8], WaitError> {
        Ok(&self.0)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Keys and values of one layer: `[slots, k width]`, then `[slots, v width]`.
pub(crate) struct CpuState {
    shared: Arc<Shared>,
    format: KvFormat,
    /// Bytes of one page of K and of V.
    page_bytes: [usize; 2],
    pages: usize,
    /// Numbers per slot of K and V.
    pub(crate) widths: [usize; 2],
    bytes: StreamBytes,
}

impl CpuState {
    pub(crate) fn new(shared: Arc<Shared>, spec: &StateSpec) -> Result<CpuState, DeviceError> {
        let unsupported =
            || DeviceError::Unsupported(format!("state '{}' {:?}", spec.decl.name, spec.decl.kind));
        let widths = match &spec.decl.kind {
            StateKind::Paged { widths } => <[usize; 2]>::try_from(&widths[..]).map_err(|_| unsupported())?,
            _ => return Err(unsupported()),
        };
        let too_large = || out_of_memory(usize::MAX, &spec.decl.name);
        let page_bytes = [0, 1].map(|part| spec.part_page_bytes(part));
        let [Some(k), Some(v)] = page_bytes else { return Err(too_large()) };
        let bytes = spec.bytes().ok_or_else(too_large)?;
        let bytes = StreamBytes::zeroed(bytes, &spec.decl.name)?;
        Ok(CpuState { shared, format: spec.format, page_bytes: [k, v], pages: spec.pages, widths, bytes })
    }

    /// Byte range of a part.
    fn part(&self, part: usize) -> (usize, usize) {
        let k = self.page_bytes[0] * self.pages;
        if part == 0 { (0, k) } else { (k, self.page_bytes[1] * self.pages) }
    }

    /// The cache for reading.
    ///
    /// # Safety
    /// The caller runs under the stream lock, and nobody writes the slots that it reads meanwhile.
    pub(crate) unsafe fn view(&self) -> KvView<'_> {
        // SAFETY: by the caller's promise.
        let [k, v] = [0, 1].map(|part| unsafe { self.rows(part) });
        KvView { k, v }
    }

    /// # Safety
    /// As [`CpuState::view`].
    unsafe fn rows(&self, part: usize) -> CacheRows<'_> {
        let (start, len) = self.part(part);
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
        let (width, (start, len)) = (self.widths[part], self.part(part));
        let bytes = self.format.row_bytes(width);
        debug_assert!((slot + 1) * bytes <= len);
        // SAFETY: as in `rows`, for one row; rows are whole elements, so it is aligned.
        unsafe {
            let at = self.bytes.base().add(start + slot * bytes);
            match self.format {
                KvFormat::F32 => CacheRowsMut::F32(std::slice::from_raw_parts_mut(at.cast::<f32>(), width)),
                KvFormat::F16 => CacheRowsMut::F16(std::slice::from_raw_parts_mut(at.cast::<f16>(), width)),
            }
        }
    }

    /// Slots of the cache.
    pub(crate) fn slots(&self) -> usize {
        self.pages * minfer_graph::PAGE
    }
}

impl StateBuffer for CpuState {
    fn copy_page(&self, from: u32, to: u32) -> Result<(), DeviceError> {
        let (from, to) = (from as usize, to as usize);
        if from.max(to) >= self.pages {
            return Err(DeviceError::Failed(format!("page {} of {}", from.max(to), self.pages)));
        }
        let _stream = self.shared.stream();
        // SAFETY: the stream lock is held.
        let bytes = unsafe { self.bytes.exclusive() };
        for (part, size) in self.page_bytes.into_iter().enumerate() {
            let start = self.part(part).0;
            bytes.copy_within(start + from * size..start + (from + 1) * size, start + to * size);
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! Arenas of the CPU device, and the bytes that they share with states (`state`). The bytes are touched only
//! by the holder of the stream lock and by the pool's workers during a run that the holder started.

use std::any::Any;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;

use minfer_format::bytes::AlignedBuf;
use minfer_runtime::{Arena, DeviceError, ReadBack, Region, WaitError};

use crate::device::{Shared, out_of_memory};
use crate::pack::AlignedBytes;

/// From this size on, memory is in huge pages: attention at depth reads it from end to end for every token. Smaller
/// states would take more than they hold.
const HUGE_FROM: usize = 8 << 20;

/// Bytes that programs write through raw pointers while the stream lock is held.
pub(crate) struct StreamBytes(UnsafeCell<AlignedBytes>);

// SAFETY: every access holds the device's stream lock (see the module's text), and workers of one run
// write disjoint parts or are separated by barriers.
unsafe impl Sync for StreamBytes {}

impl StreamBytes {
    pub(crate) fn zeroed(len: usize, what: &str) -> Result<StreamBytes, DeviceError> {
        // At least one byte, so that the base is an aligned address even of nothing.
        let memory = AlignedBuf::try_zeroed(len.max(1)).ok_or_else(|| out_of_memory(len, what))?;
        if len >= HUGE_FROM {
            memory.prefer_huge_pages();
        }
        Ok(StreamBytes(UnsafeCell::new(AlignedBytes::new(memory))))
    }

    /// # Safety
    /// The caller holds the stream lock and no program runs.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn exclusive(&self) -> &mut [u8] {
        // SAFETY: by the caller's promise nobody else looks at the bytes.
        unsafe { (*self.0.get()).as_mut_slice() }
    }

    pub(crate) fn base(&self) -> *mut u8 {
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
pub(crate) struct Copied(pub(crate) Vec<u8>);

impl ReadBack for Copied {
    fn wait(&self, _timeout: Duration) -> Result<&[u8], WaitError> {
        Ok(&self.0)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! Memory with the alignment that wide loads like.

use std::ptr::NonNull;
use std::sync::Arc;

use minfer_format::bytes::AlignedBuf;

/// A cache line.
const ALIGN: usize = 64;

/// A fixed number of bytes, aligned to 64, zero at first. Several may lie in one region of memory, which goes when
/// the last of them does.
#[derive(Debug)]
pub struct AlignedBytes {
    data: NonNull<u8>,
    len: usize,
    /// Keeps the memory.
    _region: Arc<Region>,
}

// SAFETY: it owns its bytes like a `Box<[u8]>`; the region is only there to be freed.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// Allocates `len` zero bytes; `None` when memory is refused.
    pub fn zeroed(len: usize) -> Option<AlignedBytes> {
        Some(AlignedBytes::new(AlignedBuf::try_zeroed(len)?))
    }

    /// All of this memory.
    pub(crate) fn new(memory: AlignedBuf) -> AlignedBytes {
        let region = Arc::new(Region::new(memory));
        AlignedBytes { data: region.base, len: region.len, _region: region }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `data` is valid for `len` initialised bytes of the region, which nobody else has.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

/// Memory that [`AlignedBytes`] are parts of. Nobody looks at it as a whole.
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    _memory: AlignedBuf,
}

// SAFETY: the pointer is to memory that the region owns and does not use itself.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

impl Region {
    pub(crate) fn new(mut memory: AlignedBuf) -> Region {
        let bytes = &mut memory[..];
        let (base, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        Region { base, len, _memory: memory }
    }

    /// Bytes `at..at + len`, if they lie inside; `at` is a multiple of 64.
    ///
    /// # Safety
    /// Nobody else has any of them.
    pub(crate) unsafe fn part(self: &Arc<Self>, at: usize, len: usize) -> Option<AlignedBytes> {
        debug_assert!(at.is_multiple_of(ALIGN));
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return None;
        }
        // SAFETY: the range lies inside the region.
        let data = unsafe { self.base.add(at) };
        Some(AlignedBytes { data, len, _region: self.clone() })
    }
}

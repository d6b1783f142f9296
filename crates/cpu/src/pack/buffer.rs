//! Memory with the alignment that wide loads like.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// A cache line.
const ALIGN: usize = 64;

/// A fixed number of bytes, aligned to 64, zero at first.
#[derive(Debug)]
pub struct AlignedBytes {
    data: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its bytes like a `Box<[u8]>`.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// Allocates `len` zero bytes; `None` when memory is refused.
    pub fn zeroed(len: usize) -> Option<AlignedBytes> {
        let layout = Layout::from_size_align(len, ALIGN).ok()?;
        if len == 0 {
            return Some(AlignedBytes { data: NonNull::dangling(), len });
        }
        // SAFETY: the layout is not of size zero.
        let data = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(AlignedBytes { data, len })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `data` is valid for `len` initialised bytes (dangling only when `len` is 0).
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if let (1.., Ok(layout)) = (self.len, Layout::from_size_align(self.len, ALIGN)) {
            // SAFETY: allocated in `zeroed` with this very layout.
            unsafe { dealloc(self.data.as_ptr(), layout) }
        }
    }
}

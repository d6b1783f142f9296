//! Memory of this process for tensors: aligned, zero at first, and where it is large, pages of its own.

use std::fs;
use std::io;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};
use memmap2::{MmapMut, MmapOptions};

/// From here on a buffer has pages of its own: pages that are never written take no memory, and they go back to the
/// system as soon as the buffer does.
const PAGES_FROM: usize = 1 << 20;

/// One cache line, which gives [`AlignedBuf`] its alignment.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory of this process that starts at a multiple of 64 bytes; fill it, then share it as
/// [`TensorBytes`](super::TensorBytes).
pub struct AlignedBuf {
    memory: Memory,
    len: usize,
}

enum Memory {
    Lines(Vec<Line>),
    Pages(MmapMut),
}

impl AlignedBuf {
    /// `len` zero bytes. Ends the process when memory is refused; see [`AlignedBuf::try_zeroed`].
    pub fn zeroed(len: usize) -> AlignedBuf {
        let lines = || Memory::Lines(bytemuck::zeroed_vec(len.div_ceil(64)));
        AlignedBuf::try_zeroed(len).unwrap_or_else(|| AlignedBuf { memory: lines(), len })
    }

    /// `len` zero bytes; `None` when memory is refused. Pages of large buffers that are never written cost nothing.
    pub fn try_zeroed(len: usize) -> Option<AlignedBuf> {
        if len >= PAGES_FROM {
            return AlignedBuf::pages(len);
        }
        let lines = bytemuck::try_zeroed_vec(len.div_ceil(64)).ok()?;
        Some(AlignedBuf { memory: Memory::Lines(lines), len })
    }

    /// The same in pages of its own whatever the size, which can be locked.
    pub fn pages(len: usize) -> Option<AlignedBuf> {
        let pages = MmapOptions::new().len(len).map_anon().ok()?;
        Some(AlignedBuf { memory: Memory::Pages(pages), len })
    }

    /// Asks for huge pages, of which an address translation covers 2 MiB: for memory that is read from end to end
    /// again and again. They come when it is first written. A system without them goes on with small ones.
    pub fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if let Memory::Pages(pages) = &self.memory {
            // A refusal changes no results, and there is nothing that a user could do about it.
            let _ = pages.advise(memmap2::Advice::HugePage);
        }
    }

    /// Keeps the pages in memory; they all take it from now on.
    ///
    /// # Errors
    /// What the system says, with the limit that it has; and for a buffer without pages of its own.
    pub fn lock(&self) -> io::Result<()> {
        match &self.memory {
            #[cfg(unix)]
            Memory::Pages(pages) => pages.lock().map_err(|e| refused_lock(self.len, &e)),
            _ => Err(io::Error::other("this memory cannot be locked")),
        }
    }
}

/// Why `len` bytes could not be locked, and what to do.
pub(super) fn refused_lock(len: usize, error: &io::Error) -> io::Error {
    let limit = fs::read_to_string("/proc/self/limits").ok().and_then(|limits| memlock_limit(&limits));
    let limit = match limit {
        Some(limit) => format!("RLIMIT_MEMLOCK allows this process {limit}"),
        None => "RLIMIT_MEMLOCK may be too small".to_string(),
    };
    io::Error::new(
        error.kind(),
        format!(
            "cannot lock {len} bytes of weights in memory ({error}): {limit}; raise it ('ulimit -l unlimited' as root, \
             memlock in /etc/security/limits.conf, LimitMEMLOCK= of a service) or leave out --mlock"
        ),
    )
}

/// The soft limit in a text like `/proc/self/limits`, as `8388608 bytes` or `unlimited`.
fn memlock_limit(limits: &str) -> Option<String> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some("an unlimited amount".to_string()),
        bytes => Some(format!("{bytes} bytes")),
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Memory::Lines(lines) => &bytemuck::cast_slice(lines)[..self.len],
            Memory::Pages(pages) => pages,
        }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Lines(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len],
            Memory::Pages(pages) => pages,
        }
    }
}

impl From<&[u8]> for AlignedBuf {
    fn from(bytes: &[u8]) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_are_aligned_zero_and_as_long_as_asked() {
        for len in [0, 1, 100, PAGES_FROM - 1, PAGES_FROM, PAGES_FROM + 1] {
            let mut buf = AlignedBuf::try_zeroed(len).unwrap();
            assert_eq!(buf.len(), len);
            assert!(buf.as_ptr().addr().is_multiple_of(64) && buf.iter().all(|&b| b == 0));
            buf.prefer_huge_pages();
            buf.fill(7);
            assert!(buf.iter().all(|&b| b == 7));
        }
        assert!(AlignedBuf::try_zeroed(isize::MAX as usize / 2).is_none());
    }

    #[test]
    fn limits_are_read() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max locked memory         8388608              8388608              bytes     \n";
        assert_eq!(memlock_limit(text).as_deref(), Some("8388608 bytes"));
        assert_eq!(memlock_limit(&text.replace("8388608", "unlimited")).unwrap(), "an unlimited amount");
        assert_eq!(memlock_limit("Max open files 1 1 files\n"), None);
    }
}

//! Bytes of files and tensors that are shared without copying.
//!
//! A [`TensorBytes`] is a range of a mapped file, of memory that this process filled, or of the binary
//! itself. Cloning and slicing share the storage; the last one frees it. The only `unsafe` line of this
//! crate, the memory map, is here.

use std::fmt;
use std::fs::{self, File};
use std::ops::{Deref, DerefMut, Range};
use std::path::Path;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use memmap2::Mmap;

use crate::error::Error;

/// A shared, read-only range of bytes: a whole file or one tensor.
///
/// Tensors of GGUF files start at a multiple of the file's alignment (32 bytes unless it says
/// otherwise), those of safetensors files and of embedded files at any address: cast with
/// `bytemuck::try_cast_slice`, or ask for [`TensorBytes::aligned`] first.
#[derive(Clone)]
pub struct TensorBytes {
    storage: Storage,
    range: Range<usize>,
}

#[derive(Clone)]
enum Storage {
    Mapped(Arc<Mmap>),
    Owned(Arc<AlignedBuf>),
    Static(&'static [u8]),
}

impl TensorBytes {
    /// Maps a file. Refuses what is not a regular file (a pipe would block, a device never ends) and
    /// what is empty.
    ///
    /// The file must not be changed while it is in use: the operating system would show the change, and
    /// ends the process when a mapped page no longer exists.
    pub fn map(path: &Path) -> Result<TensorBytes, Error> {
        let file = open_regular(path)?;
        // SAFETY: the map is read-only, and every value that is read from it is plain bytes, valid
        // whatever they are. Another process that changes the file is outside what any mapping can
        // defend against (documented above).
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
        Ok(TensorBytes { range: 0..map.len(), storage: Storage::Mapped(Arc::new(map)) })
    }

    /// A part of these bytes; `None` when the range does not lie inside them.
    pub fn slice(&self, range: Range<usize>) -> Option<TensorBytes> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(TensorBytes { storage: self.storage.clone(), range: start..start + range.len() })
    }

    /// These bytes at an address that is a multiple of `align` (a power of two up to 64): themselves
    /// where that already holds, else a copy.
    pub fn aligned(&self, align: usize) -> TensorBytes {
        if self.as_ptr().addr().is_multiple_of(align.max(1)) {
            self.clone()
        } else {
            AlignedBuf::from(&**self).into()
        }
    }

    /// Whether these bytes lie in a mapped file or in the binary: the operating system may drop and
    /// reread their pages.
    pub fn is_mapped(&self) -> bool {
        !matches!(self.storage, Storage::Owned(_))
    }
}

fn open_regular(path: &Path) -> Result<File, Error> {
    let meta = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if !meta.is_file() {
        let found = if meta.is_dir() { "a directory" } else { "a pipe or device" };
        return Err(Error::NotAFile { file: path.to_owned(), found });
    }
    if meta.len() == 0 {
        return Err(Error::Empty { file: path.to_owned() });
    }
    File::open(path).map_err(|e| Error::io(path, e))
}

impl Deref for TensorBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let whole: &[u8] = match &self.storage {
            Storage::Mapped(map) => map,
            Storage::Owned(buf) => buf,
            Storage::Static(bytes) => bytes,
        };
        &whole[self.range.clone()]
    }
}

impl fmt::Debug for TensorBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.storage {
            Storage::Mapped(_) => "mapped",
            Storage::Owned(_) => "owned",
            Storage::Static(_) => "static",
        };
        write!(f, "TensorBytes({kind}, {} bytes)", self.len())
    }
}

impl From<&'static [u8]> for TensorBytes {
    fn from(bytes: &'static [u8]) -> TensorBytes {
        TensorBytes { range: 0..bytes.len(), storage: Storage::Static(bytes) }
    }
}

impl From<AlignedBuf> for TensorBytes {
    fn from(buf: AlignedBuf) -> TensorBytes {
        TensorBytes { range: 0..buf.len(), storage: Storage::Owned(Arc::new(buf)) }
    }
}

/// One cache line, which gives [`AlignedBuf`] its alignment.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory of this process that starts at a multiple of 64 bytes; fill it, then share it as
/// [`TensorBytes`].
pub struct AlignedBuf {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBuf {
    /// `len` zero bytes (pages that are never written cost nothing on most systems).
    pub fn zeroed(len: usize) -> AlignedBuf {
        AlignedBuf { lines: bytemuck::zeroed_vec(len.div_ceil(64)), len }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
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
    fn slices_share_and_stay_inside() {
        let bytes = TensorBytes::from(AlignedBuf::from(&[1u8, 2, 3, 4, 5][..]));
        let tail = bytes.slice(2..5).unwrap();
        assert_eq!(&*tail, [3, 4, 5]);
        assert_eq!(tail.as_ptr(), bytes[2..].as_ptr());
        assert_eq!(&*tail.slice(1..2).unwrap(), [4]);
        assert!(tail.slice(1..4).is_none(), "the end of the storage is not the end of the slice");
        assert!(bytes.slice(6..6).is_none());
    }

    #[test]
    fn aligned_copies_only_when_it_must() {
        let bytes = TensorBytes::from(AlignedBuf::from(&[7u8; 100][..]));
        assert_eq!(bytes.aligned(64).as_ptr(), bytes.as_ptr());
        let odd = bytes.slice(1..99).unwrap();
        let copy = odd.aligned(4);
        assert_ne!(copy.as_ptr(), odd.as_ptr());
        assert!(copy.as_ptr().addr().is_multiple_of(64));
        assert_eq!(&*copy, &*odd);
    }
}

//! Bytes of files and tensors that are shared without copying.
//!
//! A [`TensorBytes`] is a range of a mapped file, of memory that this process filled, or of the binary
//! itself. Cloning and slicing share the storage; the last one frees it. The only `unsafe` lines of this
//! crate, memory maps, are here; `owned` has the memory of this process.

mod owned;

use std::borrow::Cow;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::{Mmap, MmapOptions};

use crate::error::Error;

pub use owned::AlignedBuf;

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

/// How the bytes of weights come out of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reading {
    /// Pages of the mapped file, which the system reads when they are touched.
    #[default]
    Mapped,
    /// Plain reads into memory of this process.
    Plain,
}

#[derive(Clone)]
enum Storage {
    Mapped(Arc<MappedFile>),
    Owned(Arc<AlignedBuf>),
    Static(&'static [u8]),
}

/// A part of a file, mapped; the file stays open for plain reads.
struct MappedFile {
    map: Mmap,
    /// Where the map begins in the file.
    start: u64,
    file: File,
    path: PathBuf,
    /// Its pages are in memory for good.
    locked: bool,
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
        let range = 0..map.len();
        let mapped = MappedFile { map, start: 0, file, path: path.to_owned(), locked: false };
        Ok(TensorBytes { range, storage: Storage::Mapped(Arc::new(mapped)) })
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

    /// A copy of bytes of a mapped file, made by plain reads into memory of this process; other bytes are themselves.
    /// `tensor` is their name in messages.
    ///
    /// # Errors
    /// The file has become shorter, or cannot be read.
    pub fn read(&self, tensor: &str) -> Result<TensorBytes, Error> {
        let Storage::Mapped(mapped) = &self.storage else { return Ok(self.clone()) };
        let mut buf = AlignedBuf::zeroed(self.range.len());
        let at = mapped.start + self.range.start as u64;
        read_at(&mapped.file, at, &mut buf).map_err(|source| {
            let (file, tensor) = (mapped.path.clone(), crate::error::shown(tensor));
            match source.kind() {
                io::ErrorKind::UnexpectedEof => {
                    Error::ShortRead { file, tensor, bytes: self.len() as u64, at }
                }
                _ => Error::TensorRead { file, tensor, source },
            }
        })?;
        Ok(buf.into())
    }

    /// Some of these bytes, `None` outside of them. From a mapped file they are read: touching a page maps those around
    /// it too, which for a few rows of a large table is many times what is wanted.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn fetch(&self, range: Range<usize>) -> io::Result<Option<Cow<'_, [u8]>>> {
        let Some(borrowed) = self.get(range.clone()) else { return Ok(None) };
        match &self.storage {
            Storage::Mapped(mapped) if !mapped.locked => {
                let mut copy = vec![0; range.len()];
                let at = mapped.start + (self.range.start + range.start) as u64;
                read_at(&mapped.file, at, &mut copy)?;
                Ok(Some(Cow::Owned(copy)))
            }
            _ => Ok(Some(Cow::Borrowed(borrowed))),
        }
    }

    /// These bytes in memory that is locked: where they lie in a mapped file, its pages; else a copy.
    ///
    /// # Errors
    /// The system refuses, mostly because of a limit, which the error names.
    pub fn locked(&self) -> io::Result<TensorBytes> {
        match &self.storage {
            #[cfg(unix)]
            Storage::Mapped(whole) => {
                let (start, len) = (whole.start + self.range.start as u64, self.range.len());
                let file = whole.file.try_clone()?;
                // SAFETY: as in `map`: read-only plain bytes.
                let map = unsafe { MmapOptions::new().offset(start).len(len).map(&file) }?;
                map.lock().map_err(|e| owned::refused_lock(len, &e))?;
                let mapped = MappedFile { map, start, file, path: whole.path.clone(), locked: true };
                Ok(TensorBytes { range: 0..len, storage: Storage::Mapped(Arc::new(mapped)) })
            }
            _ => {
                let no_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
                let mut copy = AlignedBuf::pages(self.len()).ok_or_else(no_memory)?;
                copy.lock()?;
                copy.copy_from_slice(self);
                Ok(copy.into())
            }
        }
    }

    /// Says that these bytes will be read soon, so that the system reads ahead. A hint: no error matters.
    pub fn will_need(&self) {
        #[cfg(unix)]
        if let Storage::Mapped(mapped) = &self.storage {
            let _ = mapped.map.advise_range(memmap2::Advice::WillNeed, self.range.start, self.range.len());
        }
    }

    /// Says that these bytes will not be read for a while: pages of a mapped file no longer count as memory of this
    /// process, those at the edges with what they share them with. Reading them again is correct and brings them
    /// back. A hint: no error matters.
    pub fn release(&self) {
        #[cfg(unix)]
        if let Storage::Mapped(mapped) = &self.storage {
            // SAFETY: the map is shared, read-only and of a file, so dropped pages come back with the same bytes.
            let _ = unsafe {
                let dropped = memmap2::UncheckedAdvice::DontNeed;
                mapped.map.unchecked_advise_range(dropped, self.range.start, self.range.len())
            };
        }
    }
}

/// Fills `buf` from byte `at` of a file.
#[cfg(unix)]
fn read_at(file: &File, at: u64, buf: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buf, at)
}

#[cfg(windows)]
fn read_at(file: &File, mut at: u64, mut buf: &mut [u8]) -> io::Result<()> {
    while !buf.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buf, at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => (at, buf) = (at + n as u64, &mut buf[n..]),
        }
    }
    Ok(())
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
            Storage::Mapped(mapped) => &mapped.map,
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

//! Snapshots as files, little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | magic `MINFSESS` |
//! | 4, 4, 8 | version, bytes of the header, bytes of the file |
//! | header | see [`header`] |
//! | payload | [`Snapshot`]'s |
//! | 16 | XXH3-128 of all before |
//!
//! A file is read whole and its checksum compared before anything in it is believed; then every length is
//! checked against what is there, so that memory is bounded by the file's size also for a file that lies.

mod header;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::error::{EngineError, SessionError};
use crate::snapshot::Snapshot;
use header::{Fields, check, decode, encode};

const MAGIC: [u8; 8] = *b"MINFSESS";
const VERSION: u32 = 1;
/// Bytes before the header, and behind the payload.
const PREFIX: usize = 24;
const CHECKSUM: usize = 16;
/// Bytes that are hashed and written at a time: they stay in the cache between the two.
const CHUNK: usize = 1 << 18;

impl Snapshot {
    /// Writes the snapshot to a file that only its owner may read, in the place of what is there: a reader finds
    /// the old file or the new one, and after an error the old one is still there.
    ///
    /// # Errors
    /// [`SessionError::Io`], with the file and the reason.
    pub fn save(&self, path: &Path) -> Result<(), EngineError> {
        let failed = |source| SessionError::Io { doing: "writing", file: path.to_owned(), source };
        Ok(replace(path, &mut |out| self.write(out)).map_err(failed)?)
    }

    /// Reads a file that [`Snapshot::save`] wrote, and verifies it whole.
    ///
    /// # Errors
    /// [`SessionError`] says what is wrong with which file: it is missing or no session, of another version,
    /// truncated or damaged.
    pub fn open(path: &Path) -> Result<Snapshot, EngineError> {
        let (header, payload) = read(path)?;
        let damaged = |why: String| SessionError::Damaged { file: path.to_owned(), why };
        let early = "its header ends early or has impossible values".to_string();
        let mut snapshot = decode(&header).ok_or_else(|| damaged(early))?;
        check(&snapshot, payload.len()).map_err(damaged)?;
        snapshot.payload = payload;
        snapshot.name = format!("the session file {}", path.display());
        Ok(snapshot)
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let header = encode(self);
        let len = u32::try_from(header.len()).map_err(|_| io::Error::other("the sequence is too long"))?;
        let total = (PREFIX + header.len() + self.payload.len() + CHECKSUM) as u64;
        let mut prefix = MAGIC.to_vec();
        prefix.extend(VERSION.to_le_bytes());
        prefix.extend(len.to_le_bytes());
        prefix.extend(total.to_le_bytes());
        let mut hash = Xxh3::new();
        for part in [&prefix, &header, &self.payload] {
            for chunk in part.chunks(CHUNK) {
                hash.update(chunk);
                out.write_all(chunk)?;
            }
        }
        out.write_all(&hash.digest128().to_le_bytes())
    }
}

/// Writes a temporary file beside `path`, makes it durable, and renames it over `path`. After an error the
/// temporary file is gone; a failure of the last step, making the name durable, leaves the new file in place.
fn replace(path: &Path, write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new().prefix(".minfer-session-").tempfile_in(folder)?;
    write(file.as_file_mut())?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    // Elsewhere a folder cannot be opened as a file.
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// Lengths of the parts of a file.
struct Lengths {
    header: u64,
    payload: u64,
}

/// Header and payload of a file whose length and checksum are right.
fn read(path: &Path) -> Result<(Vec<u8>, Vec<u8>), SessionError> {
    let failed = |source| SessionError::Io { doing: "reading", file: path.to_owned(), source };
    let not = |found| SessionError::NotASession { file: path.to_owned(), found };
    // Asked before opening, which would block on a pipe.
    let meta = fs::metadata(path).map_err(failed)?;
    match meta.len() {
        _ if meta.is_dir() => return Err(not("a directory")),
        _ if !meta.is_file() => return Err(not("a pipe or device")),
        0 => return Err(not("empty (0 bytes)")),
        _ => {}
    }
    let mut file = File::open(path).map_err(failed)?;
    let mut prefix = Vec::new();
    (&mut file).take(PREFIX as u64).read_to_end(&mut prefix).map_err(failed)?;
    let lengths = lengths(path, &prefix, meta.len())?;
    let mut hash = Xxh3::new();
    hash.update(&prefix);
    let mut part = |bytes: u64| {
        let mut part = room(path, bytes)?;
        for chunk in part.chunks_mut(CHUNK) {
            file.read_exact(chunk).map_err(failed)?;
            hash.update(chunk);
        }
        Ok(part)
    };
    let (header, payload) = (part(lengths.header)?, part(lengths.payload)?);
    let mut checksum = [0; CHECKSUM];
    file.read_exact(&mut checksum).map_err(failed)?;
    if hash.digest128().to_le_bytes() == checksum {
        return Ok((header, payload));
    }
    Err(SessionError::Damaged { file: path.to_owned(), why: "its checksum does not match".to_string() })
}

/// What the first bytes of a file of `len` bytes say, if they agree with its length.
fn lengths(path: &Path, prefix: &[u8], len: u64) -> Result<Lengths, SessionError> {
    let file = path.to_owned();
    let Some(fields) = prefix.strip_prefix(&MAGIC) else {
        return Err(SessionError::NotASession { file, found: "something else" });
    };
    let mut fields = Fields(fields);
    let (Some(version), Some(header), Some(expected)) = (fields.u32(), fields.u32(), fields.u64()) else {
        return Err(SessionError::Truncated { file, found: len, expected: (PREFIX + CHECKSUM) as u64 });
    };
    if version != VERSION {
        return Err(SessionError::Version { file, found: version, known: VERSION });
    }
    if len < expected {
        return Err(SessionError::Truncated { file, found: len, expected });
    }
    let (rest, header) = (expected.checked_sub((PREFIX + CHECKSUM) as u64), u64::from(header));
    match rest.and_then(|rest| rest.checked_sub(header)).filter(|_| len == expected) {
        Some(payload) => Ok(Lengths { header, payload }),
        None => Err(SessionError::Damaged { file, why: "its lengths do not agree".to_string() }),
    }
}

/// Zeros for `bytes` bytes of a file, which has as many.
fn room(path: &Path, bytes: u64) -> Result<Vec<u8>, SessionError> {
    let mut room = Vec::new();
    match usize::try_from(bytes).ok().filter(|&bytes| room.try_reserve_exact(bytes).is_ok()) {
        Some(bytes) => room.resize(bytes, 0),
        None => {
            let session = format!("the session file {}", path.display());
            return Err(SessionError::OutOfMemory { session, bytes });
        }
    }
    Ok(room)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use minfer_graph::{StateDecl, StateKind};
    use minfer_model::Fingerprint;
    use minfer_runtime::{DeviceKind, KvFormat, StateSpec};

    use super::*;
    use crate::snapshot::{Held, Origin};

    fn snapshot() -> Snapshot {
        snapshot_in(KvFormat::F16)
    }

    /// A sequence of 70 tokens, its second page begun, with two checkpoints before its current state.
    fn snapshot_in(format: KvFormat) -> Snapshot {
        let state = |name: &str, kind, draft| Held {
            draft,
            device: DeviceKind::Cpu,
            spec: StateSpec {
                decl: StateDecl { name: name.to_string(), layer: 3, kind },
                format,
                pages: 0,
                window_pages: 0,
            },
        };
        let states = vec![
            state("kv", StateKind::paged(&[3, 2]), false),
            state("rows", StateKind::Recurrent { width: 5 }, false),
            state("head", StateKind::paged(&[1]), true),
        ];
        let origin = Origin {
            arch: "qwen3".to_string(),
            fingerprint: Fingerprint([7; 16]),
            kv_format: format,
            states,
        };
        let mut s = Snapshot::new(Arc::new(origin), (0..70).collect(), vec![16, 64]).unwrap();
        let bytes = 70 * [3, 2, 1].map(|w| format.row_bytes(w)).iter().sum::<usize>() + 3 * 5 * 4;
        s.payload = (0..bytes).map(|i| (i * i / 7) as u8).collect();
        assert_eq!(s.pieces().last().unwrap().bytes.end, bytes, "the pieces are the payload");
        s
    }

    fn bytes(snapshot: &Snapshot) -> Vec<u8> {
        let mut out = Vec::new();
        snapshot.write(&mut out).unwrap();
        out
    }

    /// What [`Snapshot::open`] says about a file of these bytes.
    fn opened(bytes: &[u8]) -> Result<Snapshot, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        fs::write(&path, bytes).unwrap();
        Snapshot::open(&path).map_err(|e| {
            let text = e.to_string();
            assert!(text.contains(path.to_str().unwrap()), "names the file: {text}");
            text.replace(path.to_str().unwrap(), "FILE")
        })
    }

    /// The same file with a header and lengths that agree with each other and a checksum that is right.
    fn forged(header: &[u8], payload: &[u8]) -> Vec<u8> {
        let total = (PREFIX + header.len() + payload.len() + CHECKSUM) as u64;
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((header.len() as u32).to_le_bytes());
        out.extend(total.to_le_bytes());
        out.extend([header, payload].concat());
        sealed(out)
    }

    fn sealed(mut out: Vec<u8>) -> Vec<u8> {
        let mut hash = Xxh3::new();
        hash.update(&out);
        out.extend(hash.digest128().to_le_bytes());
        out
    }

    #[test]
    fn a_file_gives_back_what_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        for saved in KvFormat::ALL.map(snapshot_in) {
            saved.save(&path).unwrap();
            let mut found = Snapshot::open(&path).unwrap();
            assert_eq!(found.name, format!("the session file {}", path.display()));
            found.name.clone_from(&saved.name);
            assert_eq!(found, saved);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
            assert_eq!(fs::read(&path).unwrap(), bytes(&saved));
            assert_eq!(forged(&encode(&saved), &saved.payload), bytes(&saved));
        }
    }

    /// Fails with "no space left" after so many bytes.
    struct Full<'a>(&'a mut dyn Write, usize);

    impl Write for Full<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = bytes.len().min(self.1);
            if n == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.1 -= n;
            self.0.write(&bytes[..n])
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let saved = snapshot();
        saved.save(&path).unwrap();
        let old = fs::read(&path).unwrap();
        let newer = Snapshot { tokens: vec![9; 70], ..saved };
        for room in [0, 1, PREFIX, 200, old.len() - 1] {
            let error = replace(&path, &mut |out| newer.write(&mut Full(out, room))).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(fs::read(&path).unwrap(), old, "{room} bytes written");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{room} bytes written");
        }
        replace(&path, &mut |out| newer.write(&mut Full(out, old.len()))).unwrap();
        assert_eq!(Snapshot::open(&path).unwrap().tokens, newer.tokens);
    }

    /// The device that is always full, where the system has one: its error is the operating system's own.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_device() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        fs::write(&path, "old").unwrap();
        let mut full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = replace(&path, &mut |_| snapshot().write(&mut full)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn places_that_cannot_be_written_or_read() {
        let folder = tempfile::tempdir().unwrap();
        let text = |result: Result<(), EngineError>| {
            result.unwrap_err().to_string().replace(folder.path().to_str().unwrap(), "DIR")
        };
        let nowhere = folder.path().join("nowhere/s");
        let error = text(snapshot().save(&nowhere));
        assert!(error.starts_with("writing the session file DIR/nowhere/s: No such file"), "{error}");
        let error = text(snapshot().save(folder.path()));
        assert!(error.starts_with("writing the session file DIR: "), "{error}");
        let error = text(Snapshot::open(&nowhere).map(|_| ()));
        assert!(error.starts_with("reading the session file DIR/nowhere/s: No such file"), "{error}");
        let error = text(Snapshot::open(folder.path()).map(|_| ()));
        assert!(error.starts_with("DIR is a directory, not a session file"), "{error}");
    }

    /// Every truncation, and every changed byte, is found; none of them is a panic.
    #[test]
    fn every_truncation_and_every_flipped_bit_is_found() {
        let good = bytes(&snapshot());
        for len in 0..good.len() {
            let error = opened(&good[..len]).unwrap_err();
            let want = match len {
                0 => "FILE is empty (0 bytes), not a session file".to_string(),
                1..8 => "FILE is something else, not a session file".to_string(),
                8..PREFIX => format!("the session file FILE is truncated: {len} of its 40 bytes"),
                _ => format!("the session file FILE is truncated: {len} of its {} bytes", good.len()),
            };
            assert!(error.starts_with(&want), "{len}: {error}");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            let error = opened(&bad).unwrap_err();
            let want = match at {
                0..8 => "is something else, not a session file",
                8..12 => "is a session file of version",
                12..PREFIX => "",
                _ => "is damaged: its checksum does not match; copy or save it again",
            };
            assert!(error.contains(want), "byte {at}: {error}");
        }
        let error = opened(&[&good[..], &[0]].concat()).unwrap_err();
        assert!(error.contains("is damaged: its lengths do not agree"), "{error}");
    }

    #[test]
    fn another_version_is_refused_by_its_number() {
        let mut other = bytes(&snapshot());
        other[8..12].copy_from_slice(&2u32.to_le_bytes());
        let other = sealed(other[..other.len() - CHECKSUM].to_vec());
        let error = opened(&other).unwrap_err();
        assert_eq!(
            error,
            "FILE is a session file of version 2, this program reads version 1; save the session again with this \
             program"
        );
    }

    /// Every 32-bit word of the header as large as it gets, under a right checksum: lengths that lie are found
    /// before memory is asked for (this test would need terabytes), and so are values that nothing has.
    #[test]
    fn hostile_headers() {
        let s = snapshot();
        let good = encode(&s);
        let tokens_at = good.len() - (4 + 2 * 8) - 70 * 4;
        for at in 0..good.len() - 4 {
            for huge in [[0xff; 4], [0, 0, 0, 0x10], [0xff, 0xff, 0xff, 0x7f]] {
                let mut header = good.clone();
                header[at..at + 4].copy_from_slice(&huge);
                match opened(&forged(&header, &s.payload)) {
                    Err(error) => {
                        assert!(error.starts_with("the session file FILE is damaged: "), "{at}: {error}")
                    }
                    // Names, numbers of layers, the fingerprint and tokens may be anything: the engine compares
                    // them. The rest holds.
                    Ok(found) => {
                        assert_eq!(found.tokens.len(), 70);
                        assert_eq!(found.pieces().last().unwrap().bytes.end, s.payload.len());
                        assert!(found.checkpoints.iter().all(|c| (1..=70).contains(c)));
                    }
                }
            }
        }
        let mut header = good.clone();
        header[tokens_at - 4..tokens_at].copy_from_slice(&71u32.to_le_bytes());
        assert!(opened(&forged(&header, &s.payload)).is_err(), "one more token than there are");
        for cut in 0..good.len() {
            let error = opened(&forged(&good[..cut], &s.payload)).unwrap_err();
            assert!(error.contains("its header ends early or has impossible values"), "{cut}: {error}");
        }
        let error = opened(&forged(&good, &s.payload[1..])).unwrap_err();
        assert!(error.contains("it has 899 bytes of state, its header needs 900"), "{error}");
    }

    #[test]
    fn impossible_checkpoints() {
        for checkpoints in [vec![0], vec![16, 16], vec![64, 16], vec![71]] {
            let mut s = snapshot();
            s.checkpoints.clone_from(&checkpoints);
            let error = opened(&bytes(&s)).unwrap_err();
            assert!(
                error.contains("its checkpoints cannot be those of 70 tokens"),
                "{checkpoints:?}: {error}"
            );
        }
        let mut s = snapshot();
        let mut origin = (*s.origin).clone();
        origin.states.remove(1);
        s.origin = Arc::new(origin);
        assert!(opened(&bytes(&s)).unwrap_err().contains("its checkpoints cannot be"));
    }
}

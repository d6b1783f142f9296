//! Snapshots as files, little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | magic `MINFSESS` |
//! | 4, 4, 8 | version, bytes of the header, bytes of the file |
//! | header | see [`encode`] |
//! | payload | [`Snapshot`]'s |
//! | 16 | XXH3-128 of all before |
//!
//! A file is read whole and its checksum compared before anything in it is believed; then every length is
//! checked against what is there, so that memory is bounded by the file's size also for a file that lies.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use minfer_graph::{PAGE, StateDecl, StateKind};
use minfer_model::Fingerprint;
use minfer_runtime::{DeviceKind, KvFormat, StateSpec};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{EngineError, SessionError};
use crate::snapshot::{Held, Origin, Snapshot};

const MAGIC: [u8; 8] = *b"MINFSESS";
const VERSION: u32 = 1;
/// Bytes before the header, and behind the payload.
const PREFIX: usize = 24;
const CHECKSUM: usize = 16;
/// Bytes that are hashed and written at a time: they stay in the cache between the two.
const CHUNK: usize = 1 << 18;

impl Snapshot {
    /// Writes the snapshot to a file, in the place of what is there: a reader finds the old file or the new
    /// one, and after an error the old one is still there.
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

/// Header and payload of a file whose length and checksum are right.
fn read(path: &Path) -> Result<(Vec<u8>, Vec<u8>), SessionError> {
    let failed = |source| SessionError::Io { doing: "reading", file: path.to_owned(), source };
    let not = |found| SessionError::NotASession { file: path.to_owned(), found };
    let damaged = |why: &str| SessionError::Damaged { file: path.to_owned(), why: why.to_string() };
    // Asked before opening, which would block on a pipe.
    let meta = fs::metadata(path).map_err(failed)?;
    match meta.len() {
        _ if meta.is_dir() => return Err(not("a directory")),
        _ if !meta.is_file() => return Err(not("a pipe or device")),
        0 => return Err(not("empty (0 bytes)")),
        _ => {}
    }
    let mut file = File::open(path).map_err(failed)?;
    let mut prefix = [0; PREFIX];
    let start = (meta.len() as usize).min(PREFIX);
    file.read_exact(&mut prefix[..start]).map_err(failed)?;
    let (magic, mut fields) = (start >= 8 && prefix[..8] == MAGIC, Fields(&prefix[8..]));
    if !magic {
        return Err(not("something else"));
    }
    let (version, header, total) = (fields.u32(), fields.u32(), fields.u64());
    if start == PREFIX && version != Some(VERSION) {
        let found = version.unwrap_or_default();
        return Err(SessionError::Version { file: path.to_owned(), found, known: VERSION });
    }
    let expected = if start == PREFIX { total.unwrap_or_default() } else { (PREFIX + CHECKSUM) as u64 };
    if meta.len() < expected {
        return Err(SessionError::Truncated { file: path.to_owned(), found: meta.len(), expected });
    }
    let rest = expected.checked_sub((PREFIX + CHECKSUM) as u64).filter(|_| meta.len() == expected);
    let header = u64::from(header.unwrap_or_default());
    let payload = rest.and_then(|rest| rest.checked_sub(header));
    let payload = payload.ok_or_else(|| damaged("its lengths do not agree"))?;
    let mut hash = Xxh3::new();
    hash.update(&prefix);
    let mut part = |bytes: u64| {
        let mut part = Vec::new();
        let room = usize::try_from(bytes).ok().filter(|&bytes| part.try_reserve_exact(bytes).is_ok());
        let session = format!("the session file {}", path.display());
        let room = room.ok_or(SessionError::OutOfMemory { session, bytes })?;
        part.resize(room, 0);
        for chunk in part.chunks_mut(CHUNK) {
            file.read_exact(chunk).map_err(failed)?;
            hash.update(chunk);
        }
        Ok(part)
    };
    let (header, payload) = (part(header)?, part(payload)?);
    let mut checksum = [0; CHECKSUM];
    file.read_exact(&mut checksum).map_err(failed)?;
    if hash.digest128().to_le_bytes() != checksum {
        return Err(damaged("its checksum does not match"));
    }
    Ok((header, payload))
}

/// Numbers of formats and kinds of state in files: appended, never reused.
const KV_FORMATS: [KvFormat; 2] = [KvFormat::F32, KvFormat::F16];
const PAGED: u16 = 0;
const RECURRENT: u16 = 1;

/// Fingerprint, architecture, positions per page, KV format, states, tokens, checkpoints. Lists and texts have
/// their length in front.
fn encode(snapshot: &Snapshot) -> Vec<u8> {
    let (origin, mut out) = (&snapshot.origin, Vec::new());
    let list = |out: &mut Vec<u8>, numbers: &[usize]| {
        out.extend((numbers.len() as u32).to_le_bytes());
        numbers.iter().for_each(|&n| out.extend((n as u64).to_le_bytes()));
    };
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
    };
    out.extend(origin.fingerprint.0);
    text(&mut out, &origin.arch);
    out.extend((PAGE as u32).to_le_bytes());
    let format = KV_FORMATS.iter().position(|&f| f == origin.kv_format).unwrap_or(KV_FORMATS.len());
    out.extend((format as u16).to_le_bytes());
    out.extend((origin.states.len() as u32).to_le_bytes());
    for state in &origin.states {
        let decl = &state.spec.decl;
        text(&mut out, &decl.name);
        out.extend(decl.layer.to_le_bytes());
        out.extend(u16::from(state.draft).to_le_bytes());
        out.extend(state.device.number().to_le_bytes());
        let (kind, widths) = match &decl.kind {
            StateKind::Paged { widths } => (PAGED, &widths[..]),
            StateKind::Recurrent { width } => (RECURRENT, std::slice::from_ref(width)),
            // No device opens another kind.
            _ => (u16::MAX, &[][..]),
        };
        out.extend(kind.to_le_bytes());
        list(&mut out, widths);
    }
    out.extend((snapshot.tokens.len() as u32).to_le_bytes());
    snapshot.tokens.iter().for_each(|token| out.extend(token.to_le_bytes()));
    list(&mut out, &snapshot.checkpoints);
    out
}

/// The other way, without a payload; `None` if the header is not one that [`encode`] makes.
fn decode(header: &[u8]) -> Option<Snapshot> {
    let mut fields = Fields(header);
    let fingerprint = Fingerprint(fields.take(16)?.try_into().ok()?);
    let arch = fields.text()?;
    let page = fields.u32()?;
    let kv_format = *KV_FORMATS.get(usize::from(fields.u16()?))?;
    let mut states = Vec::new();
    for _ in 0..fields.u32()? {
        let (name, layer) = (fields.text()?, fields.u32()?);
        let draft = match fields.u16()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let device = DeviceKind::from_number(fields.u16()?)?;
        let (kind, widths) = (fields.u16()?, fields.list()?);
        let kind = match (kind, &widths[..]) {
            (PAGED, _) => StateKind::Paged { widths },
            (RECURRENT, &[width]) => StateKind::Recurrent { width },
            _ => return None,
        };
        let decl = StateDecl { name, layer, kind };
        states.push(Held { draft, device, spec: StateSpec { decl, format: kv_format, pages: 0 } });
    }
    let bytes = (fields.u32()? as usize).checked_mul(4)?;
    let mut items = Fields(fields.take(bytes)?);
    let tokens = (0..bytes / 4).map(|_| items.u32()).collect::<Option<Vec<u32>>>()?;
    let checkpoints = fields.list()?;
    let origin = Arc::new(Origin { arch, fingerprint, kv_format, states });
    let whole = fields.0.is_empty() && page as usize == PAGE;
    whole.then_some(Snapshot { origin, tokens, checkpoints, payload: Vec::new(), name: String::new() })
}

/// What a sequence cannot be; and the payload must be as long as the header says.
fn check(snapshot: &Snapshot, payload: usize) -> Result<(), String> {
    let (len, checkpoints) = (snapshot.tokens.len(), &snapshot.checkpoints);
    let ascending = checkpoints.windows(2).all(|pair| pair[0] < pair[1]);
    let inside = checkpoints.iter().all(|c| (1..=len).contains(c));
    if !(ascending && inside && (checkpoints.is_empty() || snapshot.origin.is_recurrent())) {
        return Err(format!("its checkpoints cannot be those of {len} tokens"));
    }
    match snapshot.origin.payload_bytes(len, snapshot.marks().len()) {
        Some(bytes) if bytes == payload => Ok(()),
        Some(bytes) => Err(format!("it has {payload} bytes of state, its header needs {bytes}")),
        None => Err("its sizes overflow".to_string()),
    }
}

/// What is left of a header.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let bytes = self.u32()? as usize;
        Some(std::str::from_utf8(self.take(bytes)?).ok()?.to_string())
    }

    fn list(&mut self) -> Option<Vec<usize>> {
        let bytes = (self.u32()? as usize).checked_mul(8)?;
        let mut items = Fields(self.take(bytes)?);
        (0..bytes / 8).map(|_| usize::try_from(items.u64()?).ok()).collect()
    }
}

//! The header of a session file: what the bytes behind it are, and of which sequence.

use std::sync::Arc;

use minfer_graph::{PAGE, PagedPart, StateDecl, StateKind};
use minfer_model::Fingerprint;
use minfer_runtime::{DeviceKind, KvFormat, StateSpec};

use crate::snapshot::{Held, Origin, Snapshot};

/// Numbers of kinds of state in files: appended, never reused.
const PAGED: u16 = 0;
const RECURRENT: u16 = 1;

/// The same of formats.
const fn kv_number(format: KvFormat) -> u16 {
    match format {
        KvFormat::F32 => 0,
        KvFormat::F16 => 1,
        KvFormat::Q8_0 => 2,
    }
}

/// Fingerprint, architecture, positions per page, KV format, states, tokens, checkpoints. Lists and texts have
/// their length in front.
pub(super) fn encode(snapshot: &Snapshot) -> Vec<u8> {
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
    out.extend(kv_number(origin.kv_format).to_le_bytes());
    out.extend((origin.states.len() as u32).to_le_bytes());
    for state in &origin.states {
        let decl = &state.spec.decl;
        text(&mut out, &decl.name);
        out.extend(decl.layer.to_le_bytes());
        out.extend(u16::from(state.draft).to_le_bytes());
        out.extend(state.device.number().to_le_bytes());
        let (kind, sizes) = match &decl.kind {
            StateKind::Paged { parts } => (PAGED, parts.iter().flat_map(sizes_of).collect()),
            StateKind::Recurrent { width } => (RECURRENT, vec![*width]),
            // No device opens another kind.
            _ => (u16::MAX, vec![]),
        };
        out.extend(kind.to_le_bytes());
        list(&mut out, &sizes);
    }
    out.extend((snapshot.tokens.len() as u32).to_le_bytes());
    snapshot.tokens.iter().for_each(|token| out.extend(token.to_le_bytes()));
    list(&mut out, &snapshot.checkpoints);
    out
}

/// The other way, without a payload; `None` if the header is not one that [`encode`] makes.
pub(super) fn decode(header: &[u8]) -> Option<Snapshot> {
    let mut fields = Fields(header);
    let fingerprint = Fingerprint(fields.take(16)?.try_into().ok()?);
    let arch = fields.text()?;
    let page = fields.u32()?;
    let number = fields.u16()?;
    let kv_format = KvFormat::ALL.into_iter().find(|&f| kv_number(f) == number)?;
    let mut states = Vec::new();
    for _ in 0..fields.u32()? {
        let (name, layer) = (fields.text()?, fields.u32()?);
        let draft = match fields.u16()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let device = DeviceKind::from_number(fields.u16()?)?;
        let (kind, sizes) = (fields.u16()?, fields.list()?);
        let kind = match (kind, &sizes[..]) {
            (PAGED, _) => StateKind::Paged { parts: parts(&sizes)? },
            (RECURRENT, &[width]) => StateKind::Recurrent { width },
            _ => return None,
        };
        let decl = StateDecl { name, layer, kind };
        states.push(Held {
            draft,
            device,
            spec: StateSpec { decl, format: kv_format, pages: 0, window_pages: 0 },
        });
    }
    let bytes = (fields.u32()? as usize).checked_mul(4)?;
    let mut items = Fields(fields.take(bytes)?);
    let tokens = (0..bytes / 4).map(|_| items.u32()).collect::<Option<Vec<u32>>>()?;
    let checkpoints = fields.list()?;
    let origin = Arc::new(Origin { arch, fingerprint, kv_format, states });
    let whole = fields.0.is_empty() && page as usize == PAGE;
    whole.then_some(Snapshot { origin, tokens, checkpoints, payload: Vec::new(), name: String::new() })
}

fn parts(sizes: &[usize]) -> Option<Vec<PagedPart>> {
    let (parts, rest) = sizes.as_chunks();
    let part = |&[width, every, window]: &[usize; 3]| {
        let window = (window > 0).then_some(window);
        PagedPart::fits(every).then_some(PagedPart { width, every, window })
    };
    if rest.is_empty() { parts.iter().map(part).collect() } else { None }
}

/// Of a part: its width, positions per row, and its window or 0.
fn sizes_of(part: &PagedPart) -> [usize; 3] {
    [part.width, part.every, part.window.unwrap_or(0)]
}

/// What a sequence cannot be; and the payload must be as long as the header says.
pub(super) fn check(snapshot: &Snapshot, payload: usize) -> Result<(), String> {
    let (len, checkpoints) = (snapshot.tokens.len(), &snapshot.checkpoints);
    let ascending = checkpoints.windows(2).all(|pair| pair[0] < pair[1]);
    let inside = checkpoints.iter().all(|c| (1..=len).contains(c));
    if !(ascending && inside && (checkpoints.is_empty() || snapshot.origin.has_marks())) {
        return Err(format!("its checkpoints cannot be those of {len} tokens"));
    }
    match snapshot.origin.payload_bytes(len, &snapshot.marks()) {
        Some(bytes) if bytes == payload => Ok(()),
        Some(bytes) => Err(format!("it has {payload} bytes of state, its header needs {bytes}")),
        None => Err("its sizes overflow".to_string()),
    }
}

/// What is left of a header.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
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

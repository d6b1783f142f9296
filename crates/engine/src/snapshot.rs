//! A sequence on the host: its tokens and the bytes of everything that it keeps on the devices.
//!
//! The payload is a list of pieces: the pages of the sequence in order, of each the rows that hold its tokens,
//! state by state; then the states that it can go back to, from the shortest on, of each a slot of every piece
//! of recurrent state and the pages of the last positions. What the bytes of a piece mean is known to its device's kind alone ([`Origin`]).

use std::ops::Range;
use std::sync::Arc;

use minfer_graph::{PAGE, StateKind};
use minfer_model::Fingerprint;
use minfer_runtime::{DeviceKind, Executor, KvFormat, StateSpec};

use crate::error::{EngineError, SessionError};

/// A piece of state of the model or of its draft head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) draft: bool,
    pub(crate) device: DeviceKind,
    /// Without a number of pages.
    pub(crate) spec: StateSpec,
}

impl Held {
    pub(crate) fn is_paged(&self) -> bool {
        matches!(self.spec.decl.kind, StateKind::Paged { .. })
    }
}

/// What gives the bytes of a snapshot their meaning: they can be restored where all of it is equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The architecture, and what was asked for that changes its numbers.
    pub(crate) arch: String,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) kv_format: KvFormat,
    pub(crate) states: Vec<Held>,
}

impl Origin {
    /// The model's pieces of state, then those of its draft head.
    pub(crate) fn held(executor: &Executor, draft: bool) -> impl Iterator<Item = Held> {
        executor.states().map(move |(_, spec, device)| Held {
            draft,
            device: device.kind,
            spec: StateSpec { pages: 0, window_pages: 0, ..spec.clone() },
        })
    }

    /// Whether a sequence has more than pages of all its positions.
    pub(crate) fn has_marks(&self) -> bool {
        self.states.iter().any(|s| !s.is_paged()) || self.window().is_some()
    }

    /// The longest window of which rows are kept.
    fn window(&self) -> Option<usize> {
        self.states.iter().filter_map(|s| s.spec.decl.kind.window()).max()
    }

    /// Pages of a window's rows behind `len` tokens, and the rows that each has.
    fn recent(&self, len: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let first = self.window().map_or(len.div_ceil(PAGE), |window| len.saturating_sub(window) / PAGE);
        (first..len.div_ceil(PAGE)).map(move |index| (index, PAGE.min(len - index * PAGE)))
    }

    /// Bytes of a sequence of `len` tokens with the states behind `marks`; `None` on overflow.
    pub(crate) fn payload_bytes(&self, len: usize, marks: &[usize]) -> Option<usize> {
        let mut sum = 0usize;
        for held in &self.states {
            let mut add = |bytes: Option<usize>, times: usize| {
                sum = sum.checked_add(bytes?.checked_mul(times)?)?;
                Some(())
            };
            if !held.is_paged() {
                add(held.spec.rows_bytes(false, 1), marks.len())?;
                continue;
            }
            add(held.spec.rows_bytes(false, PAGE), len / PAGE)?;
            add(held.spec.rows_bytes(false, len % PAGE), 1)?;
            for (_, rows) in marks.iter().flat_map(|&mark| self.recent(mark)) {
                add(held.spec.rows_bytes(true, rows), 1)?;
            }
        }
        Some(sum)
    }

    /// Fails unless `other`, the origin of `session`, is equal.
    pub(crate) fn check(&self, other: &Origin, session: &str) -> Result<(), SessionError> {
        let session = session.to_string();
        if (&self.arch, self.fingerprint) != (&other.arch, other.fingerprint) {
            return Err(SessionError::OtherModel {
                session,
                found_arch: other.arch.clone(),
                found: other.fingerprint,
                arch: self.arch.clone(),
                fingerprint: self.fingerprint,
            });
        }
        if self.kv_format != other.kv_format {
            let (found, here) = (other.kv_format.name(), self.kv_format.name());
            return Err(SessionError::OtherKvFormat { session, found, here });
        }
        let head = |o: &Origin| if o.states.iter().any(|s| s.draft) { "with" } else { "without" };
        if head(self) != head(other) {
            return Err(SessionError::OtherDraftHead { session, found: head(other), here: head(self) });
        }
        if self.states.len() != other.states.len() {
            let what = format!("{} pieces instead of {}", other.states.len(), self.states.len());
            return Err(SessionError::OtherLayout { session, what });
        }
        for (here, found) in self.states.iter().zip(&other.states) {
            let state = here.spec.decl.name.clone();
            if here.spec != found.spec || here.draft != found.draft {
                let what = format!("'{state}' as {}, not {}", found.spec.decl.kind, here.spec.decl.kind);
                return Err(SessionError::OtherLayout { session, what });
            }
            if here.device != found.device {
                let (found, here) = (found.device, here.device);
                return Err(SessionError::OtherDevice { session, state, found, here });
            }
        }
        Ok(())
    }
}

/// Where a piece of the payload belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The first rows of the sequence's page of this number.
    Page { at: usize, rows: usize },
    /// The slot of [`Snapshot::marks`] of this number.
    Slot { mark: usize },
    /// The first rows of its page for windows of this number.
    Recent { mark: usize, at: usize, rows: usize },
}

impl Place {
    /// Rows that a piece of this state has here, if it has any.
    fn rows(self, held: &Held) -> Option<usize> {
        match self {
            Place::Page { rows, .. } => held.is_paged().then_some(rows),
            Place::Slot { .. } => (!held.is_paged()).then_some(1),
            Place::Recent { rows, .. } => held.spec.decl.kind.window().map(|_| rows),
        }
    }
}

/// A piece of the payload.
pub(crate) struct Piece {
    /// Index in [`Origin::states`].
    pub(crate) state: usize,
    pub(crate) place: Place,
    pub(crate) rows: usize,
    pub(crate) bytes: Range<usize>,
}

/// Everything that a sequence keeps, in memory of the host. [`crate::Engine::snapshot`] takes it,
/// [`crate::Engine::restore`] makes a sequence of it, in this process or, through a file, in another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub(crate) origin: Arc<Origin>,
    pub(crate) tokens: Vec<u32>,
    /// Tokens that each checkpoint has seen, ascending; empty for models without recurrent state.
    pub(crate) checkpoints: Vec<usize>,
    pub(crate) payload: Vec<u8>,
    /// What messages call it.
    pub(crate) name: String,
}

impl Snapshot {
    /// One with room for its payload, which is empty.
    pub(crate) fn new(
        origin: Arc<Origin>,
        tokens: Vec<u32>,
        checkpoints: Vec<usize>,
    ) -> Result<Snapshot, EngineError> {
        let name = "the snapshot".to_string();
        let mut snapshot = Snapshot { origin, tokens, checkpoints, payload: Vec::new(), name };
        let bytes = snapshot.origin.payload_bytes(snapshot.tokens.len(), &snapshot.marks());
        let reserved = bytes.filter(|&bytes| snapshot.payload.try_reserve_exact(bytes).is_ok());
        match reserved {
            Some(_) => Ok(snapshot),
            None => {
                let bytes = bytes.map_or(u64::MAX, |b| b as u64);
                Err(SessionError::OutOfMemory { session: snapshot.name, bytes }.into())
            }
        }
    }

    /// The tokens of the sequence.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that each recurrent state in the payload has seen: those of the checkpoints, and all.
    pub(crate) fn marks(&self) -> Vec<usize> {
        let mut marks = self.checkpoints.clone();
        let len = self.tokens.len();
        if self.origin.has_marks() && len > 0 && !self.last_is_checkpoint() {
            marks.push(len);
        }
        marks
    }

    /// Whether the state after the last token is a checkpoint.
    pub(crate) fn last_is_checkpoint(&self) -> bool {
        self.checkpoints.last() == Some(&self.tokens.len())
    }

    /// The pieces of the payload, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let len = self.tokens.len();
        let pages =
            (0..len.div_ceil(PAGE)).map(move |at| Place::Page { at, rows: PAGE.min(len - at * PAGE) });
        let marks = self.marks().into_iter().enumerate().flat_map(move |(mark, len)| {
            let recent = self.origin.recent(len).map(move |(at, rows)| Place::Recent { mark, at, rows });
            [Place::Slot { mark }].into_iter().chain(recent)
        });
        let states = self.origin.states.iter().enumerate();
        let mut end = 0;
        pages.chain(marks).flat_map(move |place| states.clone().map(move |s| (place, s))).filter_map(
            move |(place, (state, held))| {
                let window = matches!(place, Place::Recent { .. });
                let rows = place.rows(held)?;
                let start = end;
                end += held.spec.rows_bytes(window, rows)?;
                (end > start).then_some(Piece { state, place, rows, bytes: start..end })
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use minfer_graph::StateDecl;

    use super::*;

    fn origin() -> Origin {
        let held = |name: &str, draft| Held {
            draft,
            device: DeviceKind::Cpu,
            spec: StateSpec {
                decl: StateDecl { name: name.to_string(), layer: 0, kind: StateKind::paged(&[4, 4]) },
                format: KvFormat::F16,
                pages: 0,
                window_pages: 0,
            },
        };
        let states = vec![held("kv", false), held("head", true)];
        let fingerprint = Fingerprint([1; 16]);
        Origin { arch: "qwen3".to_string(), fingerprint, kv_format: KvFormat::F16, states }
    }

    fn refusal(change: impl Fn(&mut Origin)) -> String {
        let mut other = origin();
        change(&mut other);
        origin().check(&other, "the snapshot").map_or_else(|e| e.to_string(), |()| "none".to_string())
    }

    /// Whatever differs is named, with both sides and what to do.
    #[test]
    fn what_is_not_equal_is_named() {
        assert_eq!(refusal(|_| ()), "none");
        for (error, want) in [
            (
                refusal(|o| o.fingerprint.0[15] = 0),
                "the snapshot belongs to another model (qwen3 01010101010101010101010101010100; this one is qwen3 \
                 01010101010101010101010101010101): open the model that it was made with, or start anew",
            ),
            (
                refusal(|o| o.kv_format = KvFormat::F32),
                "the snapshot keeps keys and values as f32, this engine as f16: open the engine with --kv f32, or \
                 start anew",
            ),
            (
                refusal(|o| o.states.truncate(1)),
                "the snapshot was made without the model's draft head, this engine was opened with it: open the \
                 engine without it, or start anew",
            ),
            (
                refusal(|o| o.states[1].device = DeviceKind::Metal),
                "the snapshot has state 'head' in the layout of metal, which cpu cannot read: place the model as it \
                 was (--backend, --gpu-layers), or start anew",
            ),
            (
                refusal(|o| o.states[0].spec.decl.kind = StateKind::paged(&[4])),
                "the snapshot has other state than this program keeps for the model ('kv' as rows of \
                 4, not rows of 4 and 4): start anew",
            ),
            (
                refusal(|o| o.states.push(o.states[0].clone())),
                "the snapshot has other state than this program keeps for the model (3 pieces instead of 2): start \
                 anew",
            ),
        ] {
            assert_eq!(error, want);
        }
        assert_ne!(refusal(|o| o.arch.push('x')), "none");
        assert_ne!(refusal(|o| o.states[0].spec.decl.name.push('x')), "none");
        assert_ne!(refusal(|o| o.states[0].spec.decl.layer = 1), "none");
        assert_ne!(refusal(|o| o.states.swap(0, 1)), "none");
    }
}

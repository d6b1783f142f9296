//! The names that people type for devices, and the fence that they build from them.
//!
//! A fence only removes devices: `cpu` is always allowed. Unknown names and kinds that this build lacks are
//! refused here, from the names alone, before any device is touched or any file is opened.

use minfer_graph::DeviceKind;
use thiserror::Error;

use crate::registry::Registry;

/// A refusal about backends. These are exit code 2; the three classes of a named backend never mix.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum BackendError {
    #[error("unknown backend '{name}'; known backends are: {}", known())]
    Unknown { name: String },
    #[error("backend '{kind}' is known but not compiled into this build: {}", not_compiled(*kind))]
    NotCompiled { kind: DeviceKind },
    #[error("backend '{name}' is compiled in but not available on this machine: {why}")]
    Unavailable { name: BackendName, why: String },
    #[error("{origin} names no backend; leave it out to use every device, or name some of: {}", known())]
    Empty { origin: &'static str },
    #[error("backend '{kind}' is registered twice")]
    Duplicate { kind: DeviceKind },
    #[error("no cpu backend is registered; every build needs one")]
    NoCpu,
}

fn known() -> String {
    DeviceKind::ALL.map(DeviceKind::name).join(", ")
}

/// Why a kind can be missing from a build.
pub const fn not_compiled(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "the CPU backend is part of every build",
        DeviceKind::Metal => "the Metal backend is compiled only on macOS with --features metal",
        DeviceKind::Cuda => "the CUDA backend is compiled only with --features cuda",
        DeviceKind::Vulkan => "the Vulkan backend is compiled only with --features vulkan",
    }
}

/// A backend as named: `cuda` (all of them) or `cuda:1` (one).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct BackendName {
    pub kind: DeviceKind,
    pub ordinal: Option<u16>,
}

impl std::fmt::Display for BackendName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ordinal {
            None => write!(f, "{}", self.kind),
            Some(n) => write!(f, "{}:{n}", self.kind),
        }
    }
}

/// Which devices may take part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fence {
    /// `None`: every device that this build has and this machine can use.
    named: Option<Vec<BackendName>>,
}

impl Fence {
    /// No fence.
    pub fn all() -> Fence {
        Fence::default()
    }

    /// Builds the fence from `--backend` values (repeatable, comma lists) or, when there are none, from
    /// `MINFER_BACKENDS`, where an empty value counts as unset.
    ///
    /// # Errors
    /// [`BackendError::Unknown`], [`BackendError::NotCompiled`], [`BackendError::Empty`].
    pub fn parse(flags: &[String], env: Option<&str>, registry: &Registry) -> Result<Fence, BackendError> {
        if !flags.is_empty() {
            return Fence::from_lists("--backend", flags.iter().map(String::as_str), registry);
        }
        match env.filter(|v| !v.trim().is_empty()) {
            Some(list) => Fence::from_lists("MINFER_BACKENDS", std::iter::once(list), registry),
            None => Ok(Fence::all()),
        }
    }

    fn from_lists<'a>(
        origin: &'static str,
        lists: impl Iterator<Item = &'a str>,
        registry: &Registry,
    ) -> Result<Fence, BackendError> {
        let names = lists.flat_map(|l| l.split(',')).map(str::trim).filter(|n| !n.is_empty());
        let named = names.map(|n| parse_name(n, registry)).collect::<Result<Vec<_>, _>>()?;
        if named.is_empty() { Err(BackendError::Empty { origin }) } else { Ok(Fence { named: Some(named) }) }
    }

    /// The backends that were named; empty without a fence.
    pub fn named(&self) -> &[BackendName] {
        self.named.as_deref().unwrap_or_default()
    }

    /// Whether an instance may take part.
    pub fn allows(&self, kind: DeviceKind, ordinal: u16) -> bool {
        let Some(named) = &self.named else { return true };
        kind == DeviceKind::Cpu
            || named.iter().any(|n| n.kind == kind && n.ordinal.is_none_or(|o| o == ordinal))
    }
}

fn parse_name(text: &str, registry: &Registry) -> Result<BackendName, BackendError> {
    let unknown = || BackendError::Unknown { name: text.to_string() };
    let (name, ordinal) = match text.split_once(':') {
        None => (text, None),
        Some((name, n)) => (name, Some(parse_ordinal(n.trim()).ok_or_else(unknown)?)),
    };
    let kind = DeviceKind::from_name(name).ok_or_else(unknown)?;
    if registry.descriptor(kind).is_none() {
        return Err(BackendError::NotCompiled { kind });
    }
    Ok(BackendName { kind, ordinal })
}

/// Digits only: `parse` alone would also take a sign.
fn parse_ordinal(text: &str) -> Option<u16> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

//! From what was typed and what the environment says to what is meant: the part that all commands share.

use std::env;
use std::ffi::OsString;
use std::sync::Arc;

use minfer_format::Reading;
use minfer_graph::DeviceKind;
use minfer_runtime::{Device, Fence, OpenOptions, Registry, WeightOptions};

use crate::args::DeviceArgs;
use crate::error::Failure;

/// The environment variables that minfer reads, read once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Environment {
    /// `MINFER_BACKENDS`: the fence where no flag sets one.
    pub(crate) backends: Option<String>,
    /// `MINFER_DISABLE_CUDA`, `MINFER_DISABLE_METAL`: present with any value.
    pub(crate) disabled: Vec<DeviceKind>,
    /// `MINFER_SYNC_COPIES`.
    pub(crate) sync_copies: bool,
}

const DISABLES: [(&str, DeviceKind); 2] =
    [("MINFER_DISABLE_CUDA", DeviceKind::Cuda), ("MINFER_DISABLE_METAL", DeviceKind::Metal)];

impl Environment {
    pub(crate) fn read() -> Result<Environment, Failure> {
        Environment::from_variables(|name| env::var_os(name))
    }

    fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Environment, Failure> {
        // What is not text names no backend; the refusal shows it.
        let text = |name: &str| get(name).map(|v| v.to_string_lossy().into_owned());
        let disabled = DISABLES.iter().filter(|(name, _)| get(name).is_some()).map(|(_, kind)| *kind);
        Ok(Environment {
            backends: text("MINFER_BACKENDS"),
            disabled: disabled.collect(),
            sync_copies: switch("MINFER_SYNC_COPIES", text("MINFER_SYNC_COPIES"))?,
        })
    }
}

fn switch(name: &str, value: Option<String>) -> Result<bool, Failure> {
    match value.unwrap_or_default().trim().to_ascii_lowercase().as_str() {
        "" | "0" | "false" | "no" | "off" => Ok(false),
        "1" | "true" | "yes" | "on" => Ok(true),
        other => Err(Failure::Usage(format!("{name} is '{other}'; it must be 1 or 0"))),
    }
}

/// Which devices a command may use, judged by name.
pub(crate) struct Backends {
    fence: Fence,
    disabled: Vec<DeviceKind>,
    /// Kinds on which every node must land; empty: anywhere.
    pub(crate) require: Vec<DeviceKind>,
    pub(crate) sync_copies: bool,
    /// How weights are kept.
    pub(crate) weights: WeightOptions,
}

impl Backends {
    /// Judges the names; touches no device.
    pub(crate) fn new(
        args: &DeviceArgs,
        environment: &Environment,
        registry: &Registry,
    ) -> Result<Backends, Failure> {
        Ok(Backends {
            fence: Fence::parse(&args.backend, environment.backends.as_deref(), registry)?,
            disabled: environment.disabled.clone(),
            require: required(&args.require_device, registry)?,
            sync_copies: args.sync_copies || environment.sync_copies,
            weights: args.weights(),
        })
    }

    /// How files are read.
    pub(crate) fn reading(&self) -> Reading {
        if self.weights.mmap { Reading::Mapped } else { Reading::Plain }
    }

    /// Opens the devices, most preferred first. A named or required one that is not available is refused.
    pub(crate) fn open(
        &self,
        registry: &Registry,
        threads: Option<usize>,
    ) -> Result<Vec<Arc<dyn Device>>, Failure> {
        let options = OpenOptions { threads, disabled: self.disabled.clone(), weights: self.weights };
        for &kind in &self.require {
            registry.count(kind, &options)?;
        }
        let devices = registry.open(&self.fence, &options)?;
        match self.require.iter().find(|&&kind| !devices.iter().any(|d| d.id().kind == kind)) {
            None => Ok(devices),
            Some(kind) => {
                let left: Vec<_> = devices.iter().map(|d| d.id().to_string()).collect();
                Err(Failure::Usage(format!(
                    "--require-device {kind} cannot be met: the devices in use are {}",
                    left.join(", ")
                )))
            }
        }
    }
}

/// Names as in `--backend`, but kinds only.
fn required(names: &[String], registry: &Registry) -> Result<Vec<DeviceKind>, Failure> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    if names.iter().all(|list| list.split(',').all(|n| n.trim().is_empty())) {
        return Err(Failure::Usage("--require-device names no backend".to_string()));
    }
    let fence = Fence::parse(names, None, registry)?;
    if let Some(one) = fence.named().iter().find(|n| n.ordinal.is_some()) {
        let kind = one.kind;
        return Err(Failure::Usage(format!("--require-device takes a kind such as '{kind}', not '{one}'")));
    }
    Ok(fence.named().iter().map(|n| n.kind).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, Failure> {
        Environment::from_variables(|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn environment() {
        assert_eq!(read(&[]).unwrap(), Environment::default());
        // Present counts, whatever the value.
        let disabled = read(&[("MINFER_DISABLE_CUDA", ""), ("MINFER_DISABLE_METAL", "0")]).unwrap().disabled;
        assert_eq!(disabled, [DeviceKind::Cuda, DeviceKind::Metal]);
        assert!(read(&[("MINFER_SYNC_COPIES", "1")]).unwrap().sync_copies);
        assert!(!read(&[("MINFER_SYNC_COPIES", "0")]).unwrap().sync_copies);
        let error = read(&[("MINFER_SYNC_COPIES", "maybe")]).unwrap_err();
        assert_eq!(error.to_string(), "MINFER_SYNC_COPIES is 'maybe'; it must be 1 or 0");
    }

    #[test]
    fn required_kinds() {
        let registry = Registry::new(&[minfer_cpu::DESCRIPTOR]).unwrap();
        let required = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            required(&names, &registry).map_err(|e| e.to_string())
        };
        assert_eq!(required(&[]), Ok(vec![]));
        assert_eq!(required(&["CPU"]), Ok(vec![DeviceKind::Cpu]));
        assert_eq!(required(&[","]), Err("--require-device names no backend".to_string()));
        let ordinal = "--require-device takes a kind such as 'cpu', not 'cpu:0'";
        assert_eq!(required(&["cpu:0"]), Err(ordinal.to_string()));
    }
}

//! `minfer backends`: every known kind, whether this build has it, whether this machine has it and why not,
//! and the devices in the order in which work is given to them.

use std::io::{Write, stdout};

use minfer_graph::DeviceKind;
use minfer_runtime::{BackendError, Device, Fence, Memory, OpenOptions, Registry, not_compiled};
use serde::Serialize;

use crate::args::BackendsArgs;
use crate::error::Failure;
use crate::{Context, units};

#[derive(Serialize)]
struct Report {
    /// In identity order.
    backends: Vec<Backend>,
    /// In order of assignment.
    devices: Vec<OpenDevice>,
}

#[derive(Serialize)]
struct Backend {
    number: u16,
    name: &'static str,
    compiled: bool,
    available: bool,
    /// Devices on this machine.
    count: u16,
    /// Why it is not compiled in or not available.
    why: Option<String>,
}

#[derive(Serialize)]
struct OpenDevice {
    id: String,
    description: String,
    /// Memory that may still be taken, or what is known instead of it.
    memory_bytes: Option<u64>,
    memory: String,
}

pub(crate) fn backends(args: &BackendsArgs, context: &Context) -> Result<(), Failure> {
    let options = OpenOptions { disabled: context.environment.disabled.clone(), ..OpenOptions::default() };
    let devices = context.registry.open(&Fence::all(), &options)?;
    let report = Report {
        backends: DeviceKind::ALL.iter().map(|&kind| backend(kind, &context.registry, &options)).collect(),
        devices: devices.iter().map(|d| device(&**d)).collect(),
    };
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { table(&report) };
    if let Some(list) = &context.environment.backends {
        crate::note(format_args!(
            "MINFER_BACKENDS is set: without --backend, models run on '{list}' and the CPU only"
        ));
    }
    stdout().write_all(text.as_bytes()).map_err(Failure::stdout)
}

fn backend(kind: DeviceKind, registry: &Registry, options: &OpenOptions) -> Backend {
    let compiled = registry.descriptor(kind).is_some();
    let (count, why) = match registry.count(kind, options) {
        Ok(count) => (count, None),
        Err(BackendError::Unavailable { why, .. }) => (0, Some(why)),
        Err(BackendError::NotCompiled { kind }) => (0, Some(not_compiled(kind).to_string())),
        Err(error) => (0, Some(error.to_string())),
    };
    Backend { number: kind.number(), name: kind.name(), compiled, available: count > 0, count, why }
}

fn device(device: &dyn Device) -> OpenDevice {
    let memory = device.memory();
    let memory_bytes = match memory {
        Memory::Available(bytes) => Some(bytes),
        Memory::Unbounded | Memory::QueryFailed(_) => None,
    };
    let memory = units::memory(&memory);
    OpenDevice { id: device.id().to_string(), description: device.describe(), memory_bytes, memory }
}

fn table(report: &Report) -> String {
    let mut text = format!("{:<4}{:<9}{:<10}available\n", "nr", "name", "compiled");
    for b in &report.backends {
        let available = match (&b.why, b.count) {
            (Some(why), _) => format!("no: {why}"),
            (None, n) => units::plural(n.into(), "device"),
        };
        let compiled = if b.compiled { "yes" } else { "no" };
        text.push_str(&format!("{:<4}{:<9}{compiled:<10}{available}\n", b.number, b.name));
    }
    text.push_str("\ndevices, most preferred first:\n");
    for d in &report.devices {
        text.push_str(&format!("  {:<9}{}; {}\n", d.id, d.description, d.memory));
    }
    text
}

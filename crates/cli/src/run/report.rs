//! What `--verbose` tells on stderr: devices, what they hold, and what was copied between them.

use std::sync::Arc;

use minfer_engine::{Engine, KvFormat};
use minfer_runtime::Device;

use crate::speculation::Choice;
use crate::{note, units, weights};

pub(crate) fn devices(devices: &[Arc<dyn Device>]) {
    for device in devices {
        let memory = units::memory(&device.memory());
        note(format_args!("device {}: {}; {memory}", device.id(), device.describe()));
    }
}

pub(crate) fn speculation(choice: Choice) {
    match choice {
        Choice::Off => {}
        Choice::OffBecause(why) => note(format_args!("speculation is off: {why}")),
        Choice::Head { depth } => {
            note(format_args!("speculating {} ahead with the draft head", units::plural(depth, "token")));
        }
    }
}

pub(crate) fn placement(engine: &Engine, kv: KvFormat) {
    let placed = engine.placed();
    let per_token = units::kv_bytes_per_token(&placed.graph.states, kv);
    let total = per_token.saturating_mul(engine.context() as u64);
    note(format_args!(
        "context {} tokens, keys and values in {}: {} per token, {} in all",
        engine.context(),
        kv.name(),
        units::bytes(per_token),
        units::bytes(total)
    ));
    let split = |n: usize| units::plural(n, "split");
    note(format_args!("graph: {} nodes in {}", placed.graph.nodes.len(), split(placed.splits.len())));
    for (d, device) in placed.devices.iter().enumerate() {
        let splits: Vec<_> = placed.splits.iter().filter(|s| s.device == d).collect();
        let nodes: usize = splits.iter().map(|s| s.nodes.len()).sum();
        note(format_args!(
            "  {}: {nodes} nodes in {}, weights {}",
            device.id(),
            split(splits.len()),
            units::bytes(weights::resident(placed, d))
        ));
    }
}

pub(crate) fn counters(engine: &Engine) {
    let c = engine.counters();
    note(format_args!(
        "copies {}, waits {}, deferred waits {}, blocking copies {}, async copies {}, event syncs {}, stream \
         waits {}, in-flight peak {}, stream syncs {}",
        c.copies,
        c.waits,
        c.deferred_waits,
        c.blocking_copies,
        c.async_copies,
        c.event_syncs,
        c.stream_waits,
        c.in_flight_peak,
        c.stream_syncs
    ));
}

//! Bringing weights and state to the devices: budget first, then allocation.

use std::collections::HashMap;
use std::sync::Arc;

use minfer_format::TensorBytes;
use minfer_graph::{StateId, WeightDecl, WeightId, WeightUse};
use thiserror::Error;

use crate::device::{Memory, StateBuffer, StateSpec, WeightHandle};
use crate::error::RuntimeError;
use crate::plan::{Placed, Plan};

/// A weight that its source cannot deliver, in the source's words.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct SourceError(pub String);

/// Where weights come from: a file, a directory, or a seed.
pub trait WeightSource {
    /// The bytes of a weight in the encoding that it declares.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    fn load(&self, decl: &WeightDecl) -> Result<TensorBytes, SourceError>;
}

/// Called while weights load: bytes of the file done, and in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Weights on their devices, by `(device, weight, use)`.
pub(super) type Weights = HashMap<(usize, WeightId, WeightUse), WeightHandle>;

/// What another executor on the same devices has already.
#[derive(Default)]
pub(super) struct Shared<'a> {
    /// By device, name and use.
    weights: HashMap<(usize, &'a str, WeightUse), WeightHandle>,
    states: Vec<&'a OpenState>,
}

impl<'a> Shared<'a> {
    /// The weights and states of an executor as another one may share them.
    pub(super) fn of(placed: &'a Placed, weights: &Weights, states: &'a States) -> Shared<'a> {
        let weight = |(&(d, w, how), handle): (&(usize, WeightId, WeightUse), &WeightHandle)| {
            ((d, placed.graph.weights[w.index()].name.as_str(), how), handle.clone())
        };
        Shared { weights: weights.iter().map(weight).collect(), states: states.iter().flatten().collect() }
    }

    fn weight(&self, device: usize, decl: &WeightDecl, how: WeightUse) -> Option<WeightHandle> {
        self.weights.get(&(device, decl.name.as_str(), how)).cloned()
    }

    /// State that is declared the same, name included.
    fn state(&self, device: usize, spec: &StateSpec) -> Option<&'a OpenState> {
        self.states.iter().copied().find(|s| s.device == device && s.spec == *spec)
    }
}

/// Which weights each device needs, in order of first use.
fn residents(placed: &Placed) -> Vec<(usize, WeightId, WeightUse)> {
    let mut seen = std::collections::HashSet::new();
    placed
        .splits
        .iter()
        .flat_map(|s| s.nodes.iter().map(|n| (s.device, &placed.graph.nodes[n.index()])))
        .filter_map(|(d, n)| n.weight_use().map(|(w, how)| (d, w, how)))
        .filter(|key| seen.insert(*key))
        .collect()
}

/// The device that holds each state: the one whose nodes use it.
fn state_devices(placed: &Placed) -> Vec<Option<usize>> {
    let user = |s: StateId| {
        placed
            .splits
            .iter()
            .find(|split| split.nodes.iter().any(|n| placed.graph.nodes[n.index()].state == Some(s)))
            .map(|split| split.device)
    };
    (0..placed.graph.states.len()).map(|s| user(StateId(s as u32))).collect()
}

/// Checks that weights, state and workspace fit every device before anything is allocated.
pub(super) fn check_budget(
    plan: &Plan,
    states: &[StateSpec],
    shared: &Shared<'_>,
) -> Result<(), RuntimeError> {
    let placed = &plan.placed;
    let homes = state_devices(placed);
    for (d, device) in placed.devices.iter().enumerate() {
        let overflow = |what: &str| RuntimeError::SizeOverflow { what: what.to_string() };
        let mut weights = 0u64;
        for (_, w, how) in residents(placed).into_iter().filter(|r| r.0 == d) {
            let decl = &placed.graph.weights[w.index()];
            if shared.weight(d, decl, how).is_some() {
                continue;
            }
            let bytes = device.weight_bytes(decl, how).ok_or_else(|| overflow(&decl.name))?;
            weights = weights.checked_add(bytes).ok_or_else(|| overflow("all weights"))?;
        }
        let mut state = 0u64;
        for spec in homes.iter().zip(states).filter(|(home, _)| **home == Some(d)).map(|(_, s)| s) {
            if shared.state(d, spec).is_some() {
                continue;
            }
            let bytes = spec.bytes().ok_or_else(|| overflow(&spec.decl.name))? as u64;
            state = state.checked_add(bytes).ok_or_else(|| overflow("all state"))?;
        }
        let workspace = plan.memory[d].bytes as u64;
        let needed = weights
            .checked_add(state)
            .and_then(|n| n.checked_add(workspace))
            .ok_or_else(|| overflow("memory"))?;
        if needed == 0 {
            // It takes no part: what it says about its memory does not matter.
            continue;
        }
        let available = match device.memory() {
            Memory::Unbounded => continue,
            Memory::Available(bytes) => bytes,
            Memory::QueryFailed(why) => return Err(RuntimeError::BudgetUnknown { device: device.id(), why }),
        };
        if needed > available {
            let mib = |b: u64| b.div_ceil(1 << 20);
            return Err(RuntimeError::OverBudget {
                device: device.id(),
                available: available >> 20,
                needed: mib(needed),
                weights: mib(weights),
                state: mib(state),
                workspace: mib(workspace),
            });
        }
    }
    Ok(())
}

pub(super) fn load_weights(
    placed: &Placed,
    source: &dyn WeightSource,
    shared: &Shared<'_>,
    progress: Progress<'_>,
) -> Result<Weights, RuntimeError> {
    let residents = residents(placed);
    let size = |w: WeightId| placed.graph.weights[w.index()].bytes().unwrap_or(0) as u64;
    let total = residents.iter().map(|r| size(r.1)).sum();
    let mut done = 0;
    let mut weights = Weights::new();
    for (d, w, how) in residents {
        let (decl, device) = (&placed.graph.weights[w.index()], &placed.devices[d]);
        if let Some(handle) = shared.weight(d, decl, how) {
            weights.insert((d, w, how), handle);
            done += size(w);
            continue;
        }
        let data = source.load(decl)?;
        let handle = device.load_weight(decl, how, data).map_err(|source| RuntimeError::Load {
            what: format!("weight '{}'", decl.name),
            device: device.id(),
            source,
        })?;
        weights.insert((d, w, how), handle);
        done += size(w);
        progress(done, total);
    }
    Ok(weights)
}

/// A piece of state on the device that holds it.
#[derive(Clone)]
pub(super) struct OpenState {
    pub(super) spec: StateSpec,
    /// Index of the device.
    pub(super) device: usize,
    pub(super) buffer: Arc<dyn StateBuffer>,
}

/// States by [`StateId`]; `None` where no node uses the state.
pub(super) type States = Vec<Option<OpenState>>;

pub(super) fn open_states(
    placed: &Placed,
    specs: &[StateSpec],
    shared: &Shared<'_>,
) -> Result<States, RuntimeError> {
    let homes = state_devices(placed);
    homes
        .iter()
        .zip(specs)
        .map(|(home, spec)| {
            let Some(d) = *home else { return Ok(None) };
            if let Some(state) = shared.state(d, spec) {
                return Ok(Some(state.clone()));
            }
            let device = &placed.devices[d];
            let buffer = device.open_state(spec).map_err(|source| RuntimeError::Load {
                what: format!("state '{}'", spec.decl.name),
                device: device.id(),
                source,
            })?;
            Ok(Some(OpenState { spec: spec.clone(), device: d, buffer }))
        })
        .collect()
}

//! The executor: owns what a placed graph needs to run, and runs steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use minfer_graph::{Bind, Dim, Input, ValueId};

use super::load::{Progress, Shared, States, WeightSource, Weights, check_budget, load_weights, open_states};
use super::transfer::{Arrived, Destination, Transfers};
use crate::counters::Counters;
use crate::device::{Arena, DeviceError, Program, ProgramSpec, Region, StateSpec, WaitError};
use crate::error::RuntimeError;
use crate::plan::{Placed, Plan, Send, bucket};

/// How an executor runs.
#[derive(Clone, Debug)]
pub struct ExecutorOptions {
    /// Largest step.
    pub max: Bind,
    /// Host waits on a device end after this, with an error that names the wait.
    pub wait_timeout: Duration,
    /// The blocking reference path (`--sync-copies`); results are bit-identical.
    pub sync_copies: bool,
}

/// A plan with its compiled programs, one per split.
struct Compiled {
    plan: Plan,
    programs: Vec<Box<dyn Program>>,
}

/// Results of a step, in the order of the graph's outputs.
#[derive(Default)]
pub struct StepOutputs {
    values: Vec<(&'static str, Vec<u8>)>,
}

impl StepOutputs {
    /// A result as little-endian bytes.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.values.iter().find(|v| v.0 == name).map(|v| v.1.as_slice())
    }
}

/// Runs steps of one placed graph. Two executors share nothing but the devices that they were given.
pub struct Executor {
    pub(super) placed: Arc<Placed>,
    pub(super) options: ExecutorOptions,
    weights: Weights,
    pub(super) states: States,
    arenas: Vec<Arc<dyn Arena>>,
    compiled: BTreeMap<Bind, Compiled>,
    transfers: Transfers,
    counters: Counters,
    outputs: StepOutputs,
    /// Set when a device did not come back after an error.
    broken: Option<(minfer_graph::DeviceId, String)>,
}

impl Executor {
    /// Checks the budget, then loads weights and allocates state and workspace.
    ///
    /// # Errors
    /// Too little memory (with the numbers), a source that fails, or a device that refuses.
    pub fn open(
        placed: Placed,
        states: &[StateSpec],
        source: &dyn WeightSource,
        options: ExecutorOptions,
        progress: Progress<'_>,
    ) -> Result<Executor, RuntimeError> {
        Executor::open_with(placed, states, source, options, &Shared::default(), progress)
    }

    /// Opens an executor on the same devices that uses this one's weights where names and uses are equal, and its
    /// states where names and shapes are: a draft head shares the embedding and the output matrix with its
    /// model, and some heads read state that the model writes.
    ///
    /// # Errors
    /// As [`Executor::open`].
    pub fn open_beside(
        &self,
        placed: Placed,
        states: &[StateSpec],
        source: &dyn WeightSource,
        options: ExecutorOptions,
        progress: Progress<'_>,
    ) -> Result<Executor, RuntimeError> {
        let ids = |p: &Placed| p.devices.iter().map(|d| d.id()).collect::<Vec<_>>();
        let same_devices = ids(&placed) == ids(&self.placed);
        let shared = match same_devices {
            true => Shared::of(&self.placed, &self.weights, &self.states),
            false => Shared::default(),
        };
        Executor::open_with(placed, states, source, options, &shared, progress)
    }

    fn open_with(
        placed: Placed,
        states: &[StateSpec],
        source: &dyn WeightSource,
        options: ExecutorOptions,
        shared: &Shared<'_>,
        progress: Progress<'_>,
    ) -> Result<Executor, RuntimeError> {
        if states.len() != placed.graph.states.len() {
            let (got, want) = (states.len(), placed.graph.states.len());
            return Err(RuntimeError::Internal(format!("{got} states for a graph with {want}")));
        }
        let placed = Arc::new(placed);
        let largest = Plan::new(placed.clone(), options.max)?;
        check_budget(&largest, states, shared)?;
        let weights = load_weights(&placed, source, shared, progress)?;
        let states = open_states(&placed, states, shared)?;
        let mut arenas = Vec::new();
        for (device, memory) in placed.devices.iter().zip(&largest.memory) {
            let arena = device.open_arena(memory.bytes);
            arenas.push(arena.map_err(|e| device_error("allocating workspace", device.id(), e))?);
        }
        Ok(Executor {
            placed,
            options,
            weights,
            states,
            arenas,
            compiled: BTreeMap::new(),
            transfers: Transfers::default(),
            counters: Counters::default(),
            outputs: StepOutputs::default(),
            broken: None,
        })
    }

    /// The placed graph.
    pub fn placed(&self) -> &Placed {
        &self.placed
    }

    /// Counters since opening.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Number of plans built so far: one per bucket.
    pub fn plan_count(&self) -> usize {
        self.compiled.len()
    }

    /// Runs one step. `inputs` names every input of the graph, f32 inputs by their bits; an input of constant
    /// size may be shorter than its capacity.
    ///
    /// # Errors
    /// After an error the next step starts clean, unless a device did not come back, which is an error of
    /// its own from then on.
    pub fn execute(&mut self, bind: Bind, inputs: &[(&str, &[i32])]) -> Result<&StepOutputs, RuntimeError> {
        if let Some((device, why)) = &self.broken {
            return Err(RuntimeError::Broken { device: *device, why: why.clone() });
        }
        let result = self.run(bind, inputs);
        if let Err(error) = result {
            self.recover();
            return Err(error);
        }
        Ok(&self.outputs)
    }

    fn run(&mut self, bind: Bind, inputs: &[(&str, &[i32])]) -> Result<(), RuntimeError> {
        let max = self.options.max;
        if bind.rows == 0 || bind.rows > max.rows || bind.outs > max.outs {
            return Err(RuntimeError::StepTooLarge {
                rows: bind.rows,
                outs: bind.outs,
                max_rows: max.rows,
                max_outs: max.outs,
            });
        }
        let key = bucket(bind, max);
        if !self.compiled.contains_key(&key) {
            let compiled = self.compile(key)?;
            self.compiled.insert(key, compiled);
        }
        // Taken out so that programs and the rest of `self` can be borrowed apart.
        let Some(mut compiled) = self.compiled.remove(&key) else {
            return Err(RuntimeError::Internal("the plan that was just built is gone".to_string()));
        };
        self.transfers.begin();
        let result = self.run_compiled(&mut compiled, bind, inputs);
        self.compiled.insert(key, compiled);
        result
    }

    fn compile(&self, bound: Bind) -> Result<Compiled, RuntimeError> {
        let mut plan = Plan::new(self.placed.clone(), bound)?;
        // A smaller bucket may pack a little worse than the largest step, whose layout serves it as well:
        // the budget was checked for that one, and no arena has to grow.
        if plan.memory.iter().zip(&self.arenas).any(|(memory, arena)| memory.bytes > arena.bytes()) {
            plan = Plan { bound, ..Plan::new(self.placed.clone(), self.options.max)? };
        }
        let mut programs = Vec::new();
        for split in &self.placed.splits {
            let device = &self.placed.devices[split.device];
            let spec = ProgramSpec {
                graph: &self.placed.graph,
                nodes: &split.nodes,
                bound,
                region: &|v| plan.memory[split.device].region(v),
                weight: &|w, how| self.weights.get(&(split.device, w, how)).cloned(),
                state: &|s| Some(self.states.get(s.index())?.as_ref()?.buffer.clone()),
            };
            let program = device.compile(&spec);
            programs.push(program.map_err(|e| device_error("compiling a split", device.id(), e))?);
        }
        Ok(Compiled { plan, programs })
    }

    fn run_compiled(
        &mut self,
        compiled: &mut Compiled,
        bind: Bind,
        inputs: &[(&str, &[i32])],
    ) -> Result<(), RuntimeError> {
        self.upload(&compiled.plan, bind, inputs)?;
        let placed = self.placed.clone();
        for (split, program) in placed.splits.iter().zip(&mut compiled.programs) {
            for &value in &split.receives {
                self.arrive(&compiled.plan, Send { value, to: split.device }, true)?;
            }
            let expected = split.receives.iter().map(|&value| Send { value, to: split.device });
            let arrived = self.transfers.arrived(expected);
            let arrived = arrived.map_err(|e| self.wait_error("a staged value", split.device, e))?;
            self.launch(split.device, program.as_mut(), bind, arrived)?;
            for &send in &split.sends {
                self.send(&compiled.plan, split.device, send, bind)?;
            }
        }
        for send in self.transfers.in_flight() {
            self.arrive(&compiled.plan, send, false)?;
        }
        self.read_outputs(&compiled.plan, bind)
    }

    fn launch(
        &mut self,
        device: usize,
        program: &mut dyn Program,
        bind: Bind,
        arrived: Arrived,
    ) -> Result<(), RuntimeError> {
        if arrived.epoch != self.transfers.epoch() {
            return Err(RuntimeError::Internal("a proof of arrival from another execution".to_string()));
        }
        let result = program.run(&self.arenas[device], bind);
        result.map_err(|e| device_error("running a split", self.placed.devices[device].id(), e))
    }

    fn send(&mut self, plan: &Plan, from: usize, send: Send, bind: Bind) -> Result<(), RuntimeError> {
        let device = self.placed.devices[from].clone();
        let region = self.value_region(plan, from, send.value, bind)?;
        if self.options.sync_copies && device.is_async() {
            self.synchronize(from)?;
        }
        let enqueued = self.transfers.enqueue(
            send,
            self.arenas[from].as_ref(),
            region,
            device.is_async() && !self.options.sync_copies,
            &mut self.counters,
        );
        enqueued.map_err(|e| device_error("enqueueing a copy", device.id(), e))?;
        if self.options.sync_copies {
            self.counters.blocking_copies += u64::from(device.is_async());
            self.arrive(plan, send, false)?;
            if self.placed.devices[send.to].is_async() {
                self.synchronize(send.to)?;
            }
        }
        Ok(())
    }

    fn arrive(&mut self, plan: &Plan, send: Send, deferred: bool) -> Result<(), RuntimeError> {
        let to = Destination {
            arena: self.arenas[send.to].as_ref(),
            region: region(plan, send.to, send.value)?,
            is_async: self.placed.devices[send.to].is_async(),
        };
        let timeout = self.options.wait_timeout;
        let result = self.transfers.arrive(send, &to, timeout, deferred, &mut self.counters);
        result.map_err(|e| {
            let value = &self.placed.graph.values[send.value.index()];
            let from = self.producer_device(send.value).unwrap_or(send.to);
            self.wait_error(&format!("value {} '{}' ({})", send.value.0, value.name, value.ty), from, e)
        })
    }

    fn upload(&mut self, plan: &Plan, bind: Bind, inputs: &[(&str, &[i32])]) -> Result<(), RuntimeError> {
        if let Some((name, _)) =
            inputs.iter().find(|i| !self.placed.graph.inputs.iter().any(|g| g.name == i.0))
        {
            let why = "is not an input of the graph".to_string();
            return Err(RuntimeError::Input { name: name.to_string(), why });
        }
        for input in &self.placed.graph.inputs {
            let data = inputs.iter().find(|i| i.0 == input.name).map(|i| i.1);
            let data = data.ok_or_else(|| input_error(input, "is not bound".to_string()))?;
            self.check_length(input, data.len(), bind)?;
            for (d, memory) in plan.memory.iter().enumerate() {
                let Some(region) = memory.region(input.value) else { continue };
                let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
                let written = self.arenas[d].write(region.offset, &bytes);
                let id = self.placed.devices[d].id();
                written.map_err(|e| device_error(&format!("writing input '{}'", input.name), id, e))?;
            }
        }
        Ok(())
    }

    fn check_length(&self, input: &Input, len: usize, bind: Bind) -> Result<(), RuntimeError> {
        let shape = &self.placed.graph.ty(input.value).shape;
        let want = bind.len(shape.lead) * shape.width();
        let fits = match shape.lead {
            Dim::Const(_) => len <= want,
            _ => len == want,
        };
        if fits {
            Ok(())
        } else {
            Err(input_error(input, format!("has {len} numbers, the step takes {want}")))
        }
    }

    /// Results to the host; devices whose work nobody read are waited for, so that errors surface here.
    fn read_outputs(&mut self, plan: &Plan, bind: Bind) -> Result<(), RuntimeError> {
        let placed = self.placed.clone();
        let mut read_from = vec![false; placed.devices.len()];
        self.outputs.values.resize_with(placed.graph.outputs.len(), Default::default);
        for (i, output) in placed.graph.outputs.iter().enumerate() {
            let Some(d) = self.producer_device(output.value) else {
                return Err(RuntimeError::Internal(format!("output '{}' has no producer", output.name)));
            };
            let region = self.value_region(plan, d, output.value, bind)?;
            let readback = self.arenas[d].read(region);
            let readback =
                readback.map_err(|e| device_error("reading results", placed.devices[d].id(), e))?;
            let bytes = readback.wait(self.options.wait_timeout);
            let bytes = bytes.map_err(|e| self.wait_error(output.name, d, e))?;
            let slot = &mut self.outputs.values[i];
            slot.0 = output.name;
            slot.1.clear();
            slot.1.extend_from_slice(bytes);
            read_from[d] = true;
        }
        for (d, device) in placed.devices.iter().enumerate() {
            if device.is_async() && !read_from[d] && placed.splits.iter().any(|s| s.device == d) {
                self.synchronize(d)?;
            }
        }
        Ok(())
    }

    fn synchronize(&mut self, d: usize) -> Result<(), RuntimeError> {
        self.counters.stream_syncs += 1;
        let result = self.placed.devices[d].synchronize(self.options.wait_timeout);
        result.map_err(|e| self.wait_error("the device's stream", d, e))
    }

    /// After an error: lets every stream run dry, so that nothing of this execution reaches the next one.
    pub(super) fn recover(&mut self) {
        for device in self.placed.devices.iter().filter(|d| d.is_async()) {
            if let Err(error) = device.recover(self.options.wait_timeout) {
                self.broken.get_or_insert((device.id(), error.to_string()));
            }
        }
        self.transfers.begin();
    }

    fn producer_device(&self, v: ValueId) -> Option<usize> {
        let node = self.placed.graph.nodes.iter().find(|n| n.outputs.contains(&v))?;
        self.placed.devices.iter().position(|d| Some(d.id()) == node.place)
    }

    /// The part of a value's region that this step fills.
    fn value_region(&self, plan: &Plan, d: usize, v: ValueId, bind: Bind) -> Result<Region, RuntimeError> {
        let whole = region(plan, d, v)?;
        Ok(Region { bytes: self.placed.graph.ty(v).bytes(&bind), ..whole })
    }

    pub(super) fn wait_error(&self, what: &str, device: usize, source: WaitError) -> RuntimeError {
        RuntimeError::Wait { what: what.to_string(), device: self.placed.devices[device].id(), source }
    }
}

fn region(plan: &Plan, device: usize, v: ValueId) -> Result<Region, RuntimeError> {
    plan.memory[device]
        .region(v)
        .ok_or_else(|| RuntimeError::Internal(format!("value {} has no memory on device {device}", v.0)))
}

fn input_error(input: &Input, why: String) -> RuntimeError {
    RuntimeError::Input { name: input.name.to_string(), why }
}

pub(super) fn device_error(what: &str, device: minfer_graph::DeviceId, source: DeviceError) -> RuntimeError {
    RuntimeError::Device { what: what.to_string(), device, source }
}

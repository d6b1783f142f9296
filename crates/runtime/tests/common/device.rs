//! A device with configurable identity, operations, speed, memory, faults and timing, whose arenas, weights
//! and state are its own: a handle of another device is refused.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use minfer_format::{BlockType, TensorBytes};
use minfer_graph::{Bind, DeviceId, DeviceKind, Graph, Node, WeightDecl, WeightUse};
use minfer_runtime::{
    Arena, Device, DeviceError, KvFormat, Memory, Program, ProgramSpec, ReadBack, Region, Speed, StateBuffer,
    StateSpec, WaitError, WeightHandle,
};

use super::ops::{Rows, Step, implements};
use super::stream::{Bytes, Command, Event, Fault, Shared, Slot, Stream};

/// Which nodes a device takes.
pub type Takes = Arc<dyn Fn(&Node) -> bool + Send + Sync>;

/// Every node.
pub fn everything() -> Takes {
    Arc::new(|_| true)
}

/// Nodes with these operations.
pub fn only(names: &'static [&'static str]) -> Takes {
    Arc::new(move |n| names.contains(&n.op.name()))
}

/// How a device behaves.
#[derive(Clone)]
pub struct Config {
    pub id: DeviceId,
    /// Whether the stream has a thread of its own.
    pub asynchronous: bool,
    pub takes: Takes,
    pub kv: Vec<KvFormat>,
    pub memory: Memory,
    pub speed: Speed,
    pub delay: Duration,
    /// Whether a hanging stream goes on when the host recovers.
    pub release_on_recover: bool,
}

impl Config {
    pub fn build(self) -> Arc<TestDevice> {
        let shared = Arc::new(Shared::new(self.id, self.delay));
        let stream = Stream::new(shared.clone(), self.asynchronous);
        Arc::new(TestDevice { config: self, shared, stream })
    }
}

/// The host's processor: synchronous, takes everything.
pub fn cpu() -> Config {
    Config {
        id: DeviceId::CPU,
        asynchronous: false,
        takes: everything(),
        kv: vec![KvFormat::F32, KvFormat::F16],
        memory: Memory::Unbounded,
        speed: Speed { bytes_per_second: 1e9, copy_latency: 0.0, copy_bytes_per_second: 1e9 },
        delay: Duration::ZERO,
        release_on_recover: false,
    }
}

/// An asynchronous device, so fast and so cheap to reach that no island is worth moving.
pub fn gpu(kind: DeviceKind, ordinal: u16, takes: Takes) -> Config {
    Config {
        id: DeviceId::new(kind, ordinal),
        asynchronous: true,
        takes,
        speed: Speed { bytes_per_second: 1e15, copy_latency: 1e-15, copy_bytes_per_second: 1e18 },
        ..cpu()
    }
}

/// See the module.
pub struct TestDevice {
    config: Config,
    pub shared: Arc<Shared>,
    stream: Arc<Stream>,
}

impl TestDevice {
    pub fn arm(&self, fault: Fault, passes: usize) {
        self.shared.arm(fault, passes);
    }

    pub fn events(&self) -> Vec<Event> {
        self.shared.events()
    }

    /// How many events are like this one.
    pub fn count(&self, like: impl Fn(&Event) -> bool) -> usize {
        self.events().iter().filter(|e| like(e)).count()
    }

    fn idle(&self, timeout: Duration, forget: bool) -> Result<(), WaitError> {
        let slot = Slot::new(&self.shared);
        self.stream.submit(Command::Idle { slot: slot.clone(), forget })?;
        slot.wait(timeout).map(|_| ())
    }
}

impl Drop for TestDevice {
    fn drop(&mut self) {
        self.shared.release();
    }
}

struct Weight {
    owner: Arc<Stream>,
    numbers: Arc<Vec<f32>>,
}

struct State {
    owner: Arc<Stream>,
    rows: Arc<Rows>,
}

impl StateBuffer for State {
    fn copy_page(&self, from: u32, to: u32) -> Result<(), DeviceError> {
        self.rows.copy_page(from as usize, to as usize);
        Ok(())
    }

    fn read(&self, unit: u32, rows: usize) -> Result<Arc<dyn ReadBack>, DeviceError> {
        self.owner.shared.check(Fault::Enqueue)?;
        let slot = Slot::new(&self.owner.shared);
        let state = self.rows.clone();
        self.owner.submit(Command::ReadState { state, page: unit as usize, rows, slot: slot.clone() })?;
        Ok(slot)
    }

    fn write(&self, unit: u32, rows: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.owner.shared.check(Fault::Write)?;
        let (state, bytes) = (self.rows.clone(), bytes.to_vec());
        self.owner.submit(Command::WriteState { state, page: unit as usize, rows, bytes })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct TestArena {
    memory: Bytes,
    bytes: usize,
    stream: Arc<Stream>,
}

impl TestArena {
    fn inside(&self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.bytes);
        end.map(|_| ()).ok_or_else(|| DeviceError::Failed(format!("{bytes} bytes at {offset} are outside")))
    }
}

impl Arena for TestArena {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.inside(offset, bytes.len())?;
        self.stream.shared.check(Fault::Write)?;
        self.stream.submit(Command::Write { memory: self.memory.clone(), offset, bytes: bytes.to_vec() })
    }

    fn read(&self, region: Region) -> Result<Arc<dyn ReadBack>, DeviceError> {
        self.inside(region.offset, region.bytes)?;
        self.stream.shared.log(Event::Read(region.bytes));
        self.stream.shared.check(Fault::Enqueue)?;
        let slot = Slot::new(&self.stream.shared);
        self.stream.submit(Command::Read { memory: self.memory.clone(), region, slot: slot.clone() })?;
        Ok(slot)
    }

    fn receive(
        &self,
        offset: usize,
        len: usize,
        source: Arc<dyn ReadBack>,
        timeout: Duration,
    ) -> Result<(), WaitError> {
        self.inside(offset, len)?;
        self.stream.shared.log(Event::Receive(len));
        self.stream.shared.check(Fault::Receive)?;
        let memory = self.memory.clone();
        if self.stream.is_async() {
            return Ok(self.stream.submit(Command::Receive { memory, offset, len, source, timeout })?);
        }
        memory.lock().unwrap()[offset..offset + len].copy_from_slice(source.wait(timeout)?);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct TestProgram {
    steps: Arc<Vec<Step>>,
    bound: Bind,
    stream: Arc<Stream>,
}

impl Program for TestProgram {
    fn run(&mut self, arena: &Arc<dyn Arena>, bind: Bind) -> Result<(), DeviceError> {
        assert!(bind.rows <= self.bound.rows && bind.outs <= self.bound.outs, "{bind:?} over the bound");
        let arena = arena.as_any().downcast_ref::<TestArena>();
        let arena = arena.filter(|a| Arc::ptr_eq(&a.stream, &self.stream)).ok_or_else(foreign)?;
        self.stream.shared.log(Event::Launch);
        self.stream.shared.check(Fault::Launch)?;
        let (memory, steps) = (arena.memory.clone(), self.steps.clone());
        self.stream.submit(Command::Run { memory, steps, bind })
    }
}

fn foreign() -> DeviceError {
    DeviceError::Unsupported("a handle of another device".to_string())
}

impl Device for TestDevice {
    fn id(&self) -> DeviceId {
        self.config.id
    }

    fn describe(&self) -> String {
        format!("test device {}", self.config.id)
    }

    fn supports(&self, graph: &Graph, node: &Node) -> bool {
        let plain = node.weight.is_none_or(|w| graph.weights[w.index()].ty == BlockType::F32);
        plain && implements(&node.op) && (self.config.takes)(node)
    }

    fn reads_kv(&self, format: KvFormat) -> bool {
        self.config.kv.contains(&format)
    }

    fn memory(&self) -> Memory {
        self.config.memory.clone()
    }

    fn speed(&self) -> Speed {
        self.config.speed
    }

    fn is_async(&self) -> bool {
        self.config.asynchronous
    }

    fn weight_bytes(&self, decl: &WeightDecl, _how: WeightUse) -> Option<u64> {
        decl.bytes().map(|b| b as u64)
    }

    fn load_weight(
        &self,
        decl: &WeightDecl,
        _how: WeightUse,
        data: TensorBytes,
    ) -> Result<WeightHandle, DeviceError> {
        self.shared.log(Event::Weight(decl.name.clone()));
        self.shared.check(Fault::WeightLoad)?;
        let numbers = data.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
        Ok(Arc::new(Weight { owner: self.stream.clone(), numbers: Arc::new(numbers) }))
    }

    fn open_state(&self, spec: &StateSpec) -> Result<Arc<dyn StateBuffer>, DeviceError> {
        self.shared.log(Event::State(spec.decl.name.clone()));
        self.shared.check(Fault::State)?;
        Ok(Arc::new(State { owner: self.stream.clone(), rows: Arc::new(Rows::new(spec)) }))
    }

    /// The memory starts as nonsense, so that reading what nobody wrote shows.
    fn open_arena(&self, bytes: usize) -> Result<Arc<dyn Arena>, DeviceError> {
        self.shared.log(Event::Arena(bytes));
        self.shared.check(Fault::Arena)?;
        let memory = Arc::new(Mutex::new(vec![0xA5; bytes]));
        Ok(Arc::new(TestArena { memory, bytes, stream: self.stream.clone() }))
    }

    fn compile(&self, spec: &ProgramSpec<'_>) -> Result<Box<dyn Program>, DeviceError> {
        self.shared.log(Event::Compile(spec.nodes.len()));
        self.shared.check(Fault::Compile)?;
        let weight = |spec: &ProgramSpec<'_>, node: usize| {
            let Some((id, how)) = spec.graph.nodes[node].weight_use() else { return Ok(None) };
            let handle = (spec.weight)(id, how).and_then(|h| h.downcast::<Weight>().ok());
            let own = handle.filter(|w| Arc::ptr_eq(&w.owner, &self.stream)).ok_or_else(foreign)?;
            Ok(Some(own.numbers.clone()))
        };
        let state = |spec: &ProgramSpec<'_>, node: usize| {
            let Some(id) = spec.graph.nodes[node].state else { return Ok(None) };
            let handle = (spec.state)(id).ok_or_else(foreign)?;
            let state = handle.as_any().downcast_ref::<State>();
            let own = state.filter(|s| Arc::ptr_eq(&s.owner, &self.stream)).ok_or_else(foreign)?;
            Ok(Some(own.rows.clone()))
        };
        let steps = Arc::new(Step::compile(spec, weight, state)?);
        Ok(Box::new(TestProgram { steps, bound: spec.bound, stream: self.stream.clone() }))
    }

    fn synchronize(&self, timeout: Duration) -> Result<(), WaitError> {
        self.shared.log(Event::Synchronize);
        self.idle(timeout, false)
    }

    fn recover(&self, timeout: Duration) -> Result<(), WaitError> {
        self.shared.log(Event::Recover);
        if self.config.release_on_recover {
            self.shared.release();
        }
        self.idle(timeout, true)
    }
}

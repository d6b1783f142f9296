//! A CPU device whose programs and whose accesses to state fail on demand.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use minfer_cpu::{CpuDevice, Isa};
use minfer_format::TensorBytes;
use minfer_graph::{Bind, DeviceId, Graph, Node, WeightDecl, WeightUse};
use minfer_runtime::{
    Arena, Device, DeviceError, KvFormat, Memory, Program, ProgramSpec, ReadBack, Speed, StateBuffer,
    StateSpec, WaitError, WeightHandle,
};

/// What fails next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A program, before it does anything.
    Before,
    /// A program, after the first half of its nodes.
    Halfway,
    /// A program that has done all its work.
    After,
    /// The copy of a page, before it is made.
    CopyPage,
    /// A unit of state on its way to the host.
    ReadState,
    /// A unit of state on its way back, when half of it is written.
    WriteState,
}

impl Fault {
    /// Those that a step can meet.
    pub const OF_STEPS: [Fault; 4] = [Fault::Before, Fault::Halfway, Fault::After, Fault::CopyPage];

    pub const fn name(self) -> &'static str {
        match self {
            Fault::Before => "before running",
            Fault::Halfway => "halfway",
            Fault::After => "after running",
            Fault::CopyPage => "copying a page",
            Fault::ReadState => "reading state",
            Fault::WriteState => "writing state",
        }
    }
}

/// Holds the next fault; a fault happens once.
#[derive(Clone, Default)]
pub struct Switch(Arc<Mutex<Option<(Fault, usize)>>>);

impl Switch {
    pub fn arm(&self, fault: Fault) {
        self.arm_after(fault, 0);
    }

    /// After so many times that went well.
    pub fn arm_after(&self, fault: Fault, passes: usize) {
        *self.0.lock().unwrap() = Some((fault, passes));
    }

    pub fn disarm(&self) {
        *self.0.lock().unwrap() = None;
    }

    pub fn is_armed(&self) -> bool {
        self.0.lock().unwrap().is_some()
    }

    /// Takes the fault if it is one of these.
    fn take(&self, kinds: &[Fault]) -> Option<Fault> {
        let now = |(fault, passes): &mut (Fault, usize)| {
            let now = kinds.contains(fault) && *passes == 0;
            *passes -= usize::from(kinds.contains(fault) && !now);
            now
        };
        self.0.lock().unwrap().take_if(now).map(|armed| armed.0)
    }
}

fn failed() -> DeviceError {
    DeviceError::Failed("injected".to_string())
}

struct FlakyState(Arc<dyn StateBuffer>, Switch, StateSpec);

impl StateBuffer for FlakyState {
    fn copy_page(&self, from: u32, to: u32) -> Result<(), DeviceError> {
        match self.1.take(&[Fault::CopyPage]) {
            Some(_) => Err(failed()),
            None => self.0.copy_page(from, to),
        }
    }
    fn read(&self, unit: u32, rows: usize) -> Result<Arc<dyn ReadBack>, DeviceError> {
        match self.1.take(&[Fault::ReadState]) {
            Some(_) => Err(failed()),
            None => self.0.read(unit, rows),
        }
    }
    fn write(&self, unit: u32, rows: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        if self.1.take(&[Fault::WriteState]).is_none() {
            return self.0.write(unit, rows, bytes);
        }
        if rows > 1 {
            let half = self.2.unit_bytes(unit, rows / 2).unwrap();
            self.0.write(unit, rows / 2, &bytes[..half])?;
        }
        Err(failed())
    }
    fn as_any(&self) -> &dyn Any {
        self.0.as_any()
    }
}

struct FlakyProgram {
    whole: Box<dyn Program>,
    half: Box<dyn Program>,
    switch: Switch,
}

impl Program for FlakyProgram {
    fn run(&mut self, arena: &Arc<dyn Arena>, bind: Bind) -> Result<(), DeviceError> {
        let fault = self.switch.take(&[Fault::Before, Fault::Halfway, Fault::After]);
        match fault {
            None => return self.whole.run(arena, bind),
            Some(Fault::Halfway) => self.half.run(arena, bind)?,
            Some(Fault::After) => self.whole.run(arena, bind)?,
            Some(_) => {}
        }
        Err(failed())
    }
}

/// The CPU on one thread, with faults.
pub struct Flaky {
    cpu: CpuDevice,
    switch: Switch,
}

impl Flaky {
    pub fn new(switch: &Switch) -> Flaky {
        Flaky { cpu: CpuDevice::new(1, Isa::detect()).unwrap(), switch: switch.clone() }
    }
}

impl Device for Flaky {
    fn id(&self) -> DeviceId {
        self.cpu.id()
    }
    fn describe(&self) -> String {
        self.cpu.describe()
    }
    fn supports(&self, graph: &Graph, node: &Node) -> bool {
        self.cpu.supports(graph, node)
    }
    fn reads_kv(&self, format: KvFormat) -> bool {
        self.cpu.reads_kv(format)
    }
    fn memory(&self) -> Memory {
        self.cpu.memory()
    }
    fn speed(&self) -> Speed {
        self.cpu.speed()
    }
    fn is_async(&self) -> bool {
        self.cpu.is_async()
    }
    fn weight_bytes(&self, decl: &WeightDecl, how: WeightUse) -> Option<u64> {
        self.cpu.weight_bytes(decl, how)
    }
    fn load_weight(
        &self,
        decl: &WeightDecl,
        how: WeightUse,
        data: TensorBytes,
    ) -> Result<WeightHandle, DeviceError> {
        self.cpu.load_weight(decl, how, data)
    }
    fn open_state(&self, spec: &StateSpec) -> Result<Arc<dyn StateBuffer>, DeviceError> {
        Ok(Arc::new(FlakyState(self.cpu.open_state(spec)?, self.switch.clone(), spec.clone())))
    }
    fn open_arena(&self, bytes: usize) -> Result<Arc<dyn Arena>, DeviceError> {
        self.cpu.open_arena(bytes)
    }
    fn compile(&self, spec: &ProgramSpec<'_>) -> Result<Box<dyn Program>, DeviceError> {
        let half = ProgramSpec { nodes: &spec.nodes[..spec.nodes.len() / 2], ..*spec };
        let (whole, half) = (self.cpu.compile(spec)?, self.cpu.compile(&half)?);
        Ok(Box::new(FlakyProgram { whole, half, switch: self.switch.clone() }))
    }
    fn synchronize(&self, timeout: Duration) -> Result<(), WaitError> {
        self.cpu.synchronize(timeout)
    }
    fn recover(&self, timeout: Duration) -> Result<(), WaitError> {
        self.cpu.recover(timeout)
    }
}

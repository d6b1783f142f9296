//! The stream of a test device: commands in order, inline or on a thread of its own, with faults, a gate
//! at which the thread can be made to hang, and a log of what the host asked for.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use minfer_graph::{Bind, DeviceId};
use minfer_runtime::{DeviceError, ReadBack, Region, WaitError};

use super::ops::{Rows, Step};

/// Where a test device can be told to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    WeightLoad,
    State,
    Arena,
    Compile,
    /// Writing an input.
    Write,
    /// Enqueueing a program.
    Launch,
    /// Enqueueing a copy to the host.
    Enqueue,
    /// Enqueueing the receipt of a value.
    Receive,
    /// On the stream, while a program runs.
    Run,
    /// On the stream, while a copy to the host is made.
    Read,
    /// On the stream: a program that does not end until the gate is opened.
    Hang,
}

/// What the host asked a device for, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Weight(String),
    State(String),
    Arena(usize),
    Compile(usize),
    Launch,
    Read(usize),
    /// Bytes of the value received.
    Receive(usize),
    Synchronize,
    Recover,
}

/// What the device and its stream share.
pub struct Shared {
    pub id: DeviceId,
    /// Pause before each program, so that races show.
    pub delay: Duration,
    log: Mutex<Vec<Event>>,
    /// Faults with the number of occasions that still pass.
    faults: Mutex<Vec<(Fault, usize)>>,
    open: Mutex<bool>,
    opened: Condvar,
    queued: AtomicUsize,
}

impl Shared {
    pub fn new(id: DeviceId, delay: Duration) -> Shared {
        Shared {
            id,
            delay,
            log: Mutex::default(),
            faults: Mutex::default(),
            open: Mutex::new(false),
            opened: Condvar::new(),
            queued: AtomicUsize::new(0),
        }
    }

    pub fn log(&self, event: Event) {
        self.log.lock().unwrap().push(event);
    }

    pub fn events(&self) -> Vec<Event> {
        self.log.lock().unwrap().clone()
    }

    /// Fails once, after `passes` more occasions.
    pub fn arm(&self, fault: Fault, passes: usize) {
        self.faults.lock().unwrap().push((fault, passes));
    }

    /// Whether every armed fault has struck.
    pub fn all_struck(&self) -> bool {
        self.faults.lock().unwrap().is_empty()
    }

    pub fn strikes(&self, fault: Fault) -> bool {
        let mut faults = self.faults.lock().unwrap();
        let Some(i) = faults.iter().position(|f| f.0 == fault) else { return false };
        if faults[i].1 > 0 {
            faults[i].1 -= 1;
            return false;
        }
        faults.remove(i);
        true
    }

    pub fn check(&self, fault: Fault) -> Result<(), DeviceError> {
        if self.strikes(fault) { Err(injected(fault)) } else { Ok(()) }
    }

    /// Lets a hanging stream go on, now and later.
    pub fn release(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn hang(&self) {
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
    }

    fn status(&self) -> String {
        format!("{} is busy, {} commands left", self.id, self.queued.load(Ordering::SeqCst))
    }
}

pub fn injected(fault: Fault) -> DeviceError {
    DeviceError::Failed(format!("injected {fault:?} fault"))
}

pub type Bytes = Arc<Mutex<Vec<u8>>>;

pub enum Command {
    Write { memory: Bytes, offset: usize, bytes: Vec<u8> },
    Run { memory: Bytes, steps: Arc<Vec<Step>>, bind: Bind },
    Read { memory: Bytes, region: Region, slot: Arc<Slot> },
    ReadState { state: Arc<Rows>, page: usize, rows: usize, slot: Arc<Slot> },
    WriteState { state: Arc<Rows>, page: usize, rows: usize, bytes: Vec<u8> },
    Receive { memory: Bytes, offset: usize, len: usize, source: Arc<dyn ReadBack>, timeout: Duration },
    Idle { slot: Arc<Slot>, forget: bool },
}

/// The promise of some bytes.
pub struct Slot {
    shared: Arc<Shared>,
    bytes: OnceLock<Result<Vec<u8>, DeviceError>>,
    lock: Mutex<()>,
    done: Condvar,
}

impl Slot {
    pub fn new(shared: &Arc<Shared>) -> Arc<Slot> {
        Arc::new(Slot {
            shared: shared.clone(),
            bytes: OnceLock::new(),
            lock: Mutex::new(()),
            done: Condvar::new(),
        })
    }

    fn finish(&self, bytes: Result<Vec<u8>, DeviceError>) {
        let _guard = self.lock.lock().unwrap();
        assert!(self.bytes.set(bytes).is_ok(), "a slot is filled once");
        self.done.notify_all();
    }
}

impl ReadBack for Slot {
    fn wait(&self, timeout: Duration) -> Result<&[u8], WaitError> {
        let guard = self.lock.lock().unwrap();
        drop(self.done.wait_timeout_while(guard, timeout, |()| self.bytes.get().is_none()).unwrap());
        match self.bytes.get() {
            None => Err(WaitError::TimedOut(self.shared.status())),
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(e)) => Err(e.clone().into()),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Runs commands in order. After a failure everything but reads is skipped until the host recovers.
struct Worker {
    shared: Arc<Shared>,
    failed: Option<DeviceError>,
}

impl Worker {
    fn handle(&mut self, command: Command) {
        match command {
            Command::Read { memory, region, slot } => {
                if self.failed.is_none() && self.shared.strikes(Fault::Read) {
                    self.failed = Some(injected(Fault::Read));
                }
                let copy = || memory.lock().unwrap()[region.offset..region.offset + region.bytes].to_vec();
                slot.finish(self.failed.clone().map_or_else(|| Ok(copy()), Err));
            }
            Command::ReadState { state, page, rows, slot } => {
                if self.failed.is_none() && self.shared.strikes(Fault::Read) {
                    self.failed = Some(injected(Fault::Read));
                }
                slot.finish(self.failed.clone().map_or_else(|| Ok(state.read(page, rows)), Err));
            }
            Command::Idle { slot, forget } => {
                let failed = if forget { self.failed.take().and(None) } else { self.failed.clone() };
                slot.finish(failed.map_or(Ok(vec![]), Err));
            }
            _ if self.failed.is_some() => {}
            Command::Write { memory, offset, bytes } => {
                memory.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(&bytes);
            }
            Command::WriteState { state, page, rows, bytes } => state.write(page, rows, &bytes),
            Command::Run { memory, steps, bind } => self.run(&memory, &steps, &bind),
            Command::Receive { memory, offset, len, source, timeout } => match source.wait(timeout) {
                Ok(bytes) => memory.lock().unwrap()[offset..offset + len].copy_from_slice(bytes),
                Err(e) => self.failed = Some(DeviceError::Failed(format!("waiting for another device: {e}"))),
            },
        }
    }

    fn run(&mut self, memory: &Bytes, steps: &[Step], bind: &Bind) {
        std::thread::sleep(self.shared.delay);
        if self.shared.strikes(Fault::Hang) {
            self.shared.hang();
        }
        if self.shared.strikes(Fault::Run) {
            self.failed = Some(injected(Fault::Run));
            return;
        }
        let mut arena = memory.lock().unwrap();
        steps.iter().for_each(|step| step.run(&mut arena, bind));
    }
}

enum Mode {
    Inline(Mutex<Worker>),
    Thread(Sender<Command>),
}

/// The one stream of a device.
pub struct Stream {
    pub shared: Arc<Shared>,
    mode: Mode,
}

impl Stream {
    pub fn new(shared: Arc<Shared>, asynchronous: bool) -> Arc<Stream> {
        let worker = Worker { shared: shared.clone(), failed: None };
        let mode = if asynchronous {
            let (sender, commands) = channel();
            std::thread::spawn(move || serve(worker, &commands));
            Mode::Thread(sender)
        } else {
            Mode::Inline(Mutex::new(worker))
        };
        Arc::new(Stream { shared, mode })
    }

    pub fn is_async(&self) -> bool {
        matches!(self.mode, Mode::Thread(_))
    }

    /// Enqueues a command; a synchronous device finishes it first and reports its error at once.
    pub fn submit(&self, command: Command) -> Result<(), DeviceError> {
        self.shared.queued.fetch_add(1, Ordering::SeqCst);
        match &self.mode {
            Mode::Thread(sender) => {
                sender.send(command).map_err(|_| DeviceError::Failed("the stream is gone".to_string()))
            }
            Mode::Inline(worker) => {
                let mut worker = worker.lock().unwrap();
                worker.handle(command);
                self.shared.queued.fetch_sub(1, Ordering::SeqCst);
                worker.failed.take().map_or(Ok(()), Err)
            }
        }
    }
}

fn serve(mut worker: Worker, commands: &Receiver<Command>) {
    let shared = worker.shared.clone();
    for command in commands {
        worker.handle(command);
        shared.queued.fetch_sub(1, Ordering::SeqCst);
    }
}

//! The thread pool of a CPU device: a fixed set of threads that all run the same closure (SPMD).
//!
//! In comes a closure, out comes "every worker has returned". Work is split by the closure itself, from
//! [`Worker::index`] or with a [`ChunkCounter`], and phases are separated by [`Worker::barrier`]. Between
//! runs the workers spin for some tens of microseconds, then sleep. What does not belong here: what is
//! computed, and how it is partitioned.

mod barrier;
mod chunks;
mod topology;

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use barrier::{Barrier, BarrierBroken};
pub use chunks::ChunkCounter;
pub use topology::default_threads;

/// How long an idle worker looks for the next run before it sleeps: longer than the gap between two
/// programs of one step, shorter than a user could see in `top`.
const IDLE_SPIN: Duration = Duration::from_micros(75);

/// A worker panicked, or the workers did not agree on the number of barriers. The run's results are void;
/// the pool itself stays usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker {worker} of the CPU thread pool failed: {message}")]
pub struct PoolPanicked {
    /// Index of the first worker that failed.
    pub worker: usize,
    /// The text of its panic.
    pub message: String,
}

/// One thread's view of a run.
pub struct Worker<'a> {
    /// This worker, `0..count`; 0 is the thread that called [`Pool::run`].
    pub index: usize,
    /// Number of workers in the run.
    pub count: usize,
    shared: &'a Shared,
}

impl Worker<'_> {
    /// Waits until every worker of the run has called it; all writes before it are visible after it.
    ///
    /// Every worker must call it the same number of times. If another worker has failed, this unwinds,
    /// so that [`Pool::run`] can report the failure.
    pub fn barrier(&self) {
        self.shared.barrier.wait(self.index);
    }

    /// The part of `0..len` that belongs to this worker when split evenly in units of `unit`.
    pub fn share(&self, len: usize, unit: usize) -> std::ops::Range<usize> {
        let unit = unit.max(1);
        let units = len.div_ceil(unit);
        let (each, more) = (units / self.count, units % self.count);
        let start = self.index * each + self.index.min(more);
        let end = start + each + usize::from(self.index < more);
        (start * unit).min(len)..(end * unit).min(len)
    }
}

type Task = dyn Fn(&Worker<'_>) + Sync;

/// A fixed set of threads; see the module's text.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held during a run: a second caller waits for its turn.
    turn: Mutex<()>,
}

/// Written by the caller of a run, read by its workers.
struct Shared {
    count: usize,
    /// Number of runs started so far; a change is the signal to run `task`.
    epoch: AtomicU64,
    /// Workers (without the caller) that have not yet returned from the current run.
    running: AtomicUsize,
    task: UnsafeCell<Option<*const Task>>,
    barrier: Barrier,
    stop: AtomicBool,
    /// Workers that sleep, or are about to, on `wake`.
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    failure: Mutex<Option<PoolPanicked>>,
    idle_spin: Duration,
}

// SAFETY: `task` is written by the caller of `run` while no worker runs (it holds `turn` and has seen
// `running == 0`), and read by workers only after they have seen the `epoch` that was stored afterwards.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is never dereferenced outside a run, during which its target is borrowed.
unsafe impl Send for Shared {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No lock here is held across foreign code, so a poisoned one still guards consistent data.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Starts `threads - 1` threads (at least one worker exists: the caller of [`Pool::run`]).
    ///
    /// # Errors
    /// When the operating system refuses a thread; those already started are stopped.
    pub fn new(threads: usize) -> std::io::Result<Pool> {
        let count = threads.max(1);
        let crowded = count > std::thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            count,
            epoch: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            task: UnsafeCell::new(None),
            barrier: Barrier::new(count, crowded),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            failure: Mutex::new(None),
            idle_spin: if crowded { Duration::ZERO } else { IDLE_SPIN },
        });
        let mut pool = Pool { shared, threads: Vec::new(), turn: Mutex::new(()) };
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("minfer-cpu-{index}"));
            pool.threads.push(builder.spawn(move || shared.worker_loop(index))?);
        }
        Ok(pool)
    }

    /// Number of workers, the caller of [`Pool::run`] included.
    pub fn threads(&self) -> usize {
        self.shared.count
    }

    /// Runs `f` on every worker and returns when all have returned. The calling thread is worker 0.
    ///
    /// `f` must not call `run` on the same pool: it would wait for itself.
    ///
    /// # Errors
    /// When a worker panicked; the others are released from their barriers first, and the pool stays usable.
    pub fn run(&self, f: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<(), PoolPanicked> {
        let _turn = lock(&self.turn);
        let shared = &*self.shared;
        if shared.count > 1 {
            shared.start(f);
        }
        shared.work(0, f);
        let mut spins = 0u32;
        while shared.running.load(Ordering::Acquire) != 0 {
            barrier::pause(&mut spins, shared.barrier.spin_limit());
        }
        shared.barrier.reset();
        match lock(&shared.failure).take() {
            None => Ok(()),
            Some(failure) => Err(failure),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.signal();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of tasks, so there is nothing to report from joining it.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Publishes `f` to the workers. The caller then waits until `running` is zero, before `f` goes away.
    fn start(&self, f: &(dyn Fn(&Worker<'_>) + Sync)) {
        let task: *const (dyn Fn(&Worker<'_>) + Sync + '_) = f;
        // SAFETY: only the lifetime is erased; the target outlives its use, because `run` returns (and its
        // borrow ends) only after every worker has left the task.
        let task =
            unsafe { std::mem::transmute::<*const (dyn Fn(&Worker<'_>) + Sync + '_), *const Task>(task) };
        // SAFETY: no worker reads `task` now, see `impl Sync`.
        unsafe { *self.task.get() = Some(task) };
        self.running.store(self.count - 1, Ordering::Relaxed);
        self.signal();
    }

    /// Advances the epoch and wakes who sleeps. Either a worker sees the new epoch before it sleeps, or this
    /// sees the worker in `sleepers` (both sides use sequentially consistent order).
    fn signal(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.sleep));
            self.wake.notify_all();
        }
    }

    fn worker_loop(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            // SAFETY: this epoch's task was written before the epoch was, and lives until `running` is zero.
            if let Some(task) = unsafe { *self.task.get() } {
                // SAFETY: as above.
                self.work(index, unsafe { &*task });
            }
            self.running.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits for an epoch other than `seen`: spinning first, then asleep.
    fn next_epoch(&self, seen: u64) -> u64 {
        let start = Instant::now();
        loop {
            for _ in 0..32 {
                let epoch = self.epoch.load(Ordering::Acquire);
                if epoch != seen {
                    return epoch;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= self.idle_spin {
                break;
            }
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                return epoch;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs the task as worker `index`; a panic is noted and breaks the barrier, so that nobody waits for it.
    fn work(&self, index: usize, task: &(dyn Fn(&Worker<'_>) + Sync)) {
        let worker = Worker { index, count: self.count, shared: self };
        match catch_unwind(AssertUnwindSafe(|| task(&worker))) {
            Ok(()) => self.barrier.leave(index),
            Err(payload) => {
                let failure = PoolPanicked { worker: index, message: panic_text(payload.as_ref()) };
                let secondary = payload.is::<BarrierBroken>();
                let mut first = lock(&self.failure);
                // A worker that was thrown out of a barrier only reports when nobody has a better reason.
                if first.is_none() && !(secondary && self.barrier.was_broken_by_panic()) {
                    *first = Some(failure);
                }
                drop(first);
                if !secondary {
                    self.barrier.break_by_panic();
                }
            }
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    if payload.is::<BarrierBroken>() {
        return "its barrier can never be complete, another worker has already returned".to_owned();
    }
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

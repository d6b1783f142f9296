//! A barrier for a handful of threads that meet every few microseconds: it spins, then yields, never sleeps.
//!
//! It knows about workers that will not come any more (they panicked or returned), so it cannot hang.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Polls before a waiting worker offers its core to others: some 20-50 us.
const SPINS: u32 = 1024;
/// The same when there are more workers than cores: who is waited for may need this very core.
const SPINS_CROWDED: u32 = 8;

/// The payload of the unwinding that releases a worker from a barrier that cannot be completed.
pub(super) struct BarrierBroken;

/// Waits a moment: one pause instruction at first, the rest of the time slice after `limit` calls.
pub(super) fn pause(spins: &mut u32, limit: u32) {
    if *spins < limit {
        *spins += 1;
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

/// Sense-reversing: the generation number is the sense.
#[repr(align(128))]
pub(super) struct Barrier {
    arrived: AtomicUsize,
    generation: AtomicU32,
    /// Set while a run with a failed worker is unwinding.
    broken: AtomicBool,
    by_panic: AtomicBool,
    /// Workers that have returned from the run: they will never arrive again.
    left: AtomicUsize,
    count: usize,
    spin_limit: u32,
}

impl Barrier {
    pub(super) fn new(count: usize, crowded: bool) -> Barrier {
        Barrier {
            arrived: AtomicUsize::new(0),
            generation: AtomicU32::new(0),
            broken: AtomicBool::new(false),
            by_panic: AtomicBool::new(false),
            left: AtomicUsize::new(0),
            count,
            spin_limit: if crowded { SPINS_CROWDED } else { SPINS },
        }
    }

    pub(super) fn spin_limit(&self) -> u32 {
        self.spin_limit
    }

    pub(super) fn wait(&self) {
        if self.broken.load(Ordering::Acquire) {
            unwind();
        }
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut spins = 0;
        while self.generation.load(Ordering::Acquire) == generation {
            if self.broken.load(Ordering::Acquire) {
                unwind();
            }
            if spins == self.spin_limit {
                self.check_complete(generation);
            }
            pause(&mut spins, self.spin_limit);
        }
    }

    /// Breaks the barrier when a worker has returned that this generation needs. A worker that returned
    /// after completing this generation published the new generation first, so the order of loads is proof.
    fn check_complete(&self, generation: u32) {
        let left = self.left.load(Ordering::Acquire);
        if left > 0 && self.generation.load(Ordering::Acquire) == generation {
            self.broken.store(true, Ordering::Release);
        }
    }

    /// The calling worker has returned from the run.
    pub(super) fn leave(&self) {
        self.left.fetch_add(1, Ordering::AcqRel);
    }

    /// The calling worker has panicked: releases all who wait, now and later in this run.
    pub(super) fn break_by_panic(&self) {
        self.by_panic.store(true, Ordering::Release);
        self.broken.store(true, Ordering::Release);
    }

    pub(super) fn was_broken_by_panic(&self) -> bool {
        self.by_panic.load(Ordering::Acquire)
    }

    /// Ready for the next run. Only when no worker is inside.
    pub(super) fn reset(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.left.store(0, Ordering::Relaxed);
        self.by_panic.store(false, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
    }
}

/// Leaves the task without the panic hook: the failure that caused it has been printed already.
fn unwind() -> ! {
    std::panic::resume_unwind(Box::new(BarrierBroken))
}

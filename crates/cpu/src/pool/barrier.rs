//! A barrier for a handful of threads that meet every few microseconds: it spins, then yields, never sleeps.
//!
//! It knows about workers that will not come any more (they panicked or returned), so it cannot hang.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

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

/// Rounds of the largest barrier: 65536 workers.
const MAX_ROUNDS: usize = 16;

/// What one worker waits for, in cache lines of its own.
#[repr(align(128))]
#[derive(Default)]
struct Slot {
    /// For each round the last meeting that another worker has signalled.
    signals: [AtomicU32; MAX_ROUNDS],
    /// Meetings that this worker has completed; written by itself only.
    completed: AtomicU32,
    /// The last run from which this worker has returned.
    left: AtomicU64,
}

/// A dissemination barrier (Hensgen, Finkel and Manber 1988): in round `r`, worker `i` signals worker `i + 2^r` and waits
/// for worker `i - 2^r`. After `log2(count)` rounds it has heard of everybody, and no line is written by all.
#[repr(align(128))]
pub(super) struct Barrier {
    slots: Vec<Slot>,
    rounds: usize,
    /// Number of the run, so that what earlier runs left behind is not mistaken for this one's.
    run: AtomicU64,
    /// Set while a run with a failed worker is unwinding.
    broken: AtomicBool,
    by_panic: AtomicBool,
    spin_limit: u32,
}

impl Barrier {
    pub(super) fn new(count: usize, crowded: bool) -> Barrier {
        Barrier {
            slots: (0..count).map(|_| Slot::default()).collect(),
            rounds: (count.next_power_of_two().trailing_zeros() as usize).min(MAX_ROUNDS),
            run: AtomicU64::new(1),
            broken: AtomicBool::new(false),
            by_panic: AtomicBool::new(false),
            spin_limit: if crowded { SPINS_CROWDED } else { SPINS },
        }
    }

    pub(super) fn spin_limit(&self) -> u32 {
        self.spin_limit
    }

    /// Waits until every worker has called it.
    pub(super) fn wait(&self, index: usize) {
        if self.broken.load(Ordering::Acquire) {
            unwind();
        }
        let count = self.slots.len();
        let meeting = self.slots[index].completed.load(Ordering::Relaxed).wrapping_add(1);
        for round in 0..self.rounds {
            self.slots[(index + (1 << round)) % count].signals[round].store(meeting, Ordering::Release);
            self.wait_for_signal(&self.slots[index].signals[round], meeting);
        }
        self.slots[index].completed.store(meeting, Ordering::Release);
    }

    fn wait_for_signal(&self, signal: &AtomicU32, meeting: u32) {
        let mut spins = 0;
        // A fast worker may have signalled its next meeting already, never the one after that.
        while (signal.load(Ordering::Acquire).wrapping_sub(meeting) as i32) < 0 {
            if self.broken.load(Ordering::Acquire) {
                unwind();
            }
            if spins == self.spin_limit {
                self.check_complete(meeting);
            }
            pause(&mut spins, self.spin_limit);
        }
    }

    /// Breaks the barrier when a worker has returned from the run without this meeting. It published the meetings that it
    /// completed before it left, so the order of loads is proof.
    fn check_complete(&self, meeting: u32) {
        let run = self.run.load(Ordering::Relaxed);
        let missing = |slot: &Slot| {
            slot.left.load(Ordering::Acquire) == run
                && (slot.completed.load(Ordering::Relaxed).wrapping_sub(meeting) as i32) < 0
        };
        if self.slots.iter().any(missing) {
            self.broken.store(true, Ordering::Release);
        }
    }

    /// The worker has returned from the run.
    pub(super) fn leave(&self, index: usize) {
        self.slots[index].left.store(self.run.load(Ordering::Relaxed), Ordering::Release);
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
        self.run.fetch_add(1, Ordering::Relaxed);
        if self.broken.load(Ordering::Relaxed) {
            // Workers were stopped in different rounds.
            for slot in &self.slots {
                slot.signals.iter().for_each(|signal| signal.store(0, Ordering::Relaxed));
                slot.completed.store(0, Ordering::Relaxed);
            }
            self.by_panic.store(false, Ordering::Relaxed);
            self.broken.store(false, Ordering::Relaxed);
        }
    }
}

/// Leaves the task without the panic hook: the failure that caused it has been printed already.
fn unwind() -> ! {
    std::panic::resume_unwind(Box::new(BarrierBroken))
}

//! The thread pool: many runs, barriers, failures, more threads than cores.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use minfer_cpu::pool::{ChunkCounter, Pool};

#[test]
fn every_worker_runs_once_in_every_run() {
    for threads in [1, 2, 3, 8] {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        let counts: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for run in 1..=3000 {
            pool.run(&|w| {
                assert_eq!(w.count, threads);
                counts[w.index].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == run), "{threads} threads, run {run}");
        }
    }
    assert_eq!(Pool::new(0).unwrap().threads(), 1);
}

#[test]
fn runs_after_sleep() {
    let pool = Pool::new(3).unwrap();
    let count = AtomicUsize::new(0);
    for pause in [0u64, 30, 70, 80, 100, 300, 1000, 20000] {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_micros(pause));
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        }
    }
    assert_eq!(count.into_inner(), 3 * 8 * 20);
}

/// Writes before a barrier are seen after it, for every pair of workers and thousands of barriers, also when
/// there are many more threads than cores.
#[test]
fn barriers_separate_phases() {
    for (threads, phases) in [(1, 100), (2, 20_000), (3, 3000), (16, 300)] {
        let pool = Pool::new(threads).unwrap();
        let slots: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for _ in 0..3 {
            let start = Instant::now();
            pool.run(&|w| {
                for phase in 1..=phases {
                    slots[w.index].store(phase, Ordering::Relaxed);
                    w.barrier();
                    assert!(slots.iter().all(|s| s.load(Ordering::Relaxed) == phase));
                    w.barrier();
                }
            })
            .unwrap();
            assert!(start.elapsed() < Duration::from_secs(60), "{threads} threads collapse");
        }
    }
}

#[test]
fn a_panic_releases_the_others_and_is_reported() {
    for threads in [1, 2, 5] {
        let pool = Pool::new(threads).unwrap();
        for bad in 0..threads {
            for _ in 0..20 {
                let failure = pool
                    .run(&|w| {
                        w.barrier();
                        if w.index == bad {
                            std::panic::resume_unwind(Box::new(format!("worker {bad} is unwell")));
                        }
                        w.barrier();
                        w.barrier();
                    })
                    .unwrap_err();
                assert_eq!((failure.worker, failure.message), (bad, format!("worker {bad} is unwell")));
                // The pool is as good as new.
                let count = AtomicUsize::new(0);
                pool.run(&|w| {
                    w.barrier();
                    count.fetch_add(1, Ordering::Relaxed);
                    w.barrier();
                })
                .unwrap();
                assert_eq!(count.into_inner(), threads);
            }
        }
    }
}

#[test]
fn a_missing_barrier_is_an_error_and_no_hang() {
    let pool = Pool::new(3).unwrap();
    for _ in 0..20 {
        let failure = pool
            .run(&|w| {
                if w.index != 1 {
                    w.barrier();
                }
            })
            .unwrap_err();
        assert!(failure.message.contains("never be complete"), "{failure}");
        pool.run(&|w| w.barrier()).unwrap();
    }
}

fn bump(count: &AtomicUsize) {
    count.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn chunks_and_shares_cover_a_range_once() {
    let pool = Pool::new(4).unwrap();
    let (counter, len) = (ChunkCounter::new(), 10_007);
    let claimed: Vec<_> = (0..len).map(|_| AtomicUsize::new(0)).collect();
    let shared: Vec<_> = (0..len).map(|_| AtomicUsize::new(0)).collect();
    pool.run(&|w| {
        while let Some(range) = counter.claim(len, 16) {
            range.for_each(|i| bump(&claimed[i]));
        }
        let share = w.share(len, 8);
        assert!(share.start.is_multiple_of(8));
        share.for_each(|i| bump(&shared[i]));
    })
    .unwrap();
    assert!(claimed.iter().chain(&shared).all(|c| c.load(Ordering::Relaxed) == 1));
}

/// Two callers take turns.
#[test]
fn callers_on_two_threads() {
    let pool = Pool::new(2).unwrap();
    let inside = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    pool.run(&|w| {
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < 2);
                        w.barrier();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        w.barrier();
                    })
                    .unwrap();
                }
            });
        }
    });
}

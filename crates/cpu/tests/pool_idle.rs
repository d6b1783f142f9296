//! An idle pool uses no processor time. Alone in its process, because it reads the process's clock.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use minfer_cpu::pool::Pool;

/// User and system time of this process in clock ticks (1/100 s on Linux), fields 14 and 15 of `stat`.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Reference: zero. Tolerance: 2 ticks (20 ms) of 600 ms; one spinning worker would use 60.
#[test]
fn idle_workers_sleep() {
    let pool = Pool::new(2).unwrap();
    pool.run(&|w| w.barrier()).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let before = cpu_ticks();
    std::thread::sleep(Duration::from_millis(600));
    assert!(cpu_ticks() - before <= 2);
    pool.run(&|w| w.barrier()).unwrap();
}

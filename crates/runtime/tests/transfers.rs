//! Copies between devices: how many, when they are waited for, and who waits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::graphs::{embedded, weight};
use common::{Event, Fault, TestDevice, cpu, everything, gpu, only, open, open_with, options, step};
use minfer_graph::{Bind, Graph, GraphBuilder, ValueId};
use minfer_runtime::plan::Policy;
use minfer_runtime::{Counters, DeviceKind, Executor, ExecutorOptions};

const STEP: Bind = Bind { rows: 4, outs: 1 };

fn graph(make: impl FnOnce(&mut GraphBuilder, ValueId) -> ValueId) -> Graph {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let result = make(&mut b, x);
    b.output("result", result);
    b.finish().unwrap()
}

fn synced(graph: &Graph, devices: &[&Arc<TestDevice>]) -> Executor {
    let options = ExecutorOptions { sync_copies: true, ..options() };
    open_with(graph, devices, &Policy::default(), &[], options).unwrap()
}

/// `cpu -> cuda -> cpu`, one node each.
fn three_nodes() -> Graph {
    graph(|b, x| {
        let y = b.silu(x);
        b.argmax(y)
    })
}

fn silu_on_cuda() -> Arc<TestDevice> {
    gpu(DeviceKind::Cuda, 0, only(&["silu"])).build()
}

#[test]
fn the_three_node_oracle() {
    let graph = three_nodes();
    let mut executor = open(&graph, &[&silu_on_cuda(), &cpu().build()]);
    let deferred = step(&mut executor, STEP, 1).unwrap();
    let expected = Counters {
        copies: 2,
        waits: 2,
        deferred_waits: 2,
        async_copies: 1,
        event_syncs: 1,
        in_flight_peak: 1,
        // Once per step, at its end: errors of work whose result nobody reads must surface.
        stream_syncs: 1,
        ..Counters::default()
    };
    assert_eq!(executor.counters(), expected);

    let mut blocking = synced(&graph, &[&silu_on_cuda(), &cpu().build()]);
    assert_eq!(step(&mut blocking, STEP, 1).unwrap(), deferred);
    let expected = Counters {
        copies: 2,
        waits: 2,
        blocking_copies: 1,
        in_flight_peak: 1,
        stream_syncs: 3,
        ..Counters::default()
    };
    assert_eq!(blocking.counters(), expected);
}

/// Two cpu -> cuda -> cpu steps count twice: counters run since opening, per execution and destination.
#[test]
fn counters_add_up_over_steps() {
    let mut executor = open(&three_nodes(), &[&silu_on_cuda(), &cpu().build()]);
    for seed in 0..5 {
        step(&mut executor, STEP, seed).unwrap();
    }
    let c = executor.counters();
    assert_eq!((c.copies, c.waits, c.async_copies, c.event_syncs, c.stream_syncs), (10, 10, 5, 5, 5));
    assert_eq!(c.in_flight_peak, 1, "a peak, not a sum");
}

#[test]
fn one_device_counts_nothing() {
    let graph = three_nodes();
    let cuda = gpu(DeviceKind::Cuda, 0, everything()).build();
    for device in [&cpu().build(), &cuda] {
        for mut executor in [open(&graph, &[device]), synced(&graph, &[device])] {
            step(&mut executor, STEP, 1).unwrap();
            step(&mut executor, STEP, 2).unwrap();
            assert_eq!(executor.counters(), Counters::default());
        }
    }
}

/// A device that takes no node costs nothing either.
#[test]
fn an_idle_device_counts_nothing() {
    let idle = gpu(DeviceKind::Cuda, 0, only(&[])).build();
    let mut executor = open(&three_nodes(), &[&idle, &cpu().build()]);
    step(&mut executor, STEP, 1).unwrap();
    assert_eq!(executor.counters(), Counters::default());
    assert_eq!(idle.count(|e| !matches!(e, Event::Arena(0))), 0, "{:?}", idle.events());
}

/// A value that several splits of a device read is sent once; a second device gets a copy of its own.
#[test]
fn one_copy_per_value_and_destination() {
    let graph = graph(|b, x| {
        let y = b.silu(x);
        let w = weight(b, "bias", &[8]);
        // The CPU reads y three times, in splits that the biases on vulkan keep apart.
        let mut sum = y;
        for _ in 0..3 {
            let biased = b.bias_add(sum, w);
            sum = b.add(biased, y);
        }
        sum
    });
    let vulkan = gpu(DeviceKind::Vulkan, 0, only(&["bias_add"])).build();
    let cuda = silu_on_cuda();
    let mut executor = open(&graph, &[&cuda, &vulkan, &cpu().build()]);
    step(&mut executor, STEP, 3).unwrap();
    // x to cuda; y to vulkan and to the CPU; each bias to the CPU; two sums to vulkan.
    let c = executor.counters();
    assert_eq!((c.copies, c.waits, c.deferred_waits), (8, 8, 8));
    assert_eq!(cuda.count(|e| matches!(e, Event::Read(_))), 2);
}

#[test]
fn several_copies_are_under_way_at_once() {
    for values in [2usize, 3, 5] {
        let graph = graph(|b, x| {
            let made: Vec<_> = (0..values).map(|_| b.silu(x)).collect();
            made[1..].iter().fold(made[0], |sum, &y| b.add(sum, y))
        });
        let mut executor = open(&graph, &[&silu_on_cuda(), &cpu().build()]);
        step(&mut executor, STEP, 3).unwrap();
        assert_eq!(executor.counters().in_flight_peak, values as u64);
        let mut blocking = synced(&graph, &[&silu_on_cuda(), &cpu().build()]);
        step(&mut blocking, STEP, 3).unwrap();
        assert_eq!(blocking.counters().in_flight_peak, 1, "the reference path has one at a time");
    }
}

/// Values are told apart by their widths: produced 3, 5, 7 wide, read in the order 7, 3, 5.
#[test]
fn waits_are_made_in_the_order_of_first_reads() {
    let graph = graph(|b, x| {
        let [a, c, d] = [3, 5, 7].map(|n| {
            let w = weight(b, &format!("down{n}"), &[n, 8]);
            b.matmul(x, w, "down")
        });
        let up = |b: &mut GraphBuilder, v: ValueId, n: usize| {
            let bias = weight(b, &format!("bias{n}"), &[n]);
            b.bias_add(v, bias)
        };
        let (d, a, c) = (up(b, d, 7), up(b, a, 3), up(b, c, 5));
        b.output("d", d);
        b.output("a", a);
        c
    });
    let (cuda, host) = (gpu(DeviceKind::Cuda, 0, only(&["matmul"])).build(), cpu().build());
    let mut executor = open(&graph, &[&cuda, &host]);
    step(&mut executor, STEP, 3).unwrap();
    let received: Vec<_> = host.events().into_iter().filter(|e| matches!(e, Event::Receive(_))).collect();
    assert_eq!(received, [7, 3, 5].map(|n| Event::Receive(4 * n * STEP.rows)));
    let sent: Vec<_> = cuda.events().into_iter().filter(|e| matches!(e, Event::Read(_))).collect();
    assert_eq!(sent, [7, 3, 5].map(|n| Event::Read(4 * n * STEP.rows)), "sent in the order they are wanted");
    assert_eq!(executor.counters().in_flight_peak, 3);
}

/// Waits until `device` has logged an event like this, or gives up after a minute.
fn until(device: &TestDevice, like: impl Fn(&Event) -> bool) -> bool {
    let start = Instant::now();
    while device.count(&like) == 0 {
        if start.elapsed() > Duration::from_secs(60) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// cpu -> cuda -> vulkan, with cuda held: the host goes on past vulkan's launch to the read of the result.
#[test]
fn device_to_device_does_not_hold_the_host() {
    let graph = graph(|b, x| {
        let y = b.silu(x);
        let w = weight(b, "w", &[8, 8]);
        b.matmul(y, w, "z")
    });
    let expected = step(&mut open(&graph, &[&cpu().build()]), STEP, 5).unwrap();
    let (cuda, vulkan) = (silu_on_cuda(), gpu(DeviceKind::Vulkan, 0, only(&["matmul"])).build());
    let mut executor = open(&graph, &[&cuda, &vulkan, &cpu().build()]);
    cuda.arm(Fault::Hang, 0);
    let result = std::thread::scope(|scope| {
        let running = scope.spawn(|| step(&mut executor, STEP, 5));
        assert!(until(&vulkan, |e| *e == Event::Launch), "the host waited for cuda");
        assert!(until(&vulkan, |e| matches!(e, Event::Read(_))), "the host waited for cuda");
        assert!(!running.is_finished(), "the result cannot be there yet");
        cuda.shared.release();
        running.join().unwrap()
    });
    assert_eq!(result.unwrap(), expected);
    let c = executor.counters();
    assert_eq!((c.copies, c.waits, c.stream_waits, c.event_syncs, c.blocking_copies), (2, 2, 1, 0, 0));
}

/// A value of a held device does not hold splits that do not read it.
#[test]
fn a_wait_is_made_at_the_first_read_and_not_before() {
    let graph = graph(|b, x| {
        let slow = b.silu(x);
        let w = weight(b, "w", &[8, 8]);
        let other = b.matmul(x, w, "other");
        b.mul(slow, other)
    });
    let expected = step(&mut open(&graph, &[&cpu().build()]), STEP, 5).unwrap();
    let (cuda, vulkan) = (silu_on_cuda(), gpu(DeviceKind::Vulkan, 0, only(&["matmul"])).build());
    let host = cpu().build();
    let mut executor = open(&graph, &[&cuda, &vulkan, &host]);
    cuda.arm(Fault::Hang, 0);
    let result = std::thread::scope(|scope| {
        let running = scope.spawn(|| step(&mut executor, STEP, 5));
        assert!(until(&vulkan, |e| matches!(e, Event::Read(_))), "the host waited before the first read");
        assert_eq!(host.count(|e| *e == Event::Launch), 1, "the embedding only");
        cuda.shared.release();
        running.join().unwrap()
    });
    assert_eq!(result.unwrap(), expected);
    assert_eq!(executor.counters().in_flight_peak, 2);
}

/// The reference path leaves nothing under way: each stream is dry on both sides of a copy.
#[test]
fn the_reference_path_blocks_on_both_sides() {
    let graph = graph(|b, x| {
        let y = b.silu(x);
        let w = weight(b, "w", &[8, 8]);
        b.matmul(y, w, "z")
    });
    let (cuda, vulkan) = (silu_on_cuda(), gpu(DeviceKind::Vulkan, 0, only(&["matmul"])).build());
    let mut executor = synced(&graph, &[&cuda, &vulkan, &cpu().build()]);
    step(&mut executor, STEP, 5).unwrap();
    // x: cuda's side; y: both sides; and the end of the step for cuda, whose work gave no result.
    let expected = Counters {
        copies: 2,
        waits: 2,
        blocking_copies: 1,
        in_flight_peak: 1,
        stream_syncs: 4,
        ..Counters::default()
    };
    assert_eq!(executor.counters(), expected);
    assert_eq!(cuda.count(|e| *e == Event::Synchronize), 3);
    assert_eq!(vulkan.count(|e| *e == Event::Synchronize), 1);
}

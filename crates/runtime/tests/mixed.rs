//! Graphs over several devices give the bits of the single synchronous device.
//!
//! Reference: the same graph on one synchronous device that takes every operation. Tolerance: none, results
//! are compared as bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::graphs::{embedded, recipe, weight};
use common::{Config, TestDevice, build, cpu, gpu, only, open, open_with, options, step};
use minfer_graph::{Bind, Dim, Graph, GraphBuilder, Node, ValueType};
use minfer_runtime::plan::Policy;
use minfer_runtime::{DeviceId, DeviceKind, ExecutorOptions, Speed};
use proptest::prelude::*;

/// Operations that a random device may or may not take.
const OPS: [&str; 11] = [
    "embed",
    "rms_norm",
    "matmul",
    "bias_add",
    "add",
    "mul",
    "silu",
    "gather_rows",
    "argmax",
    "swiglu",
    "add_rms_norm",
];

fn subset(mask: u16) -> common::device::Takes {
    Arc::new(move |n: &Node| OPS.iter().position(|o| *o == n.op.name()).is_some_and(|i| mask >> i & 1 == 1))
}

/// The result of each step on the reference device.
fn reference(graph: &Graph, steps: &[(Bind, u32)]) -> Vec<common::Bits> {
    let mut executor = open(graph, &[&cpu().build()]);
    steps.iter().map(|&(bind, seed)| step(&mut executor, bind, seed).unwrap()).collect()
}

fn bind() -> impl Strategy<Value = Bind> {
    (1usize..9, 0usize..9).prop_map(|(rows, outs)| Bind { rows, outs })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Up to three asynchronous devices with random operations, beside the CPU; several steps of random
    /// sizes on one executor; with and without the blocking reference path.
    #[test]
    fn any_split_of_any_graph_gives_the_same_bits(
        recipe in recipe(),
        masks in proptest::collection::vec(any::<u16>(), 1..4),
        steps in proptest::collection::vec((bind(), any::<u32>()), 1..4),
        sync_copies in any::<bool>(),
        micros in 0u64..40,
    ) {
        let graph = build(&recipe);
        let expected = reference(&graph, &steps);
        let ids = [(DeviceKind::Cuda, 0), (DeviceKind::Cuda, 1), (DeviceKind::Vulkan, 0)];
        let delay = Duration::from_micros(micros);
        // Each device is much faster than the next, so that the cost of copies moves no island.
        let speed = |i: usize| Speed {
            bytes_per_second: 10f64.powi(18 - 2 * i as i32),
            copy_latency: 1e-20,
            copy_bytes_per_second: 1e25,
        };
        let mut devices: Vec<Arc<TestDevice>> = masks
            .iter()
            .zip(ids)
            .enumerate()
            .map(|(i, (&mask, (kind, n)))| {
                Config { delay, speed: speed(i), ..gpu(kind, n, subset(mask)) }.build()
            })
            .collect();
        devices.push(cpu().build());
        let devices: Vec<_> = devices.iter().collect();
        let options = ExecutorOptions { sync_copies, ..options() };
        let mut executor = open_with(&graph, &devices, &Policy::default(), &[], options).unwrap();
        for (&(bind, seed), expected) in steps.iter().zip(&expected) {
            prop_assert_eq!(&step(&mut executor, bind, seed).unwrap(), expected);
        }
        let c = executor.counters();
        prop_assert_eq!(c.copies, c.waits, "one wait per copy");
        if sync_copies {
            prop_assert_eq!((c.deferred_waits, c.async_copies, c.event_syncs, c.stream_waits), (0, 0, 0, 0));
        } else {
            prop_assert_eq!((c.deferred_waits, c.blocking_copies), (c.copies, 0));
            prop_assert_eq!(c.async_copies, c.event_syncs + c.stream_waits);
        }
    }
}

/// A chain in which every second node needs the other device, so that each edge is a copy.
fn zigzag(layers: usize) -> Graph {
    let mut b = GraphBuilder::new();
    let mut x = embedded(&mut b, 8);
    let w = weight(&mut b, "w", &[8, 8]);
    for layer in 0..layers {
        b.set_layer(Some(layer as u32));
        x = b.matmul(x, w, "product");
        x = b.silu(x);
    }
    b.set_layer(None);
    b.output("x", x);
    b.finish().unwrap()
}

#[test]
fn alternating_devices_copy_each_edge_once() {
    let graph = zigzag(6);
    let cuda = gpu(DeviceKind::Cuda, 0, only(&["matmul"])).build();
    let mut mixed = open(&graph, &[&cuda, &cpu().build()]);
    let steps: Vec<_> = (0..3).map(|seed| (Bind { rows: 3, outs: 1 }, seed)).collect();
    for (&(bind, seed), expected) in steps.iter().zip(reference(&graph, &steps)) {
        assert_eq!(step(&mut mixed, bind, seed).unwrap(), expected);
    }
    // cpu: embed and silu; cuda: matmul. Six copies each way and step.
    assert_eq!(mixed.placed().splits.len(), 13);
    let c = mixed.counters();
    assert_eq!((c.copies, c.waits, c.deferred_waits), (36, 36, 36));
    assert_eq!((c.async_copies, c.event_syncs, c.stream_waits, c.blocking_copies), (18, 18, 0, 0));
}

/// A value goes cpu -> cuda -> cuda:1 -> vulkan -> cpu, each device with memory of its own.
#[test]
fn a_chain_over_three_devices() {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let w = weight(&mut b, "w", &[8, 8]);
    let norm = weight(&mut b, "norm", &[8]);
    let y = b.matmul(x, w, "y");
    let z = b.silu(y);
    let n = b.rms_norm(z, norm, 1e-6);
    let best = b.argmax(n);
    b.output("best", best);
    let graph = b.finish().unwrap();
    let cuda = gpu(DeviceKind::Cuda, 0, only(&["matmul"])).build();
    let second = gpu(DeviceKind::Cuda, 1, only(&["silu"])).build();
    let vulkan = gpu(DeviceKind::Vulkan, 0, only(&["rms_norm"])).build();
    let mut executor = open(&graph, &[&cuda, &second, &vulkan, &cpu().build()]);
    let places: Vec<_> = executor.placed().graph.nodes.iter().map(|n| n.place.unwrap().to_string()).collect();
    assert_eq!(places, ["cpu", "cuda", "cuda:1", "vulkan", "cpu"]);
    let steps: Vec<_> = (1..5).map(|seed| (Bind { rows: seed as usize, outs: 0 }, seed)).collect();
    for (&(bind, seed), expected) in steps.iter().zip(reference(&graph, &steps)) {
        assert_eq!(step(&mut executor, bind, seed).unwrap(), expected);
    }
    let c = executor.counters();
    assert_eq!((c.copies, c.waits, c.async_copies), (16, 16, 12));
    assert_eq!((c.stream_waits, c.event_syncs, c.blocking_copies), (8, 4, 0));
}

/// Two instances of one kind are two devices: each loads its own weights and runs its own nodes.
#[test]
fn two_instances_of_one_kind() {
    let graph = zigzag(4);
    let even: common::device::Takes = Arc::new(|n: &Node| n.layer.is_some_and(|l| l % 2 == 0));
    let odd: common::device::Takes = Arc::new(|n: &Node| n.layer.is_some_and(|l| l % 2 == 1));
    let (first, second) = (gpu(DeviceKind::Cuda, 0, even).build(), gpu(DeviceKind::Cuda, 1, odd).build());
    let mut executor = open(&graph, &[&first, &second, &cpu().build()]);
    let steps = [(Bind { rows: 5, outs: 1 }, 9)];
    assert_eq!(step(&mut executor, steps[0].0, steps[0].1).unwrap(), reference(&graph, &steps)[0]);
    let used: Vec<_> = executor.placed().graph.nodes.iter().map(|n| n.place.unwrap()).collect();
    let (zero, one) = (DeviceId::new(DeviceKind::Cuda, 0), DeviceId::new(DeviceKind::Cuda, 1));
    assert_eq!(used, [DeviceId::CPU, zero, zero, one, one, zero, zero, one, one]);
    for device in [&first, &second] {
        assert_eq!(device.count(|e| *e == common::Event::Weight("w".to_string())), 1);
        assert_eq!(device.count(|e| *e == common::Event::Launch), 2);
    }
    assert_eq!((executor.counters().stream_waits, executor.counters().event_syncs), (3, 0));
}

/// Two executors on the same devices, interleaved: neither sees the other's values, plans or counters.
#[test]
fn two_executors_share_nothing_but_devices() {
    let (small, large) = (zigzag(2), zigzag(5));
    let (cuda, host) = (gpu(DeviceKind::Cuda, 0, only(&["matmul"])).build(), cpu().build());
    let mut a = open(&small, &[&cuda, &host]);
    let mut b = open(&large, &[&cuda, &host]);
    for seed in 0..4 {
        let bind = Bind { rows: 1 + seed as usize, outs: 1 };
        let before = b.counters();
        assert_eq!(step(&mut a, bind, seed).unwrap(), reference(&small, &[(bind, seed)])[0]);
        assert_eq!(b.counters(), before);
        assert_eq!(step(&mut b, bind, seed + 7).unwrap(), reference(&large, &[(bind, seed + 7)])[0]);
    }
    assert_eq!((a.counters().copies, b.counters().copies), (16, 40));
}

/// Two executors in two threads on one device.
#[test]
fn executors_run_at_the_same_time() {
    let graph = zigzag(3);
    let (cuda, host) = (gpu(DeviceKind::Cuda, 0, only(&["matmul"])).build(), cpu().build());
    let steps: Vec<_> = (0..12).map(|seed| (Bind { rows: 1 + seed as usize % 8, outs: 1 }, seed)).collect();
    let expected = reference(&graph, &steps);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut executor = open(&graph, &[&cuda, &host]);
                for (&(bind, seed), expected) in steps.iter().zip(&expected) {
                    assert_eq!(&step(&mut executor, bind, seed).unwrap(), expected);
                }
            });
        }
    });
}

/// Fused operations run where the device takes them, and change no bit.
#[test]
fn fusions_change_no_bit() {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let norm = weight(&mut b, "norm", &[8]);
    let gate = b.silu(x);
    let act = b.mul(gate, x);
    let sum = b.add(act, x);
    let n = b.rms_norm(sum, norm, 1e-5);
    b.output("sum", sum);
    b.output("norm", n);
    let graph = b.finish().unwrap();
    let ops = |device: Config| {
        let executor = open(&graph, &[&device.build()]);
        executor.placed().graph.nodes.iter().map(|n| n.op.name()).collect::<Vec<_>>()
    };
    let plain = Config { takes: only(&["embed", "silu", "mul", "add", "rms_norm"]), ..cpu() };
    assert_eq!(ops(cpu()), ["embed", "swiglu", "add_rms_norm"]);
    assert_eq!(ops(plain.clone()), ["embed", "silu", "mul", "add", "rms_norm"]);
    let mut unfused = open(&graph, &[&plain.build()]);
    let steps = [(Bind { rows: 6, outs: 0 }, 3)];
    assert_eq!(step(&mut unfused, steps[0].0, steps[0].1).unwrap(), reference(&graph, &steps)[0]);
}

/// An input that two devices read is uploaded to both, not copied between them.
#[test]
fn inputs_are_uploaded_to_each_reader() {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let index = b.input("index", ValueType::i32(Dim::Outs, []));
    let bent = b.silu(x);
    let (here, there) = (b.gather_rows(x, index), b.gather_rows(bent, index));
    b.output("here", here);
    b.output("there", there);
    let graph = b.finish().unwrap();
    let takes: common::device::Takes =
        Arc::new(move |n: &Node| n.inputs[0] == x && n.op.name() == "silu" || n.inputs[0] == bent);
    let mut executor = open(&graph, &[&gpu(DeviceKind::Cuda, 0, takes).build(), &cpu().build()]);
    let steps = [(Bind { rows: 4, outs: 3 }, 1), (Bind { rows: 2, outs: 8 }, 2)];
    for (&(bind, seed), expected) in steps.iter().zip(reference(&graph, &steps)) {
        assert_eq!(step(&mut executor, bind, seed).unwrap(), expected);
    }
    assert_eq!(executor.counters().copies, 2, "x, once per step");
}

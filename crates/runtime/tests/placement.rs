//! Which device runs which node.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::device::Takes;
use common::graphs::{append, attention, embedded, placed, recipe, states, weight};
use common::{Config, Event, Fault, TestDevice, build, cpu, everything, gpu, only, open_with, options};
use minfer_graph::{Graph, GraphBuilder, Node};
use minfer_runtime::plan::Policy;
use minfer_runtime::{DeviceKind, KvFormat, Speed};
use proptest::prelude::*;

fn cuda(takes: Takes) -> Arc<TestDevice> {
    gpu(DeviceKind::Cuda, 0, takes).build()
}

/// Everything but these operations.
fn except(names: &'static [&'static str]) -> Takes {
    Arc::new(move |n| !names.contains(&n.op.name()))
}

fn policy(kv_format: KvFormat) -> Policy {
    Policy { kv_format, ..Policy::default() }
}

/// `op@device` of each node.
fn places(graph: &Graph, devices: &[&Arc<TestDevice>], policy: &Policy) -> Vec<String> {
    let placed = placed(graph, devices, policy).unwrap();
    placed.graph.nodes.iter().map(|n| format!("{}@{}", n.op.name(), n.place.unwrap())).collect()
}

fn refusal(graph: &Graph, devices: &[&Arc<TestDevice>], policy: &Policy) -> String {
    placed(graph, devices, policy).err().expect("a refusal").to_string()
}

/// `embed, matmul, silu, argmax` with a layer for each of the middle two.
fn chain() -> Graph {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    b.set_layer(Some(0));
    let w = weight(&mut b, "w", &[8, 8]);
    let y = b.matmul(x, w, "y");
    b.set_layer(Some(1));
    let z = b.silu(y);
    b.set_layer(None);
    let best = b.argmax(z);
    b.output("best", best);
    b.finish().unwrap()
}

#[test]
fn the_most_preferred_device_that_takes_a_node_gets_it() {
    // Faster than the other one, so that its single node is not moved.
    let speed = Speed { bytes_per_second: 1e18, copy_latency: 1e-15, copy_bytes_per_second: 1e18 };
    let first = Config { speed, ..gpu(DeviceKind::Cuda, 0, only(&["silu"])) }.build();
    let second = gpu(DeviceKind::Vulkan, 0, except(&["embed"])).build();
    let host = cpu().build();
    let p = Policy::default();
    let graph = chain();
    assert_eq!(
        places(&graph, &[&first, &second, &host], &p),
        ["embed@cpu", "matmul@vulkan", "silu@cuda", "argmax@vulkan"]
    );
    assert_eq!(
        places(&graph, &[&second, &first, &host], &p),
        ["embed@cpu", "matmul@vulkan", "silu@vulkan", "argmax@vulkan"]
    );
    assert_eq!(places(&graph, &[&host, &first], &p), ["embed@cpu", "matmul@cpu", "silu@cpu", "argmax@cpu"]);
}

#[test]
fn a_node_that_nobody_takes_is_refused_by_name() {
    let host = Config { takes: except(&["matmul"]), ..cpu() }.build();
    assert_eq!(
        refusal(&chain(), &[&cuda(only(&["silu"])), &host], &Policy::default()),
        "no device can run matmul 'w' (F32) of layer 0: asked cuda, cpu"
    );
    assert_eq!(refusal(&chain(), &[], &Policy::default()), "no device can run embed 'table' (F32): asked ");
}

#[test]
fn an_invalid_graph_is_refused_first() {
    let mut graph = chain();
    graph.nodes.swap(0, 1);
    let text = refusal(&graph, &[&cpu().build()], &Policy::default());
    assert_eq!(text, "node 0 (matmul) reads value 1, which is not defined before it");
}

#[test]
fn nodes_that_share_state_stay_together() {
    let graph = attention(1);
    let of_state = |device: &Arc<TestDevice>| -> Vec<String> {
        let all = places(&graph, &[device, &cpu().build()], &policy(KvFormat::F32));
        all.into_iter().filter(|p| p.starts_with("store_kv") || p.starts_with("attend")).collect()
    };
    assert_eq!(of_state(&cuda(everything())), ["store_kv@cuda", "attend@cuda"]);
    assert_eq!(of_state(&cuda(except(&["attend"]))), ["store_kv@cpu", "attend@cpu"]);
    assert_eq!(of_state(&cuda(except(&["store_kv"]))), ["store_kv@cpu", "attend@cpu"]);
    assert_eq!(of_state(&cuda(only(&["store_kv", "attend"]))), ["store_kv@cuda", "attend@cuda"]);
}

/// Each layer's state has its own home.
#[test]
fn states_are_pinned_one_by_one() {
    let takes: Takes = Arc::new(|n: &Node| n.op.name() != "attend" || n.layer == Some(1));
    let all = places(&attention(2), &[&cuda(takes), &cpu().build()], &policy(KvFormat::F32));
    let of_state: Vec<_> =
        all.iter().filter(|p| p.starts_with("store_kv") || p.starts_with("attend")).collect();
    assert_eq!(of_state, ["store_kv@cpu", "attend@cpu", "store_kv@cuda", "attend@cuda"]);
}

#[test]
fn a_device_that_does_not_read_the_kv_format_gets_no_attention() {
    let graph = attention(1);
    let f16 = Config { kv: vec![KvFormat::F16], ..gpu(DeviceKind::Cuda, 0, everything()) };
    let (device, host) = (f16.build(), cpu().build());
    let attend = |format| places(&graph, &[&device, &host], &policy(format))[4..6].to_vec();
    assert_eq!(attend(KvFormat::F16), ["store_kv@cuda", "attend@cuda"]);
    assert_eq!(attend(KvFormat::F32), ["store_kv@cpu", "attend@cpu"]);
    let both = Config { kv: vec![KvFormat::F32, KvFormat::F16], ..cpu() }.build();
    assert_eq!(
        refusal(&graph, &[&device, &both], &policy(KvFormat::Q8_0)),
        "no device can run store_kv of layer 0 with q8_0 KV: asked cuda, cpu"
    );
    let narrow = Config { kv: vec![], ..cpu() }.build();
    assert_eq!(
        refusal(&graph, &[&device, &narrow], &policy(KvFormat::F32)),
        "no device can run store_kv of layer 0 with f32 KV: asked cuda, cpu"
    );
}

#[test]
fn gpu_layers_count_from_the_first_and_carry_the_ends_only_when_whole() {
    let (device, host) = (cuda(everything()), cpu().build());
    for (n, expected) in [
        (Some(0), ["cpu", "cpu", "cpu", "cpu"]),
        (Some(1), ["cpu", "cuda", "cpu", "cpu"]),
        (Some(2), ["cuda", "cuda", "cuda", "cuda"]),
        (Some(99), ["cuda", "cuda", "cuda", "cuda"]),
        (None, ["cuda", "cuda", "cuda", "cuda"]),
    ] {
        let policy = Policy { gpu_layers: n, ..Policy::default() };
        let found = places(&chain(), &[&device, &host], &policy);
        let found: Vec<_> = found.iter().map(|p| p.split_once('@').unwrap().1).collect();
        assert_eq!(found, expected, "{n:?}");
    }
}

#[test]
fn a_node_off_the_required_kinds_is_an_error() {
    let require = |kinds: &[DeviceKind]| Policy { require: kinds.to_vec(), ..Policy::default() };
    let host = cpu().build();
    let some = cuda(except(&["embed"]));
    assert_eq!(
        refusal(&chain(), &[&some, &host], &require(&[DeviceKind::Cuda])),
        "embed 'table' (F32) runs on cpu, but --require-device allows only cuda"
    );
    assert!(
        refusal(&chain(), &[&some, &host], &require(&[DeviceKind::Metal, DeviceKind::Cuda]))
            .ends_with("allows only metal, cuda")
    );
    assert!(placed(&chain(), &[&some, &host], &require(&[DeviceKind::Cpu, DeviceKind::Cuda])).is_ok());
    assert!(placed(&chain(), &[&cuda(everything()), &host], &require(&[DeviceKind::Cuda])).is_ok());
}

/// `chain` with a device for these operations and a cost of `latency` seconds per copy.
fn with_latency(takes: Takes, latency: f64) -> Vec<String> {
    let speed = Speed { bytes_per_second: 1e15, copy_latency: latency, copy_bytes_per_second: 1e18 };
    let device = Config { speed, ..gpu(DeviceKind::Cuda, 0, takes) }.build();
    places(&chain(), &[&device, &cpu().build()], &Policy::default())
}

/// One row of silu moves 64 bytes, which take the CPU (10^9 bytes per second) 64 ns and the device nothing;
/// the island costs two copies. So it pays below 32 ns per copy.
#[test]
fn an_island_moves_when_its_copies_cost_more_than_it_gains() {
    let silu = |latency| with_latency(only(&["silu"]), latency)[2].clone();
    assert_eq!(silu(31e-9), "silu@cuda");
    assert_eq!(silu(33e-9), "silu@cpu");
    assert_eq!(silu(1.0), "silu@cpu");
}

/// At the end of the graph there is one copy: argmax of one row reads 32 bytes and writes 4.
#[test]
fn an_island_at_an_end_has_one_border() {
    let argmax = |latency| with_latency(only(&["argmax"]), latency)[3].clone();
    assert_eq!(argmax(35e-9), "argmax@cuda");
    assert_eq!(argmax(37e-9), "argmax@cpu");
}

#[test]
fn an_island_stays_when_its_surroundings_do_not_take_it() {
    assert_eq!(
        with_latency(except(&["silu", "embed"]), 0.0),
        ["embed@cpu", "matmul@cuda", "silu@cpu", "argmax@cuda"]
    );
    // The device's nodes are islands of the CPU now, and go there one after the other.
    assert_eq!(
        with_latency(except(&["silu", "embed"]), 1.0),
        ["embed@cpu", "matmul@cpu", "silu@cpu", "argmax@cpu"]
    );
}

#[test]
fn state_is_not_moved_with_an_island() {
    let speed = Speed { bytes_per_second: 1e15, copy_latency: 1.0, copy_bytes_per_second: 1e18 };
    let device = Config { speed, ..gpu(DeviceKind::Cuda, 0, only(&["store_kv", "attend"])) }.build();
    let all = places(&attention(1), &[&device, &cpu().build()], &policy(KvFormat::F32));
    assert_eq!(all[4..6], ["store_kv@cuda", "attend@cuda"]);
}

#[test]
fn fusion_asks_the_device_that_would_run_the_parts() {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let gate = b.silu(x);
    let act = b.mul(gate, x);
    b.output("act", act);
    let graph = b.finish().unwrap();
    let host = cpu().build();
    let on = |takes| places(&graph, &[&cuda(takes), &host], &Policy::default());
    assert_eq!(on(everything()), ["embed@cuda", "swiglu@cuda"]);
    assert_eq!(on(except(&["swiglu"])), ["embed@cuda", "silu@cuda", "mul@cuda"]);
    assert_eq!(on(only(&["silu"])), ["embed@cpu", "silu@cuda", "mul@cpu"]);
    assert_eq!(on(only(&["swiglu"])), ["embed@cpu", "silu@cpu", "mul@cpu"], "the parts are the CPU's");
    assert_eq!(on(only(&["silu", "swiglu"])), ["embed@cpu", "silu@cuda", "mul@cpu"], "one part is the CPU's");
}

/// A sum of layer 0 whose norm belongs to layer 1 stays two nodes when only layer 0 leaves the CPU.
#[test]
fn fusion_does_not_cross_the_offload_border() {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let norm = weight(&mut b, "norm", &[8]);
    b.set_layer(Some(0));
    let sum = b.add(x, x);
    b.set_layer(Some(1));
    let n = b.rms_norm(sum, norm, 1e-5);
    b.output("n", n);
    let graph = b.finish().unwrap();
    let (device, host) = (cuda(everything()), cpu().build());
    let on = |n| places(&graph, &[&device, &host], &Policy { gpu_layers: n, ..Policy::default() });
    assert_eq!(on(Some(1)), ["embed@cpu", "add@cuda", "rms_norm@cpu"]);
    assert_eq!(on(None), ["embed@cuda", "add_rms_norm@cuda"]);
    assert_eq!(on(Some(0)), ["embed@cpu", "add_rms_norm@cpu"]);
}

/// Attention over pages of another device equals the CPU's bit for bit, step after step.
#[test]
fn state_on_a_device_gives_the_same_bits() {
    let graph = attention(2);
    let ids: Vec<i32> = (0..150).map(|i| i * 7 % 16).collect();
    let run = |device: &Arc<TestDevice>| {
        let (p, s) = (policy(KvFormat::F32), states(&graph, KvFormat::F32));
        let mut executor = open_with(&graph, &[device, &cpu().build()], &p, &s, options()).unwrap();
        let mut past = 0;
        ids.chunks(7)
            .map(|c| {
                past += c.len();
                append(&mut executor, past - c.len(), c).unwrap()
            })
            .collect::<Vec<_>>()
    };
    let expected = run(&cuda(only(&[])));
    assert_eq!(run(&cuda(everything())), expected);
    assert_eq!(run(&cuda(only(&["store_kv", "attend", "mul"]))), expected);
    assert_eq!(run(&cuda(except(&["matmul"]))), expected);
    let first: Takes = Arc::new(|n: &Node| n.state.is_some() && n.layer == Some(0));
    assert_eq!(run(&cuda(first)), expected);
}

#[test]
fn state_is_opened_where_it_is_used_and_a_failure_names_it() {
    let graph = attention(2);
    let (p, s) = (policy(KvFormat::F32), states(&graph, KvFormat::F32));
    let takes: Takes = Arc::new(|n: &Node| n.layer == Some(1));
    let (device, host) = (cuda(takes), cpu().build());
    let open = || open_with(&graph, &[&device, &host], &p, &s, options());
    assert!(open().is_ok());
    for (device, name) in [(&device, "kv1"), (&host, "kv0")] {
        let opened: Vec<_> = device.events().into_iter().filter(|e| matches!(e, Event::State(_))).collect();
        assert_eq!(opened, [Event::State(name.to_string())]);
    }
    device.arm(Fault::State, 0);
    let error = open().err().expect("an error").to_string();
    assert_eq!(error, "loading state 'kv1' on cuda: injected State fault");
}

proptest! {
    /// The same graph, devices and policy give the same places, fused nodes and splits.
    #[test]
    fn placement_is_deterministic(recipe in recipe(), a in any::<u64>(), b in any::<u64>(), layers in 0u32..5) {
        let graph = build(&recipe);
        let pick = |mask: u64| -> Takes { Arc::new(move |n: &Node| mask >> (n.op.name().len() * 3 % 64) & 1 == 1) };
        let policy = Policy { gpu_layers: Some(layers), ..Policy::default() };
        let plan = || {
            let (one, two) = (cuda(pick(a)), gpu(DeviceKind::Cuda, 1, pick(b)).build());
            placed(&graph, &[&one, &two, &cpu().build()], &policy).unwrap()
        };
        let (first, second) = (plan(), plan());
        prop_assert!(first.graph.validate().is_ok());
        prop_assert!(first.graph == second.graph);
        prop_assert_eq!(&first.splits, &second.splits);
        let nodes: Vec<_> = first.splits.iter().flat_map(|s| s.nodes.iter().map(|n| n.index())).collect();
        prop_assert!(nodes.iter().copied().eq(0..first.graph.nodes.len()), "splits cover the nodes in order");
        for split in &first.splits {
            let distinct = |list: Vec<String>| list.iter().collect::<std::collections::BTreeSet<_>>().len() == list.len();
            prop_assert!(distinct(split.sends.iter().map(|s| format!("{s:?}")).collect()), "sent once");
            prop_assert!(distinct(split.receives.iter().map(|v| format!("{v:?}")).collect()), "received once");
        }
        for pair in first.splits.windows(2) {
            prop_assert!(pair[0].device != pair[1].device, "splits are maximal");
        }
    }
}

//! Devices that fail or hang: every error names what and where, and the next step is right.
//!
//! Reference for results: the same graph on one synchronous device; compared as bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::graphs::{embedded, weight};
use common::{Bits, Config, Event, Fault, TestDevice, cpu, gpu, only, open, open_with, options, step};
use minfer_graph::{Bind, Graph, GraphBuilder};
use minfer_runtime::plan::Policy;
use minfer_runtime::{DeviceKind, ExecutorOptions, RuntimeError, WaitError};

const STEP: Bind = Bind { rows: 4, outs: 1 };

/// cpu -> cuda (two values) -> vulkan and cpu -> cpu: every kind of copy.
fn graph() -> Graph {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let (w, norm) = (weight(&mut b, "w", &[8, 8]), weight(&mut b, "norm", &[8]));
    let y = b.silu(x);
    let also = b.silu(y);
    let z = b.matmul(y, w, "z");
    let n = b.rms_norm(also, norm, 1e-5);
    let sum = b.add(n, z);
    b.output("sum", sum);
    b.finish().unwrap()
}

struct Devices {
    cuda: Arc<TestDevice>,
    vulkan: Arc<TestDevice>,
    cpu: Arc<TestDevice>,
}

impl Devices {
    fn new() -> Devices {
        Devices {
            cuda: gpu(DeviceKind::Cuda, 0, only(&["silu"])).build(),
            vulkan: gpu(DeviceKind::Vulkan, 0, only(&["matmul"])).build(),
            cpu: cpu().build(),
        }
    }

    fn all(&self) -> [&Arc<TestDevice>; 3] {
        [&self.cuda, &self.vulkan, &self.cpu]
    }
}

fn reference(seed: u32) -> Bits {
    step(&mut open(&graph(), &[&cpu().build()]), STEP, seed).unwrap()
}

fn open_error(devices: &Devices) -> String {
    let opened = open_with(&graph(), &devices.all(), &Policy::default(), &[], options());
    opened.err().expect("an error").to_string()
}

#[test]
fn errors_while_opening_name_what_and_where() {
    let d = Devices::new();
    d.vulkan.arm(Fault::WeightLoad, 0);
    assert_eq!(open_error(&d), "loading weight 'w' on vulkan: injected WeightLoad fault");
    d.cuda.arm(Fault::Arena, 0);
    assert_eq!(open_error(&d), "allocating workspace on cuda: injected Arena fault");
    assert!(open_with(&graph(), &d.all(), &Policy::default(), &[], options()).is_ok(), "and then it opens");
}

/// The text of each error, on the first occasion for each.
#[test]
fn errors_while_running_name_what_and_where() {
    type Pick = fn(&Devices) -> &Arc<TestDevice>;
    let (cuda, vulkan, host): (Pick, Pick, Pick) = (|d| &d.cuda, |d| &d.vulkan, |d| &d.cpu);
    let value = "waiting for value";
    for (device, fault, text) in [
        (cuda, Fault::Compile, "compiling a split on cuda: injected Compile fault".to_string()),
        (host, Fault::Write, "writing input 'ids' on cpu: injected Write fault".to_string()),
        (cuda, Fault::Launch, "running a split on cuda: injected Launch fault".to_string()),
        (host, Fault::Launch, "running a split on cpu: injected Launch fault".to_string()),
        (host, Fault::Run, "running a split on cpu: injected Run fault".to_string()),
        (cuda, Fault::Enqueue, "enqueueing a copy on cuda: injected Enqueue fault".to_string()),
        (host, Fault::Receive, format!("{value} 'silu' (f32[rows, 8]) from cuda: injected Receive fault")),
        (cuda, Fault::Run, format!("{value} 'silu' (f32[rows, 8]) from cuda: injected Run fault")),
        (cuda, Fault::Read, format!("{value} 'silu' (f32[rows, 8]) from cuda: injected Read fault")),
        (vulkan, Fault::Run, format!("{value} 'z' (f32[rows, 8]) from vulkan: injected Run fault")),
    ] {
        let d = Devices::new();
        let mut executor = open(&graph(), &d.all());
        device(&d).arm(fault, 0);
        let error = step(&mut executor, STEP, 1).expect_err(&text).to_string();
        // Value ids are not the point here.
        let error = (0..20).fold(error, |e, id| e.replace(&format!("value {id} '"), "value '"));
        assert_eq!(error, text);
    }
}

/// Whatever fails on whichever occasion, exactly that step fails, and the steps before and after it, with
/// other inputs and other sizes, are right.
#[test]
fn an_error_anywhere_leaves_the_next_step_clean_and_right() {
    let faults = [
        Fault::Compile,
        Fault::Write,
        Fault::Launch,
        Fault::Enqueue,
        Fault::Receive,
        Fault::Run,
        Fault::Read,
    ];
    let expected: Vec<_> = (0..6).map(reference).collect();
    let mut struck = 0;
    for fault in faults {
        for device in 0..3 {
            for passes in 0..6 {
                let d = Devices::new();
                let mut executor = open(&graph(), &d.all());
                d.all()[device].arm(fault, passes);
                let results: Vec<_> = (0..6).map(|seed| step(&mut executor, STEP, seed)).collect();
                let failed = results.iter().filter(|r| r.is_err()).count();
                let struck_here = d.all()[device].shared.all_struck();
                assert_eq!(failed, usize::from(struck_here), "{fault:?} {device} {passes}");
                struck += failed;
                for (result, expected) in results.iter().zip(&expected) {
                    assert!(result.as_ref().map_or(true, |r| r == expected), "{fault:?} {device} {passes}");
                }
            }
        }
    }
    assert!(struck > 80, "only {struck} faults struck");
}

/// The classic: a copy is under way when another device fails; its old bytes must not reach the next step.
#[test]
fn a_copy_left_under_way_does_not_reach_the_next_step() {
    let slow = Config { delay: Duration::from_millis(30), ..gpu(DeviceKind::Cuda, 0, only(&["silu"])) };
    let d = Devices { cuda: slow.build(), ..Devices::new() };
    let mut executor = open(&graph(), &d.all());
    d.vulkan.arm(Fault::Launch, 0);
    assert!(step(&mut executor, STEP, 1).is_err());
    let c = executor.counters();
    assert_eq!((c.copies, c.waits), (3, 2), "one copy was enqueued and never waited for");
    assert_eq!(step(&mut executor, STEP, 2).unwrap(), reference(2));
    assert_ne!(reference(1), reference(2), "or the test could not fail");
    assert_eq!(executor.counters().copies, 3 + 4);
    assert!(d.all()[..2].iter().all(|d| d.count(|e| *e == Event::Recover) == 1));
}

/// Work whose result nobody reads: its error surfaces in its own step.
#[test]
fn an_error_behind_the_last_copy_is_not_lost() {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let w = weight(&mut b, "bias", &[8]);
    let y = b.silu(x);
    let used = b.bias_add(y, w);
    b.silu(used);
    b.output("used", used);
    let graph = b.finish().unwrap();
    let cuda = gpu(DeviceKind::Cuda, 0, only(&["silu"])).build();
    let mut executor = open(&graph, &[&cuda, &cpu().build()]);
    cuda.arm(Fault::Run, 1);
    let error = step(&mut executor, STEP, 1).unwrap_err();
    assert_eq!(error.to_string(), "waiting for the device's stream from cuda: injected Run fault");
    step(&mut executor, STEP, 2).unwrap();
}

fn hanging(release_on_recover: bool, millis: u64) -> (Devices, ExecutorOptions) {
    let cuda = Config { release_on_recover, ..gpu(DeviceKind::Cuda, 0, only(&["silu"])) };
    let devices = Devices { cuda: cuda.build(), ..Devices::new() };
    devices.cuda.arm(Fault::Hang, 0);
    (devices, ExecutorOptions { wait_timeout: Duration::from_millis(millis), ..options() })
}

#[test]
fn a_wait_is_bounded_and_names_the_value_and_the_device() {
    let (d, options) = hanging(false, 200);
    let mut executor = open_with(&graph(), &d.all(), &Policy::default(), &[], options).unwrap();
    let start = Instant::now();
    let error = step(&mut executor, STEP, 1).unwrap_err();
    let took = start.elapsed();
    // One wait, then one per asynchronous device to recover: 600 ms; the rest is slack for a busy machine.
    assert!(took >= Duration::from_millis(200) && took < Duration::from_secs(20), "{took:?}");
    let RuntimeError::Wait { what, source: WaitError::TimedOut(status), .. } = &error else {
        panic!("{error}")
    };
    assert!(what.ends_with("'silu' (f32[rows, 8])"), "{what}");
    assert!(status.starts_with("cuda is busy, ") && status.ends_with(" commands left"), "{status}");
    assert!(error.to_string().contains("from cuda: no answer in time; device status: cuda is busy"));

    let launches = d.cpu.count(|e| *e == Event::Launch);
    for _ in 0..2 {
        let broken = step(&mut executor, STEP, 2).unwrap_err();
        let text = broken.to_string();
        assert!(matches!(broken, RuntimeError::Broken { .. }), "{text}");
        let start = "the engine is stopped: cuda did not come back after an error (no answer in time; ";
        assert!(text.starts_with(start), "{text}");
    }
    assert_eq!(d.cpu.count(|e| *e == Event::Launch), launches, "nothing runs any more");
}

#[test]
fn a_device_that_comes_back_is_used_again() {
    let (d, options) = hanging(true, 1000);
    let mut executor = open_with(&graph(), &d.all(), &Policy::default(), &[], options).unwrap();
    let error = step(&mut executor, STEP, 1).unwrap_err();
    assert!(matches!(error, RuntimeError::Wait { source: WaitError::TimedOut(_), .. }), "{error}");
    assert_eq!(step(&mut executor, STEP, 2).unwrap(), reference(2));
}

/// The reference path is bounded too.
#[test]
fn a_blocking_wait_is_bounded() {
    let (d, options) = hanging(false, 200);
    let options = ExecutorOptions { sync_copies: true, ..options };
    let mut executor = open_with(&graph(), &d.all(), &Policy::default(), &[], options).unwrap();
    let error = step(&mut executor, STEP, 1).unwrap_err().to_string();
    let expected =
        "waiting for the device's stream from cuda: no answer in time; device status: cuda is busy";
    assert!(error.starts_with(expected), "{error}");
}

/// A device that waits for one that hangs does not hold its own stream for ever.
#[test]
fn a_stream_wait_is_bounded() {
    let mut b = GraphBuilder::new();
    let x = embedded(&mut b, 8);
    let w = weight(&mut b, "w", &[8, 8]);
    let y = b.silu(x);
    let z = b.matmul(y, w, "z");
    b.output("z", z);
    let graph = b.finish().unwrap();
    let (d, options) = hanging(true, 1000);
    let mut executor = open_with(&graph, &d.all(), &Policy::default(), &[], options).unwrap();
    let error = step(&mut executor, STEP, 1).unwrap_err().to_string();
    assert!(error.starts_with("waiting for z from vulkan: "), "{error}");
}

#[test]
fn bad_steps_are_refused_before_anything_runs() {
    let d = Devices::new();
    let mut executor = open(&graph(), &d.all());
    let refused = |executor: &mut minfer_runtime::Executor, rows, outs, inputs: &[(&str, &[i32])]| {
        executor.execute(Bind { rows, outs }, inputs).err().expect("a refusal").to_string()
    };
    let ids = [1, 2, 3];
    let limit = "is outside the limits of 1 to 8 rows and 0 to 8 outputs";
    for (rows, outs) in [(9, 1), (0, 0), (1, 9), (usize::MAX, 1)] {
        let text = refused(&mut executor, rows, outs, &[("ids", &ids)]);
        assert_eq!(text, format!("a step of {rows} rows and {outs} outputs {limit}"));
    }
    assert_eq!(refused(&mut executor, 3, 1, &[]), "input 'ids' is not bound");
    assert_eq!(refused(&mut executor, 4, 1, &[("ids", &ids)]), "input 'ids' has 3 numbers, the step takes 4");
    assert_eq!(d.cpu.count(|e| *e == Event::Launch), 0);
    assert!(executor.execute(Bind { rows: 3, outs: 1 }, &[("ids", &ids)]).is_ok());
}

//! State on its way to the host and back, also from a device whose stream is behind: the bytes are those that the
//! steps before have left, the steps after see what was written, and a failure leaves the next step clean.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::graphs::{append, attention, open_with, options, states};
use common::{Config, Fault, TestDevice, cpu, everything, gpu};
use minfer_graph::{PAGE, StateId};
use minfer_runtime::plan::Policy;
use minfer_runtime::{DeviceKind, Executor, KvFormat};

/// Two layers of attention, all on a slow asynchronous device.
fn executor() -> (Arc<TestDevice>, Executor) {
    let cuda = gpu(DeviceKind::Cuda, 0, everything());
    let cuda = Config { delay: Duration::from_millis(2), ..cuda }.build();
    let graph = attention(2);
    let policy = Policy { kv_format: KvFormat::F32, ..Policy::default() };
    let specs = states(&graph, KvFormat::F32);
    let executor = open_with(&graph, &[&cuda, &cpu().build()], &policy, &specs, options()).unwrap();
    (cuda, executor)
}

/// Positions `0..len` of the sequence in pages 2 and 0: `(state, page, rows)`.
fn units(len: usize) -> Vec<(StateId, u32, usize)> {
    let pages = [(2, len.min(PAGE)), (0, len.saturating_sub(PAGE))];
    let of =
        |id: u32| pages.into_iter().filter(|p| p.1 > 0).map(move |(page, rows)| (StateId(id), page, rows));
    of(0).chain(of(1)).collect()
}

fn read(executor: &mut Executor, len: usize) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for (id, page, rows) in units(len) {
        let mut bytes = vec![7];
        executor.read_state(id, page, rows, &mut bytes).unwrap();
        // K and V of four numbers each.
        assert_eq!((bytes[0], bytes.len()), (7, 1 + rows * 8 * 4), "appended");
        all.push(bytes[1..].to_vec());
    }
    all
}

fn fill(executor: &mut Executor) {
    (0..70).step_by(7).for_each(|past| drop(append(executor, past, &[1, 5, 2, 4, 3, 0, 6]).unwrap()));
}

#[test]
fn another_executor_goes_on_with_what_was_read() {
    let ((_, mut first), (_, mut second)) = (executor(), executor());
    fill(&mut first);
    let state = read(&mut first, 70);
    for ((id, page, rows), bytes) in units(70).into_iter().zip(&state) {
        second.write_state(id, page, rows, bytes).unwrap();
    }
    assert_eq!(read(&mut second, 70), state);
    let next = [3, 1, 2];
    assert_eq!(append(&mut second, 70, &next).unwrap(), append(&mut first, 70, &next).unwrap());
    let places: Vec<String> =
        first.states().map(|(id, spec, d)| format!("{} {} {d}", id.0, spec.decl.name)).collect();
    assert_eq!(places, ["0 kv0 cuda", "1 kv1 cuda"]);
}

#[test]
fn errors_name_the_state_and_the_device() {
    let (cuda, mut executor) = executor();
    fill(&mut executor);
    let want = read(&mut executor, 70);
    let mut bytes = Vec::new();
    for fault in [Fault::Enqueue, Fault::Read] {
        cuda.arm(fault, 0);
        let error = executor.read_state(StateId(1), 2, 5, &mut bytes).unwrap_err().to_string();
        assert!(error.contains("state 'kv1'") && error.contains("cuda"), "{error}");
        assert!(bytes.is_empty());
        assert_eq!(read(&mut executor, 70), want, "the next access is clean");
    }
    cuda.arm(Fault::Write, 0);
    let error = executor.write_state(StateId(1), 3, 1, &[0; 32]).unwrap_err().to_string();
    assert!(error.starts_with("writing state 'kv1' on cuda: "), "{error}");
    let error = executor.read_state(StateId(2), 0, 1, &mut bytes).unwrap_err().to_string();
    assert_eq!(error, "internal: no node uses state 2");
    append(&mut executor, 70, &[1]).unwrap();
}

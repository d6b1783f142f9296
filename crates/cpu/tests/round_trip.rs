//! DeepSeek's round trips of rows against torch and numpy, bit for bit, on every instruction set and as a graph.
//! Fixtures: `fixtures/round_trip`, made as the README there says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use minfer_cpu::{CpuDevice, Isa, Kernels};
use minfer_format::TensorBytes;
use minfer_format::bytes::AlignedBuf;
use minfer_graph::{
    Bind, Dim, Graph, GraphBuilder, RoundFormat, RoundTrip, ValueType, WeightDecl, WeightMap,
};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{Executor, ExecutorOptions, SourceError, WeightSource};

const fn fp8(group: usize, block: usize, from: usize, len: usize) -> RoundTrip {
    RoundTrip { group, format: RoundFormat::Fp8 { block, from, len } }
}

const fn fp4(group: usize, block: usize) -> RoundTrip {
    RoundTrip { group, format: RoundFormat::Fp4Hadamard { block } }
}

/// Name, width of a row, operation.
const CASES: [(&str, usize, RoundTrip); 4] = [
    ("fp8", 160, fp8(160, 64, 0, 128)),
    ("fp8_tail", 192, fp8(96, 32, 32, 64)),
    ("fp4_64", 128, fp4(64, 32)),
    ("fp4_128", 256, fp4(128, 32)),
];

fn bytes(name: &str, side: &str) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/round_trip");
    std::fs::read(dir.join(format!("{name}.{side}.f32"))).unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn tables() -> impl Iterator<Item = Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::for_isa)
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Reference: torch and numpy, zeros of both signs, ties, subnormal and large numbers included. Tolerance: none.
#[test]
fn equal_the_reference_bit_for_bit() {
    for (name, width, op) in CASES {
        let (x, want) = (floats(&bytes(name, "in")), floats(&bytes(name, "out")));
        assert_eq!((x.len(), want.len()), (24 * width, 24 * width));
        for kernels in tables() {
            let mut out = vec![f32::NAN; width];
            for (i, (x, want)) in x.chunks(width).zip(want.chunks(width)).enumerate() {
                kernels.round_trip(&op, x, &mut out);
                assert_eq!(bits(&out), bits(want), "{name}, row {i}, {kernels:?}");
            }
        }
    }
}

/// What is not a number shows in its own block only (in its whole group after a Hadamard transform).
#[test]
fn infinities_and_nans_show() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for kernels in tables() {
            let mut x = vec![1.0; 320];
            x[70] = bad;
            let mut out = vec![0.0; 320];
            kernels.round_trip(&fp8(160, 64, 0, 128), &x, &mut out);
            for (i, y) in out.iter().enumerate() {
                assert_eq!(y.is_nan(), (64..128).contains(&i), "{i}");
            }
            x.truncate(256);
            out.truncate(256);
            kernels.round_trip(&fp4(128, 32), &x, &mut out);
            assert!(out[..128].iter().all(|y| y.is_nan()) && out[128..].iter().all(|y| y.is_finite()));
        }
    }
}

struct Table(&'static str);

impl WeightSource for Table {
    fn load(&self, _: &WeightDecl) -> Result<TensorBytes, SourceError> {
        Ok(AlignedBuf::from(&bytes(self.0, "in")[..]).into())
    }
}

/// Rows of the fixture as a table, rounded.
fn graph(name: &str, width: usize, op: RoundTrip) -> Graph {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", ValueType::i32(Dim::Rows, []));
    let (name, shape) = (name.to_string(), vec![24, width]);
    let ty = minfer_format::BlockType::F32;
    let table = b.weight(WeightDecl { name, ty, shape, tensors: vec![], map: WeightMap::None });
    let x = b.embed(ids, table);
    let y = b.round_trip(x, op);
    b.output("y", y);
    b.finish().unwrap()
}

/// As a graph, on every machine, together and alone. Reference: as above. Tolerance: none.
#[test]
fn graphs_give_the_same_rows() {
    let isas = || Isa::ALL.into_iter().filter(|i| i.is_available());
    for (name, width, op) in CASES {
        let want = bytes(name, "out");
        for (isa, threads) in isas().flat_map(|isa| [1, 3].map(|threads| (isa, threads))) {
            let device = Arc::new(CpuDevice::new(threads, isa).unwrap());
            let placed = Placed::new(graph(name, width, op), vec![device], &Policy::default()).unwrap();
            let max = Bind { rows: 24, outs: 1 };
            let options = ExecutorOptions { max, wait_timeout: Duration::from_secs(1), sync_copies: false };
            let mut executor = Executor::open(placed, &[], &Table(name), options, &mut |_, _| ()).unwrap();
            let ids: Vec<i32> = (0..24).collect();
            for ids in [&ids[..], &ids[9..10], &ids[3..20]] {
                let results = executor.execute(Bind { rows: ids.len(), outs: 0 }, &[("ids", ids)]).unwrap();
                let first = 4 * width * ids[0] as usize;
                let want = &want[first..first + 4 * width * ids.len()];
                assert!(results.bytes("y").unwrap() == want, "{name}, {isa:?}, {threads} threads, {ids:?}");
            }
        }
    }
}

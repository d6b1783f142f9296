//! Products of each group of a row with its own matrix, for plain and quantised weights. Reference: a product of
//! its own for each group's slice of the row, equal bits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use minfer_cpu::{CpuDevice, Isa};
use minfer_format::bytes::AlignedBuf;
use minfer_format::{BlockType, TensorBytes, synth};
use minfer_graph::{Bind, Dim, Graph, GraphBuilder, Slice, ValueType, WeightDecl};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{Executor, ExecutorOptions, SourceError, WeightSource};

const GROUPS: usize = 3;
const N: usize = 20;
const K: usize = 256;
const VOCAB: usize = 40;

/// `all` has the matrices of all groups, a number is the name of one of them.
struct Weights;

impl WeightSource for Weights {
    fn load(&self, decl: &WeightDecl) -> Result<TensorBytes, SourceError> {
        let bytes = decl.bytes().unwrap();
        if decl.name == "table" {
            let mut data = AlignedBuf::zeroed(bytes);
            synth::fill_random(decl.ty, 5, 1.0, &mut data);
            return Ok(data.into());
        }
        let group = decl.name.parse::<usize>().ok();
        let mut all = AlignedBuf::zeroed(if group.is_some() { GROUPS * bytes } else { bytes });
        synth::fill_random(decl.ty, 7, 0.1, &mut all);
        let at = group.unwrap_or(0) * bytes;
        Ok(AlignedBuf::from(&all[at..at + bytes]).into())
    }
}

fn graph(ty: BlockType) -> Graph {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", ValueType::i32(Dim::Rows, []));
    let weight = |b: &mut GraphBuilder, name: &str, ty, shape: &[usize]| {
        let tensors = vec![name.to_string()];
        b.weight(WeightDecl {
            name: name.to_string(),
            ty,
            shape: shape.to_vec(),
            tensors,
            map: Default::default(),
        })
    };
    let table = weight(&mut b, "table", BlockType::F32, &[VOCAB, GROUPS * K]);
    let x = b.embed(ids, table);
    let all = weight(&mut b, "all", ty, &[GROUPS, N, K]);
    let together = b.head_matmul(x, all, "together");
    b.output("together", together);
    for (group, name) in ["0", "1", "2"].into_iter().enumerate() {
        let one = weight(&mut b, name, ty, &[N, K]);
        let part = b.slice(x, Slice { group: GROUPS * K, from: group * K, len: K }, "part");
        let alone = b.matmul(part, one, "alone");
        b.output(name, alone);
    }
    b.finish().unwrap()
}

#[test]
fn groups_are_products_of_their_own() {
    let isas = Isa::ALL.into_iter().filter(|i| i.is_available());
    for (isa, threads) in isas.flat_map(|isa| [1, 3].map(|threads| (isa, threads))) {
        for ty in [
            BlockType::F32,
            BlockType::BF16,
            BlockType::F8_E4M3,
            BlockType::Q8_0,
            BlockType::Q4_K,
            BlockType::AFFINE4,
        ] {
            let device = Arc::new(CpuDevice::new(threads, isa).unwrap());
            let placed = Placed::new(graph(ty), vec![device], &Policy::default()).unwrap();
            let max = Bind { rows: VOCAB, outs: 1 };
            let options = ExecutorOptions { max, wait_timeout: Duration::from_secs(1), sync_copies: false };
            let mut executor = Executor::open(placed, &[], &Weights, options, &mut |_, _| ()).unwrap();
            for rows in [1, 5, VOCAB] {
                let ids: Vec<i32> = (0..rows as i32).map(|i| (i * 7 + 3) % VOCAB as i32).collect();
                let results = executor.execute(Bind { rows, outs: 0 }, &[("ids", &ids[..])]).unwrap();
                let together = results.bytes("together").unwrap();
                assert!(together.iter().any(|&b| b != 0));
                for (group, name) in ["0", "1", "2"].into_iter().enumerate() {
                    let alone = results.bytes(name).unwrap();
                    let part = together.chunks(4 * GROUPS * N).flat_map(|row| &row[4 * group * N..][..4 * N]);
                    assert!(part.eq(alone), "{ty}, {isa:?}, {threads} threads, {rows} rows, group {group}");
                }
            }
        }
    }
}

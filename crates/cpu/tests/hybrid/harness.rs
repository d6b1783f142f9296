//! Graphs whose rows come from seeded tables, and running them.

use std::sync::Arc;
use std::time::Duration;

use minfer_cpu::{CpuDevice, Isa};
use minfer_format::bytes::AlignedBuf;
use minfer_format::{BlockType, TensorBytes, decode_row, synth};
use minfer_graph::{Bind, Dim, Graph, GraphBuilder, ValueId, ValueType, WeightDecl, WeightId};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{
    Executor, ExecutorOptions, KvFormat, RuntimeError, SourceError, StateSpec, WeightSource,
};

/// Rows of every table, and the most rows of a step.
pub(crate) const VOCAB: usize = 160;

/// The weight of a name: numbers in -1..1.
pub(crate) fn numbers(name: &str, count: usize) -> Vec<f32> {
    let mut seed = name.bytes().fold(0x9E37_79B9u32, |h, b| (h ^ u32::from(b)).wrapping_mul(16_777_619));
    let next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / 8_388_608.0 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Row `id` of a table, in f64.
pub(crate) fn row(table: &str, width: usize, id: usize) -> Vec<f64> {
    numbers(table, VOCAB * width)[id * width..][..width].iter().map(|&x| f64::from(x)).collect()
}

struct Named;

impl WeightSource for Named {
    fn load(&self, decl: &WeightDecl) -> Result<TensorBytes, SourceError> {
        let mut bytes = AlignedBuf::zeroed(decl.bytes().unwrap());
        if decl.ty != BlockType::F32 {
            synth::fill_random(decl.ty, 1, 1.0, &mut bytes);
            return Ok(bytes.into());
        }
        let numbers = numbers(&decl.name, decl.shape.iter().product());
        bytes.chunks_exact_mut(4).zip(numbers).for_each(|(b, x)| b.copy_from_slice(&x.to_le_bytes()));
        Ok(bytes.into())
    }
}

pub(crate) fn weight(b: &mut GraphBuilder, name: &str, shape: &[usize]) -> WeightId {
    b.weight(WeightDecl {
        name: name.to_string(),
        ty: BlockType::F32,
        shape: shape.to_vec(),
        tensors: vec![name.to_string()],
        map: Default::default(),
    })
}

/// A weight of another type than F32, filled at random.
pub(crate) fn weight_of(b: &mut GraphBuilder, ty: BlockType, shape: &[usize]) -> WeightId {
    let (name, tensors) = (ty.to_string(), vec![]);
    b.weight(WeightDecl { name, ty, shape: shape.to_vec(), tensors, map: Default::default() })
}

/// Its numbers.
pub(crate) fn numbers_of(ty: BlockType, count: usize) -> Vec<f32> {
    let (mut bytes, mut numbers) = (vec![0; ty.row_bytes(count).unwrap()], vec![0.0; count]);
    synth::fill_random(ty, 1, 1.0, &mut bytes);
    decode_row(ty, &bytes, &mut numbers).unwrap();
    numbers
}

/// An input of one number per row.
pub(crate) fn per_row(b: &mut GraphBuilder, name: &'static str) -> ValueId {
    b.input(name, ValueType::i32(Dim::Rows, []))
}

/// Rows of the table `name`.
pub(crate) fn table(b: &mut GraphBuilder, ids: ValueId, name: &str, width: usize) -> ValueId {
    let table = weight(b, name, &[VOCAB, width]);
    b.embed(ids, table)
}

/// Each instruction set of this machine with each number of threads.
pub(crate) fn machines() -> Vec<(Isa, usize)> {
    let isas = Isa::ALL.into_iter().filter(|i| i.is_available());
    isas.flat_map(|isa| [1, 3].map(|threads| (isa, threads))).collect()
}

/// The machine whose results the others must repeat.
pub(crate) const PLAIN: (Isa, usize) = (Isa::Scalar, 1);

/// A graph with its state on one device.
pub(crate) struct Session(pub(crate) Executor);

impl Session {
    /// `pages` is also the number of slots of recurrent state.
    pub(crate) fn new(
        graph: &Graph,
        (isa, threads): (Isa, usize),
        format: KvFormat,
        pages: usize,
    ) -> Session {
        let device = Arc::new(CpuDevice::new(threads, isa).unwrap());
        let placed = Placed::new(graph.clone(), vec![device], &Policy::default()).unwrap();
        let spec =
            |decl: &minfer_graph::StateDecl| StateSpec { decl: decl.clone(), format, pages, window_pages: 0 };
        let states: Vec<_> = graph.states.iter().map(spec).collect();
        let max = Bind { rows: VOCAB, outs: 1 };
        let options = ExecutorOptions { max, wait_timeout: Duration::from_secs(1), sync_copies: false };
        Session(Executor::open(placed, &states, &Named, options, &mut |_, _| ()).unwrap())
    }

    /// The bytes of each result, in the graph's order.
    pub(crate) fn step(&mut self, inputs: &[(&str, &[i32])]) -> Result<Vec<Vec<u8>>, RuntimeError> {
        let names: Vec<_> = self.0.placed().graph.outputs.iter().map(|o| o.name).collect();
        let rows = inputs.iter().find(|i| i.0 == "ids").unwrap().1.len();
        let results = self.0.execute(Bind { rows, outs: 0 }, inputs)?;
        Ok(names.into_iter().map(|n| results.bytes(n).unwrap().to_vec()).collect())
    }
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// |got - want| <= tolerance * max(1, |want|), number by number.
#[track_caller]
pub(crate) fn assert_close(got: &[u8], want: &[f64], tolerance: f64) {
    let got = floats(got);
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*g) - w).abs();
        assert!(error <= tolerance * w.abs().max(1.0), "number {i}: {g} is not {w} (error {error:e})");
    }
}

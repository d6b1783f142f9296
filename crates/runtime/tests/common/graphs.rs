//! Graphs for the test devices, weights for them, and running a step.

use std::sync::Arc;
use std::time::Duration;

use minfer_format::bytes::AlignedBuf;
use minfer_format::{BlockType, TensorBytes};
use minfer_graph::{
    Attend, Bind, Dim, Graph, GraphBuilder, PAGE, StateDecl, StateKind, ValueId, ValueType, WeightDecl,
    WeightId,
};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{
    Device, Executor, ExecutorOptions, KvFormat, RuntimeError, SourceError, StateSpec, WeightSource,
};
use proptest::prelude::*;

use super::device::TestDevice;

/// Numbers per row of the random graphs.
pub const WIDTH: usize = 8;
/// Rows of the embedding table.
pub const VOCAB: usize = 16;

/// Weights as a function of their name and position: small numbers of both signs.
pub struct Source;

impl WeightSource for Source {
    fn load(&self, decl: &WeightDecl) -> Result<TensorBytes, SourceError> {
        let bytes = decl.bytes().ok_or_else(|| SourceError(format!("'{}' has no size", decl.name)))?;
        let mut seed =
            decl.name.bytes().fold(0x9E37_79B9u32, |h, b| (h ^ u32::from(b)).wrapping_mul(16_777_619));
        let mut buf = AlignedBuf::zeroed(bytes);
        for number in buf.chunks_exact_mut(4) {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            number.copy_from_slice(&((seed >> 8) as f32 / 8_388_608.0 - 1.0).to_le_bytes());
        }
        Ok(buf.into())
    }
}

/// An f32 weight.
pub fn weight(b: &mut GraphBuilder, name: &str, shape: &[usize]) -> WeightId {
    b.weight(WeightDecl {
        name: name.to_string(),
        ty: BlockType::F32,
        shape: shape.to_vec(),
        tensors: vec![name.to_string()],
        map: Default::default(),
    })
}

/// `ids i32[rows]` looked up in a table of `width` numbers per row.
pub fn embedded(b: &mut GraphBuilder, width: usize) -> ValueId {
    let ids = b.input("ids", ValueType::i32(Dim::Rows, []));
    let table = weight(b, "table", &[VOCAB, width]);
    b.embed(ids, table)
}

/// A random graph: each entry is an operation and the values it reads, as positions in the list so far.
pub type Recipe = Vec<(u8, u8, u8)>;

pub fn recipe() -> impl Strategy<Value = Recipe> {
    proptest::collection::vec((0u8..8, any::<u8>(), any::<u8>()), 1..14)
}

/// Builds a recipe into a graph with the inputs `ids` and `index` and three results.
pub fn build(recipe: &[(u8, u8, u8)]) -> Graph {
    let mut b = GraphBuilder::new();
    let mut pool = vec![embedded(&mut b, WIDTH)];
    let index = b.input("index", ValueType::i32(Dim::Outs, []));
    for (i, &(op, x, y)) in recipe.iter().enumerate() {
        b.set_layer(Some(i as u32 / 4));
        // Mostly recent values, so that chains grow long.
        let pick = |at: u8| pool[pool.len() - 1 - (at as usize % 5).min(pool.len() - 1)];
        let (x, y) = (pick(x), pick(y));
        let made = match op {
            0 => b.add(x, y),
            1 => b.mul(x, y),
            2 => b.silu(x),
            3 => {
                let w = weight(&mut b, &format!("norm{i}"), &[WIDTH]);
                b.rms_norm(x, w, 1e-5)
            }
            4 => {
                let w = weight(&mut b, &format!("matrix{i}"), &[WIDTH, WIDTH]);
                b.matmul(x, w, "product")
            }
            5 => {
                let w = weight(&mut b, &format!("bias{i}"), &[WIDTH]);
                b.bias_add(x, w)
            }
            6 => {
                let gate = b.silu(x);
                b.mul(gate, y)
            }
            _ => {
                let sum = b.add(x, y);
                pool.push(sum);
                let w = weight(&mut b, &format!("norm{i}"), &[WIDTH]);
                b.rms_norm(sum, w, 1e-5)
            }
        };
        pool.push(made);
    }
    b.set_layer(None);
    let last = b.gather_rows(pool[pool.len() - 1], index);
    let best = b.argmax(last);
    b.output("hidden", pool[pool.len() / 2]);
    b.output("last", last);
    b.output("best", best);
    b.finish().unwrap()
}

/// All results of a step as bytes.
pub type Bits = Vec<Vec<u8>>;

/// Generous waits, no reference path, steps up to 8 rows and outputs.
pub fn options() -> ExecutorOptions {
    ExecutorOptions {
        max: Bind { rows: 8, outs: 8 },
        wait_timeout: Duration::from_secs(60),
        sync_copies: false,
    }
}

pub fn placed(graph: &Graph, devices: &[&Arc<TestDevice>], policy: &Policy) -> Result<Placed, RuntimeError> {
    let devices = devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect();
    Placed::new(graph.clone(), devices, policy)
}

pub fn open_with(
    graph: &Graph,
    devices: &[&Arc<TestDevice>],
    policy: &Policy,
    states: &[StateSpec],
    options: ExecutorOptions,
) -> Result<Executor, RuntimeError> {
    Executor::open(placed(graph, devices, policy)?, states, &Source, options, &mut |_, _| {})
}

pub fn open(graph: &Graph, devices: &[&Arc<TestDevice>]) -> Executor {
    open_with(graph, devices, &Policy::default(), &[], options()).unwrap()
}

/// Runs a step of a graph whose inputs are `ids` and perhaps `index`, with contents from `seed`.
pub fn step(executor: &mut Executor, bind: Bind, seed: u32) -> Result<Bits, RuntimeError> {
    let number = |i: usize| seed.wrapping_mul(2_654_435_761).wrapping_add(i as u32 * 97) >> 7;
    let ids: Vec<i32> = (0..bind.rows).map(|i| (number(i) % VOCAB as u32) as i32).collect();
    let index: Vec<i32> = (0..bind.outs).map(|i| (number(i + 50) % bind.rows as u32) as i32).collect();
    let has = |name: &str| executor.placed().graph.inputs.iter().any(|i| i.name == name);
    let mut inputs: Vec<(&str, &[i32])> = vec![("ids", &ids), ("index", &index)];
    inputs.retain(|i| has(i.0));
    execute(executor, bind, &inputs)
}

pub fn execute(executor: &mut Executor, bind: Bind, inputs: &[(&str, &[i32])]) -> Result<Bits, RuntimeError> {
    let names: Vec<_> = executor.placed().graph.outputs.iter().map(|o| o.name).collect();
    let outputs = executor.execute(bind, inputs)?;
    Ok(names.into_iter().map(|n| outputs.bytes(n).unwrap().to_vec()).collect())
}

/// Heads of [`attention`]: two query heads of four numbers over one K and V head.
const HEAD: usize = 4;

/// A layer per state: attention with a residual, then SwiGLU.
pub fn attention(layers: u32) -> Graph {
    let mut b = GraphBuilder::new();
    let mut x = embedded(&mut b, WIDTH);
    let row = |b: &mut GraphBuilder, name| b.input(name, ValueType::i32(Dim::Rows, []));
    let (positions, slots, table_at) =
        (row(&mut b, "positions"), row(&mut b, "slots"), row(&mut b, "table_at"));
    let pages = b.input("pages", ValueType::i32(Dim::Const(4), []));
    for layer in 0..layers {
        b.set_layer(Some(layer));
        let kind = StateKind::paged(&[HEAD, HEAD]);
        let state = b.state(StateDecl { name: format!("kv{layer}"), layer, kind });
        let [q, k, v] = [("q", WIDTH), ("k", HEAD), ("v", HEAD)].map(|(name, n)| {
            let w = weight(&mut b, &format!("{name}{layer}"), &[n, WIDTH]);
            b.matmul(x, w, name)
        });
        b.store_kv(&[k, v], slots, state);
        let attend = Attend { heads: 2, kv_heads: 1, scale: 0.5, v_part: 1 };
        let attended = b.attend(q, [positions, table_at, pages], state, attend);
        let sum = b.add(x, attended);
        let gate = b.silu(sum);
        x = b.mul(gate, sum);
    }
    b.set_layer(None);
    let best = b.argmax(x);
    b.output("x", x);
    b.output("best", best);
    b.finish().unwrap()
}

/// The state of [`attention`], in four pages.
pub fn states(graph: &Graph, format: KvFormat) -> Vec<StateSpec> {
    graph
        .states
        .iter()
        .map(|decl| StateSpec { decl: decl.clone(), format, pages: 4, window_pages: 0 })
        .collect()
}

/// Appends `ids` to the sequence in pages 2, 0, 3, 1 that has `past` positions.
pub fn append(executor: &mut Executor, past: usize, ids: &[i32]) -> Result<Bits, RuntimeError> {
    let pages = [2, 0, 3, 1];
    let positions: Vec<i32> = (past..past + ids.len()).map(|p| p as i32).collect();
    let page = PAGE as i32;
    let slots: Vec<i32> = positions.iter().map(|p| pages[(p / page) as usize] * page + p % page).collect();
    let inputs: [(&str, &[i32]); 5] = [
        ("ids", ids),
        ("positions", &positions),
        ("slots", &slots),
        ("table_at", &vec![0; ids.len()]),
        ("pages", &pages),
    ];
    execute(executor, Bind { rows: ids.len(), outs: 0 }, &inputs)
}

//! Every row of the fusion table: on the CPU the fused op gives the bits of its parts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use minfer_cpu::{CpuDevice, Isa};
use minfer_format::{BlockType, TensorBytes, bytes::AlignedBuf, synth};
use minfer_graph::{
    Bind, DeviceId, Dim, FUSIONS, Graph, GraphBuilder, Node, ValueType, WeightDecl, WeightId, WeightUse,
};
use minfer_runtime::plan::{Placed, Policy};
use minfer_runtime::{
    Arena, Device, DeviceError, Executor, ExecutorOptions, KvFormat, Memory, Program, ProgramSpec,
    SourceError, Speed, StateBuffer, StateSpec, WaitError, WeightHandle, WeightSource,
};

/// The CPU, refusing fused ops.
struct Unfused(CpuDevice);

impl Device for Unfused {
    fn id(&self) -> DeviceId {
        self.0.id()
    }
    fn describe(&self) -> String {
        self.0.describe()
    }
    fn supports(&self, graph: &Graph, node: &Node) -> bool {
        !node.op.is_fused() && self.0.supports(graph, node)
    }
    fn reads_kv(&self, format: KvFormat) -> bool {
        self.0.reads_kv(format)
    }
    fn memory(&self) -> Memory {
        self.0.memory()
    }
    fn speed(&self) -> Speed {
        self.0.speed()
    }
    fn is_async(&self) -> bool {
        self.0.is_async()
    }
    fn weight_bytes(&self, decl: &WeightDecl, how: WeightUse) -> Option<u64> {
        self.0.weight_bytes(decl, how)
    }
    fn load_weight(
        &self,
        decl: &WeightDecl,
        how: WeightUse,
        data: TensorBytes,
    ) -> Result<WeightHandle, DeviceError> {
        self.0.load_weight(decl, how, data)
    }
    fn open_state(&self, spec: &StateSpec) -> Result<Arc<dyn StateBuffer>, DeviceError> {
        self.0.open_state(spec)
    }
    fn open_arena(&self, bytes: usize) -> Result<Arc<dyn Arena>, DeviceError> {
        self.0.open_arena(bytes)
    }
    fn compile(&self, spec: &ProgramSpec<'_>) -> Result<Box<dyn Program>, DeviceError> {
        self.0.compile(spec)
    }
    fn synchronize(&self, timeout: Duration) -> Result<(), WaitError> {
        self.0.synchronize(timeout)
    }
    fn recover(&self, timeout: Duration) -> Result<(), WaitError> {
        self.0.recover(timeout)
    }
}

struct Seeded;

impl WeightSource for Seeded {
    fn load(&self, decl: &WeightDecl) -> Result<TensorBytes, SourceError> {
        let mut bytes = AlignedBuf::zeroed(decl.bytes().unwrap());
        let seed = decl.name.bytes().map(u64::from).sum();
        synth::fill_random(decl.ty, seed, 1.0, &mut bytes);
        Ok(bytes.into())
    }
}

const WIDTH: usize = 96;
const ROWS: usize = 5;

/// Two random rows of floats per token, `a` and `b`, from embedding tables.
fn start(b: &mut GraphBuilder) -> [minfer_graph::ValueId; 2] {
    let ids = b.input("ids", ValueType::i32(Dim::Rows, []));
    ["a", "b"].map(|name| {
        let table = weight(b, name, BlockType::F32, &[ROWS, WIDTH]);
        b.embed(ids, table)
    })
}

fn weight(b: &mut GraphBuilder, name: &str, ty: BlockType, shape: &[usize]) -> WeightId {
    b.weight(WeightDecl {
        name: name.to_string(),
        ty,
        shape: shape.to_vec(),
        tensors: vec![name.to_string()],
        map: Default::default(),
    })
}

/// A graph in which the named fusion applies; its results are named `out` and, for two, `more`.
fn graph_for(fusion: &str) -> (Graph, &'static str) {
    let mut b = GraphBuilder::new();
    let [x, y] = start(&mut b);
    let op = match fusion {
        "swiglu" => {
            let gate = b.silu(x);
            let out = b.mul(gate, y);
            b.output("out", out);
            "swiglu"
        }
        "swiglu_quantize" => {
            let gate = b.silu(x);
            let inner = b.mul(gate, y);
            let w = weight(&mut b, "w", BlockType::Q8_0, &[16, WIDTH]);
            let out = b.matmul(inner, w, "out");
            b.output("out", out);
            "swiglu_quantize"
        }
        "rms_norm_quantize" => {
            let norm = weight(&mut b, "norm", BlockType::F32, &[WIDTH]);
            let normed = b.rms_norm(x, norm, 1e-6);
            let w = weight(&mut b, "w", BlockType::Q4_0, &[16, WIDTH]);
            let out = b.matmul(normed, w, "out");
            b.output("out", out);
            "rms_norm_quantize"
        }
        "add_rms_norm" => {
            let sum = b.add(x, y);
            let norm = weight(&mut b, "norm", BlockType::F32, &[WIDTH]);
            let normed = b.rms_norm(sum, norm, 1e-6);
            b.output("out", normed);
            b.output("more", sum);
            "add_rms_norm"
        }
        other => panic!("no graph for fusion '{other}': add one"),
    };
    (b.finish().unwrap(), op)
}

fn run(graph: Graph, device: Arc<dyn Device>) -> (Vec<&'static str>, Vec<Vec<u8>>) {
    let outputs: Vec<_> = graph.outputs.iter().map(|o| o.name).collect();
    let placed = Placed::new(graph, vec![device], &Policy::default()).unwrap();
    let ops = placed.graph.nodes.iter().map(|n| n.op.name()).collect();
    let max = Bind { rows: ROWS, outs: 1 };
    let options = ExecutorOptions { max, wait_timeout: Duration::from_secs(1), sync_copies: false };
    let mut executor = Executor::open(placed, &[], &Seeded, options, &mut |_, _| ()).unwrap();
    let ids: Vec<i32> = (0..ROWS as i32).collect();
    let results = executor.execute(Bind { rows: ROWS, outs: 0 }, &[("ids", &ids)]).unwrap();
    (ops, outputs.iter().map(|name| results.bytes(name).unwrap().to_vec()).collect())
}

#[test]
fn fused_ops_give_the_bits_of_their_parts() {
    for fusion in &FUSIONS {
        let (graph, op) = graph_for(fusion.name);
        for isa in Isa::ALL.into_iter().filter(|i| i.is_available()) {
            let (ops, fused) = run(graph.clone(), Arc::new(CpuDevice::new(2, isa).unwrap()));
            assert!(ops.contains(&op), "{}: {ops:?}", fusion.name);
            let (ops, parts) = run(graph.clone(), Arc::new(Unfused(CpuDevice::new(2, isa).unwrap())));
            assert!(!ops.contains(&op), "{}: {ops:?}", fusion.name);
            assert!(fused[0].iter().any(|&b| b != 0), "{}: results are not all zero", fusion.name);
            assert_eq!(fused, parts, "{} with {} kernels", fusion.name, isa.name());
        }
    }
}

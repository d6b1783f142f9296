//! A model's tensors by the numbers that they stand for: a quantised weight that a directory spreads over several tensors
//! is one here, with the shape of its numbers and the bytes of its scales and biases.

use std::collections::{BTreeMap, BTreeSet};

use minfer_engine::Checkpoint;
use minfer_format::HfDir;
use minfer_format::hf::{Dtype, HfTensor, Packed};
use minfer_graph::{Graph, WeightDecl};
use minfer_model::DraftHead;
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct Tensor {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) ty: String,
    /// Outermost first.
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
}

#[derive(Serialize)]
pub(super) struct TypeUse {
    #[serde(rename = "type")]
    pub(super) ty: String,
    pub(super) tensors: usize,
    pub(super) bytes: u64,
}

impl Tensor {
    fn new(name: &str, ty: String, shape: &[usize], bytes: usize) -> Tensor {
        Tensor { name: printable(name), ty, shape: shape.to_vec(), bytes: bytes as u64 }
    }

    fn of_weight(w: &WeightDecl) -> Tensor {
        Tensor::new(&w.name, w.ty.to_string(), &w.shape, w.bytes().unwrap_or(0))
    }
}

/// The file's tensors; those of a shape are the weights that its graphs want, and its n-gram table.
pub(super) fn list(
    model: &Checkpoint,
    graph: &Graph,
    head: Option<&DraftHead>,
    table: Option<&WeightDecl>,
) -> Vec<Tensor> {
    // The head shares some of the model's.
    let own = head.into_iter().flat_map(DraftHead::weights).filter(|w| !graph.weights.contains(w));
    let weights = graph.weights.iter().chain(own).chain(table);
    match model {
        Checkpoint::Gguf(g) => {
            let tensors = g.tensors().iter();
            tensors.map(|t| Tensor::new(&t.name, t.ty.to_string(), &t.shape, t.n_bytes())).collect()
        }
        Checkpoint::Hf(d) => of_directory(d, weights),
        Checkpoint::Shape(_) => weights.map(Tensor::of_weight).collect(),
    }
}

/// Tensors of a directory, of which the model reads `weights`.
fn of_directory<'w>(dir: &HfDir, weights: impl Iterator<Item = &'w WeightDecl>) -> Vec<Tensor> {
    let mut rows = BTreeMap::new();
    for weight in weights {
        rows.extend(weight.tensors.iter().map(|name| (name.as_str(), Checkpoint::stored_row(weight))));
    }
    // What is no weight of the model may be packed in ways that are not known: it stays as it is stored.
    let packed = |t: &HfTensor| {
        let k = rows.get(t.name.as_str()).copied().or_else(|| declared_row(dir, t));
        dir.packed(&t.name, k.unwrap_or(0)).ok().flatten()
    };
    let packs: BTreeMap<&str, Packed> =
        dir.tensors().filter_map(|t| packed(t).map(|p| (t.name.as_str(), p))).collect();
    let sides: BTreeSet<&str> = packs.values().flat_map(|p| dir.sides(p)).map(|t| t.name.as_str()).collect();
    let own = dir.tensors().filter(|t| !sides.contains(t.name.as_str()));
    own.map(|t| match packs.get(t.name.as_str()) {
        Some(pack) => {
            let sides: usize = dir.sides(pack).map(HfTensor::n_bytes).sum();
            Tensor::new(&t.name, pack.ty().to_string(), pack.shape(), t.n_bytes() + sides)
        }
        None => {
            let ty = t.ty().map_or_else(|| format!("{:?}", t.dtype), |ty| ty.to_string());
            Tensor::new(&t.name, ty, &t.shape, t.n_bytes())
        }
    })
    .collect()
}

/// Numbers in a row of a pack that the model does not read, by the bits that MLX's configuration gives for it or for all.
fn declared_row(dir: &HfDir, tensor: &HfTensor) -> Option<usize> {
    let all = dir.config().get("quantization").filter(|_| tensor.dtype == Dtype::U32)?;
    let own = tensor.name.strip_suffix(".weight").and_then(|stem| all.get(stem));
    let bits = usize::try_from(own.unwrap_or(all).get("bits")?.as_u64()?).ok()?;
    tensor.shape.last()?.checked_mul(32)?.checked_div(bits)
}

/// How many tensors there are of each type, most bytes first.
pub(super) fn by_type(tensors: &[Tensor]) -> Vec<TypeUse> {
    let mut types: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for t in tensors {
        let entry = types.entry(&t.ty).or_default();
        entry.0 += 1;
        entry.1 += t.bytes;
    }
    let list = types.into_iter().map(|(ty, (tensors, bytes))| TypeUse { ty: ty.to_string(), tensors, bytes });
    let mut list: Vec<_> = list.collect();
    list.sort_by_key(|t| std::cmp::Reverse(t.bytes));
    list
}

/// Text out of a file, without what could steer the terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(120).collect()
}

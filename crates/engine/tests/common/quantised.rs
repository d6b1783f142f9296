//! Quantised copies of the tiny checkpoints: each tensor as its layout stores it, and beside it, in a second directory,
//! the numbers that it stands for as F32. Both are worked out here, from the definitions of the formats.

use std::collections::BTreeMap;
use std::path::Path;

use minfer_engine::Checkpoint;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Plain,
    /// `X.weight_scale_inv`, F32; rows and columns of a square.
    Fp8Inverse(usize, usize),
    /// `X.scale`, F8_E8M0.
    Fp8Exponent(usize, usize),
    /// `X.scale`, F8_E8M0 per 32.
    Fp4,
    /// MLX's `X.scales`, U8 per 32.
    Mxfp4,
    /// MLX's `X.scales` and `X.biases`: bits, group, dtype.
    Affine(usize, usize, Dtype),
}

pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub type Tensors = BTreeMap<String, Stored>;

/// A tensor of F32 of `[.., k]`.
pub struct Numbers {
    pub shape: Vec<usize>,
    pub numbers: Vec<f32>,
}

/// Tensors of one directory; those that are not F32 stay as they are.
pub struct Source {
    pub floats: BTreeMap<String, Numbers>,
    pub others: Tensors,
}

impl Source {
    pub fn open(dir: &Path) -> Source {
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let mut source = Source { floats: BTreeMap::new(), others: Tensors::new() };
        for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let shape = t.shape().to_vec();
            if t.dtype() == Dtype::F32 {
                let numbers = t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                source.floats.insert(name, Numbers { shape, numbers });
            } else {
                source.others.insert(name, Stored { dtype: t.dtype(), shape, bytes: t.data().to_vec() });
            }
        }
        source
    }

    /// Joins `STEM.experts.E.REST` into `STEM.switch_mlp.REST` for matrices with rows of `k` numbers, as MLX does.
    pub fn stack_experts(&mut self, experts: usize, k: usize) {
        let first = |(n, x): &(&String, &Numbers)| n.contains(".experts.0.") && x.shape[1] == k;
        let names: Vec<String> = self.floats.iter().filter(first).map(|(n, _)| n.clone()).collect();
        for name in &names {
            let mut shape = self.floats[name].shape.clone();
            shape.insert(0, experts);
            let expert = |e: usize| name.replace(".experts.0.", &format!(".experts.{e}."));
            let numbers =
                (0..experts).flat_map(|e| self.floats.remove(&expert(e)).unwrap().numbers).collect();
            let stack = name.replace(".experts.0.", ".switch_mlp.");
            self.floats.insert(stack, Numbers { shape, numbers });
        }
    }
}

/// A copy with the layouts that `choose` gives by name and shape, and one of the numbers that it stands for. `edit`
/// changes the quantised copy's configuration.
pub fn copies(
    dir: &Path,
    source: &Source,
    edit: impl FnOnce(&mut Value),
    choose: impl Fn(&str, &[usize]) -> Layout,
) -> [TempDir; 2] {
    let (mut packed, mut plain) = (Tensors::new(), Tensors::new());
    for (name, x) in &source.floats {
        let numbers = store(&mut packed, name, x, choose(name, &x.shape));
        plain.insert(name.clone(), f32s(&x.shape, &numbers));
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    let originals = config.to_string();
    edit(&mut config);
    [(packed, config.to_string()), (plain, originals)].map(|(tensors, config)| {
        let copy = tempfile::tempdir().unwrap();
        std::fs::write(copy.path().join("config.json"), config).unwrap();
        let all = tensors.iter().chain(&source.others);
        let views = all.map(|(n, t)| (n, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &copy.path().join("model.safetensors")).unwrap();
        copy
    })
}

fn f32s(shape: &[usize], numbers: &[f32]) -> Stored {
    let bytes = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    Stored { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

/// Adds the tensors of one weight; gives the numbers that they stand for.
fn store(out: &mut Tensors, name: &str, x: &Numbers, layout: Layout) -> Vec<f32> {
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    let scale = format!("{stem}.scale");
    match layout {
        Layout::Plain => {
            out.insert(name.to_string(), f32s(&x.shape, &x.numbers));
            x.numbers.clone()
        }
        Layout::Fp8Inverse(n, k) => fp8(out, name, &format!("{name}_scale_inv"), x, [n, k], false),
        Layout::Fp8Exponent(n, k) => fp8(out, name, &scale, x, [n, k], true),
        Layout::Fp4 => fp4(out, name, &scale, x, [Dtype::I8, Dtype::F8_E8M0]),
        Layout::Mxfp4 => fp4(out, name, &format!("{stem}.scales"), x, [Dtype::U32, Dtype::U8]),
        Layout::Affine(bits, group, dtype) => affine(out, name, stem, x, [bits, group], dtype),
    }
}

/// The value of an E4M3 byte, from the table of the format's specification.
pub fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let size =
        if exponent == 0 { mantissa * 2f64.powi(-9) } else { (8.0 + mantissa) * 2f64.powi(exponent - 10) };
    (if byte & 0x80 == 0 { size } else { -size }) as f32
}

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The index of the nearest of ascending values from zero, and a sign bit above `bits` bits; never minus zero.
fn nearest(x: f32, values: &[f32], sign: u8) -> u8 {
    let distance = |i: &usize| (values[*i] - x.abs()).abs();
    let i = (0..values.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap() as u8;
    if x < 0.0 && i > 0 { i | sign } else { i }
}

/// `[matrices, n, k]` of a tensor.
fn sizes(shape: &[usize]) -> [usize; 3] {
    let [outer @ .., n, k] = shape else { panic!("a matrix has two dimensions") };
    [outer.iter().product(), *n, *k]
}

/// The biased exponent of the smallest power of two that is not below `x`.
fn exponent(x: f32) -> u8 {
    (127 + x.log2().ceil() as i32).clamp(0, 254) as u8
}

fn fp8(out: &mut Tensors, name: &str, side: &str, x: &Numbers, block: [usize; 2], power: bool) -> Vec<f32> {
    let values: Vec<f32> = (0..0x7f).map(e4m3).collect();
    let [matrices, n, k] = sizes(&x.shape);
    let squares = [n.div_ceil(block[0]), k.div_ceil(block[1])];
    let at = |i: usize| (i / k / n * squares[0] + i / k % n / block[0]) * squares[1] + i % k / block[1];
    let mut largest = vec![0f32; matrices * squares[0] * squares[1]];
    x.numbers.iter().enumerate().for_each(|(i, v)| largest[at(i)] = largest[at(i)].max(v.abs()));
    let powers: Vec<u8> = largest.iter().map(|a| exponent(a / 448.0)).collect();
    let scales: Vec<f32> = match power {
        true => powers.iter().map(|&e| 2f32.powi(i32::from(e) - 127)).collect(),
        false => largest.iter().map(|a| a / 448.0).collect(),
    };
    let codes: Vec<u8> =
        x.numbers.iter().enumerate().map(|(i, v)| nearest(v / scales[at(i)], &values, 0x80)).collect();
    let numbers = codes.iter().enumerate().map(|(i, &c)| scales[at(i)] * e4m3(c)).collect();
    let mut shape = x.shape.clone();
    out.insert(name.to_string(), Stored { dtype: Dtype::F8_E4M3, shape: shape.clone(), bytes: codes });
    shape.truncate(shape.len() - 2);
    shape.extend(squares);
    let side_tensor = match power {
        true => Stored { dtype: Dtype::F8_E8M0, shape, bytes: powers },
        false => f32s(&shape, &scales),
    };
    out.insert(side.to_string(), side_tensor);
    numbers
}

fn fp4(out: &mut Tensors, name: &str, side: &str, x: &Numbers, [codes, scales]: [Dtype; 2]) -> Vec<f32> {
    let (mut bytes, mut exponents, mut numbers) = (vec![], vec![], vec![]);
    for block in x.numbers.as_chunks::<32>().0 {
        let e = exponent(block.iter().fold(0f32, |m, v| m.max(v.abs())) / 6.0);
        let scale = 2f32.powi(i32::from(e) - 127);
        let nibbles: Vec<u8> = block.iter().map(|v| nearest(v / scale, &E2M1, 8)).collect();
        let value = |n: &u8| if n & 8 == 0 { E2M1[usize::from(n & 7)] } else { -E2M1[usize::from(n & 7)] };
        numbers.extend(nibbles.iter().map(|n| scale * value(n)));
        bytes.extend(nibbles.chunks_exact(2).map(|two| two[0] | two[1] << 4));
        exponents.push(e);
    }
    let with_last = |k: usize| [&x.shape[..x.shape.len() - 1], &[k]].concat();
    let k = *x.shape.last().unwrap();
    let width = codes.bitsize() / 4;
    out.insert(name.to_string(), Stored { dtype: codes, shape: with_last(k / width), bytes });
    out.insert(side.to_string(), Stored { dtype: scales, shape: with_last(k / 32), bytes: exponents });
    numbers
}

/// Cuts a number to what the dtype holds (F32 or BF16).
fn cut(x: f32, dtype: Dtype) -> f32 {
    if dtype == Dtype::BF16 { f32::from_bits(x.to_bits() & 0xffff_0000) } else { x }
}

fn affine(
    out: &mut Tensors,
    name: &str,
    stem: &str,
    x: &Numbers,
    [bits, group]: [usize; 2],
    dtype: Dtype,
) -> Vec<f32> {
    let top = ((1u32 << bits) - 1) as f32;
    let (mut stream, mut sides, mut numbers) = (vec![], [vec![], vec![]], vec![]);
    for numbers_in in x.numbers.chunks_exact(group) {
        let low = numbers_in.iter().copied().fold(f32::INFINITY, f32::min);
        let high = numbers_in.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (scale, bias) = (cut((high - low) / top, dtype), cut(low, dtype));
        for v in numbers_in {
            let code = ((v - bias) / scale).round().clamp(0.0, top);
            numbers.push(scale * code + bias);
            stream.extend((0..bits).map(|bit| code as u32 >> bit & 1 == 1));
        }
        for (side, v) in sides.iter_mut().zip([scale, bias]) {
            side.extend_from_slice(&v.to_le_bytes()[if dtype == Dtype::BF16 { 2 } else { 0 }..]);
        }
    }
    let bytes =
        stream.chunks(8).map(|b| b.iter().rev().fold(0u8, |byte, &bit| byte << 1 | u8::from(bit))).collect();
    let k = *x.shape.last().unwrap();
    let with_last = |k: usize| [&x.shape[..x.shape.len() - 1], &[k]].concat();
    out.insert(name.to_string(), Stored { dtype: Dtype::U32, shape: with_last(k * bits / 32), bytes });
    for (side, bytes) in ["scales", "biases"].into_iter().zip(sides) {
        out.insert(format!("{stem}.{side}"), Stored { dtype, shape: with_last(k / group), bytes });
    }
    numbers
}

/// Every weight of both graphs as numbers; asserts that they are the same bits and gives how many are quantised.
pub fn same_weights(packed: &Checkpoint, plain: &Checkpoint) -> usize {
    let weights = |model: &Checkpoint| minfer_model::load(model).unwrap().graph(model, 8).unwrap().weights;
    let numbers = |model: &Checkpoint, decl: &minfer_graph::WeightDecl| -> Vec<u32> {
        let mut numbers = vec![0f32; decl.shape.iter().product()];
        minfer_format::decode_row(decl.ty, &model.load(decl).unwrap(), &mut numbers).unwrap();
        numbers.iter().map(|x| x.to_bits()).collect()
    };
    let (ours, theirs) = (weights(packed), weights(plain));
    assert_eq!(ours.len(), theirs.len());
    for (a, b) in ours.iter().zip(&theirs) {
        assert_eq!(a.shape, b.shape, "{}", a.name);
        assert!(numbers(packed, a) == numbers(plain, b), "{} ({})", a.name, a.ty);
    }
    ours.iter().filter(|w| w.ty.block_len() > 1).count()
}

//! Quantised weights of Hugging Face directories: codes in one tensor, scales (and biases) in others beside it.
//!
//! In: the name of a weight. Out: a [`Packed`], whose rows are gathered into blocks of one [`BlockType`] without
//! changing a number. The layouts, told apart by the dtype of `X.weight`:
//!
//! | `X.weight` | beside it | numbers | blocks |
//! |---|---|---|---|
//! | F8_E4M3 `[n, k]` | `X.weight_scale_inv` or `X.scale`, one per square of `weight_block_size` | `scale * w` | F8_E4M3 |
//! | I8 `[n, k / 2]` | `X.scale`, F8_E8M0 `[n, k / 32]` | `2^(e - 127) * E2M1` | MXFP4 |
//! | U32 `[n, k * bits / 32]` | `X.scales`, U8 `[n, k / 32]` | the same, of MLX | MXFP4 |
//! | U32 `[n, k * bits / 32]` | `X.scales`, `X.biases` `[n, k / group]` | `scale * code + bias` | AFFINE4, AFFINE8 |
//!
//! More dimensions in front (stacked experts) are allowed in all of them. Number `j` of a row of U32 or I8 has bits
//! `j * bits ..` of the row's bytes, lowest first. Sources: DeepSeek's and GLM's model cards and MLX's `quantize`.

use std::ops::Range;
use std::path::PathBuf;

use half::{bf16, f16};
use serde_json::Value;

use super::{Dtype, HfDir, HfTensor};
use crate::block::BlockType;
use crate::bytes::TensorBytes;
use crate::error::{Error, shown};

/// Numbers in a block of any type that rows are gathered into.
const BLOCK: usize = 32;
/// Bits of a code, and numbers under a scale, that MLX's affine packs have.
const AFFINE_BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
const AFFINE_GROUPS: [usize; 3] = [32, 64, 128];

/// A weight that is spread over several tensors. It shares the mapped files; nothing is gathered until it is asked for.
#[derive(Clone, Debug)]
pub struct Packed {
    dir: PathBuf,
    name: String,
    layout: Layout,
    ty: BlockType,
    /// Of the numbers, outermost first.
    shape: Vec<usize>,
    codes: TensorBytes,
    scales: Scales,
    biases: Option<Scales>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// A scale for each square of `[rows, columns]`.
    Fp8([usize; 2]),
    Fp4,
    /// Bits of a code, numbers under a scale.
    Affine(usize, usize),
}

/// Numbers of a tensor beside the codes.
#[derive(Clone, Debug)]
struct Scales {
    dtype: Dtype,
    bytes: TensorBytes,
}

impl Scales {
    fn get(&self, i: usize) -> f32 {
        let at = |width: usize| &self.bytes[width * i..width * (i + 1)];
        match (self.dtype, at(self.dtype.bitsize() / 8)) {
            (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (Dtype::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            // `2^(e - 127)`; the smallest is subnormal, 255 is NaN.
            (_, &[0]) => f32::from_bits(0x0040_0000),
            (_, &[e @ 1..=254]) => f32::from_bits(u32::from(e) << 23),
            _ => f32::NAN,
        }
    }
}

impl Packed {
    /// The same with its tensors in memory of this process.
    ///
    /// # Errors
    /// A file has become shorter, or cannot be read.
    pub fn read(&self) -> Result<Packed, Error> {
        let scales = |s: &Scales| Ok::<_, Error>(Scales { bytes: s.bytes.read(&self.name)?, ..*s });
        Ok(Packed {
            codes: self.codes.read(&self.name)?,
            scales: scales(&self.scales)?,
            biases: self.biases.as_ref().map(scales).transpose()?,
            ..self.clone()
        })
    }
}

impl HfDir {
    /// The weight `name` as rows of `k` numbers, if it is quantised; `None` where it is absent or its numbers stand for
    /// themselves. Only packs of U32 need `k`: they do not say how many bits a number has.
    ///
    /// # Errors
    /// A tensor beside it is missing, or has another shape or dtype than the layout wants.
    pub fn packed(&self, name: &str, k: usize) -> Result<Option<Packed>, Error> {
        let Some(tensor) = self.tensor(name) else { return Ok(None) };
        match tensor.dtype {
            Dtype::F8_E4M3 => self.fp8(tensor).map(Some),
            Dtype::I8 => self.fp4(tensor).map(Some),
            Dtype::U32 => self.mlx(tensor, k).map(Some),
            _ => Ok(None),
        }
    }

    /// Whether a tensor is `X.scale` with the scales of a quantised `X.weight`, not a number that outputs are to be
    /// multiplied by.
    pub fn is_packed_scale(&self, name: &str) -> bool {
        let weight = name.strip_suffix(".scale").and_then(|stem| self.tensor(&format!("{stem}.weight")));
        weight.is_some_and(|w| match w.dtype {
            Dtype::F8_E4M3 => {
                fp8_scales(&w.name).iter().find(|n| self.tensor(n).is_some()).is_some_and(|n| n == name)
            }
            Dtype::I8 => true,
            _ => false,
        })
    }

    /// The tensors with the scales and biases of a weight of this directory.
    pub fn sides(&self, packed: &Packed) -> impl Iterator<Item = &HfTensor> {
        let name = &packed.name;
        let names = match (packed.layout, self.tensor(name).map(|t| t.dtype)) {
            (Layout::Fp8(_), _) => {
                fp8_scales(name).into_iter().filter(|n| self.tensor(n).is_some()).take(1).collect()
            }
            (Layout::Fp4, Some(Dtype::I8)) => vec![fp4_scales(name)],
            (Layout::Fp4, _) => mlx_sides(name).into_iter().take(1).collect(),
            (Layout::Affine(..), _) => mlx_sides(name).to_vec(),
        };
        names.into_iter().filter_map(|name: String| self.tensor(&name))
    }

    /// Refuses weights that are quantised in a way that is not known here, before their odd shapes are met.
    ///
    /// # Errors
    /// `config.json` names another method, or tensors have names that only other methods give.
    pub fn check_quantisation(&self) -> Result<(), Error> {
        let refused = |found: String| Err(Error::Quantisation { dir: self.path.clone(), found });
        for config in self.quantisation_configs() {
            match (config.get("quant_method").map(Value::as_str), config.get("mode").and_then(Value::as_str))
            {
                (None | Some(Some("fp8")), None | Some("affine" | "mxfp4")) => {}
                (None | Some(Some("fp8")), Some(mode)) => return refused(format!("'{}'", shown(mode))),
                (Some(method), _) => return refused(format!("'{}'", shown(method.unwrap_or("?")))),
            }
        }
        let foreign = |t: &&HfTensor| t.name.ends_with(".qweight") || t.name.ends_with(".weight_packed");
        match self.tensors().find(foreign) {
            Some(t) => refused(format!("in the tensor '{}' ({})", shown(&t.name), t.dtype)),
            None => Ok(()),
        }
    }

    /// What `config.json` says about quantisation: MLX's key, Hugging Face's, and that of a nested text model.
    fn quantisation_configs(&self) -> impl Iterator<Item = &Value> {
        let config = &self.config;
        let text = config.get("text_config");
        let of = |key| [config.get(key), text.and_then(|t| t.get(key))];
        of("quantization_config").into_iter().chain(of("quantization")).flatten()
    }

    fn fp8(&self, tensor: &HfTensor) -> Result<Packed, Error> {
        let [n, k] = self.matrix(tensor)?;
        let [by_n, by_k] = self.block_size(tensor)?;
        if !k.is_multiple_of(BLOCK) || (k > by_k && !by_k.is_multiple_of(BLOCK)) {
            let why =
                format!("has rows of {k} numbers in blocks of {by_k}; both should be multiples of {BLOCK}");
            return Err(self.bad_pack(tensor, why));
        }
        let names = fp8_scales(&tensor.name);
        let name = names.iter().find(|n| self.tensor(n).is_some());
        let missing =
            || format!("is F8_E4M3, but neither '{}' nor '{}' with its scales is there", names[0], names[1]);
        let name = name.ok_or_else(|| self.bad_pack(tensor, missing()))?;
        let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F8_E8M0];
        let scales = self.beside(tensor, name, &dtypes, [n.div_ceil(by_n), k.div_ceil(by_k)])?;
        self.pack(tensor, Layout::Fp8([by_n, by_k]), BlockType::F8_E4M3, k, scales, None)
    }

    /// Rows and columns of the squares that share a scale.
    fn block_size(&self, tensor: &HfTensor) -> Result<[usize; 2], Error> {
        let Some(found) = self.quantisation_configs().find_map(|c| c.get("weight_block_size")) else {
            return Ok([128, 128]);
        };
        let sizes = found.as_array().map(|a| a.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
        match sizes.as_deref() {
            Some(&[n, k]) if n > 0 && k > 0 && n.max(k) <= 1 << 20 => Ok([n as usize, k as usize]),
            _ => {
                let why = "cannot be read: weight_block_size in config.json is not two sizes from 1 to 2^20";
                Err(self.bad_pack(tensor, why.to_string()))
            }
        }
    }

    fn fp4(&self, tensor: &HfTensor) -> Result<Packed, Error> {
        let [n, bytes] = self.matrix(tensor)?;
        let k = 2 * bytes;
        if !k.is_multiple_of(BLOCK) {
            return Err(self
                .bad_pack(tensor, format!("is FP4 with rows of {k} numbers, not whole blocks of {BLOCK}")));
        }
        let name = fp4_scales(&tensor.name);
        let scales = self.beside(tensor, &name, &[Dtype::F8_E8M0], [n, k / BLOCK])?;
        self.pack(tensor, Layout::Fp4, BlockType::MXFP4, k, scales, None)
    }

    fn mlx(&self, tensor: &HfTensor, k: usize) -> Result<Packed, Error> {
        let [n, words] = self.matrix(tensor)?;
        let [scales, biases] = mlx_sides(&tensor.name);
        let beside = self.tensor(&scales).ok_or_else(|| self.no_scales(tensor, &scales))?;
        let groups = beside.shape.last().copied().unwrap_or(0);
        let geometry = || {
            let why = format!(
                "of {words} words a row with {groups} scales ({}) does not hold {k} numbers a row in a layout of MLX that is known",
                beside.dtype
            );
            self.bad_pack(tensor, why)
        };
        let exact =
            |a: usize, b: usize| if b > 0 && a.is_multiple_of(b) { Ok(a / b) } else { Err(geometry()) };
        let (group, bits) = (exact(k, groups)?, exact(words.saturating_mul(32), k)?);
        if beside.dtype == Dtype::U8 {
            // MLX's other modes of U8 scales: nvfp4 has groups of 16, mxfp8 has 8 bits.
            if (bits, group) != (4, BLOCK) {
                return Err(geometry());
            }
            let scales = self.beside(tensor, &scales, &[Dtype::U8], [n, groups])?;
            return self.pack(tensor, Layout::Fp4, BlockType::MXFP4, k, scales, None);
        }
        if !AFFINE_BITS.contains(&bits) || !AFFINE_GROUPS.contains(&group) {
            return Err(geometry());
        }
        let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16];
        let scales = self.beside(tensor, &scales, &dtypes, [n, groups])?;
        let biases = self.beside(tensor, &biases, &dtypes, [n, groups])?;
        let ty = if bits <= 4 { BlockType::AFFINE4 } else { BlockType::AFFINE8 };
        self.pack(tensor, Layout::Affine(bits, group), ty, k, scales, Some(biases))
    }

    fn pack(
        &self,
        tensor: &HfTensor,
        layout: Layout,
        ty: BlockType,
        k: usize,
        scales: Scales,
        biases: Option<Scales>,
    ) -> Result<Packed, Error> {
        let mut shape = tensor.shape.clone();
        shape.pop();
        shape.push(k);
        let (dir, name) = (self.path.clone(), tensor.name.clone());
        Ok(Packed { dir, layout, ty, shape, codes: self.raw(&name)?, name, scales, biases })
    }

    /// The last two dimensions of a tensor. None is zero, so products of them are sizes in the file and do not overflow.
    fn matrix(&self, tensor: &HfTensor) -> Result<[usize; 2], Error> {
        match tensor.shape.last_chunk() {
            Some(&last) if !tensor.shape.contains(&0) => Ok(last),
            _ => {
                let why = format!(
                    "is {} of shape {:?}; only matrices with numbers in them are quantised",
                    tensor.dtype, tensor.shape
                );
                Err(self.bad_pack(tensor, why))
            }
        }
    }

    /// A tensor beside the codes, which must have one of these dtypes and end in these dimensions.
    fn beside(
        &self,
        codes: &HfTensor,
        name: &str,
        dtypes: &[Dtype],
        last: [usize; 2],
    ) -> Result<Scales, Error> {
        let found = self.tensor(name).ok_or_else(|| self.no_scales(codes, name))?;
        let mut expected = codes.shape.clone();
        expected.truncate(codes.shape.len().saturating_sub(2));
        expected.extend(last);
        if found.shape == expected && dtypes.contains(&found.dtype) {
            return Ok(Scales { dtype: found.dtype, bytes: self.raw(name)? });
        }
        let dtypes = dtypes.iter().map(Dtype::to_string).collect::<Vec<_>>().join(" or ");
        let why = format!(
            "is {} {:?}, so '{}' should be {dtypes} {expected:?}; it is {} {:?}",
            codes.dtype,
            codes.shape,
            shown(name),
            found.dtype,
            found.shape
        );
        Err(self.bad_pack(codes, why))
    }

    fn no_scales(&self, codes: &HfTensor, name: &str) -> Error {
        self.bad_pack(
            codes,
            format!("is {}, but the tensor '{}' beside it is missing", codes.dtype, shown(name)),
        )
    }

    fn bad_pack(&self, tensor: &HfTensor, why: String) -> Error {
        Error::Packed { file: self.path.clone(), tensor: shown(&tensor.name), why }
    }
}

fn stem(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// Where the scales of FP8 weights may be, in the order in which they are looked for.
fn fp8_scales(name: &str) -> [String; 2] {
    [format!("{name}_scale_inv"), format!("{}.scale", stem(name))]
}

fn fp4_scales(name: &str) -> String {
    format!("{}.scale", stem(name))
}

/// MLX's scales and biases.
fn mlx_sides(name: &str) -> [String; 2] {
    ["scales", "biases"].map(|kind| format!("{}.{kind}", stem(name)))
}

impl Packed {
    /// The type of the blocks that rows are gathered into.
    pub fn ty(&self) -> BlockType {
        self.ty
    }

    /// Shape of the numbers, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Numbers in a row.
    fn k(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Rows of all matrices together.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Bytes of all gathered rows.
    pub fn bytes(&self) -> usize {
        self.rows() * self.row_bytes()
    }

    fn row_bytes(&self) -> usize {
        // Rows are whole blocks: checked when it was opened.
        self.k() / self.ty.block_len() * self.ty.block_bytes()
    }

    /// Gathers rows into `out`, which they must fill exactly.
    ///
    /// # Errors
    /// Rows that there are not, a NaN among the codes, or a scale that is not a finite number.
    pub fn unpack(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), Error> {
        if rows.end > self.rows() || rows.len().checked_mul(self.row_bytes()) != Some(out.len()) {
            return Err(self.bad(format!("has {} rows; {rows:?} were asked for", self.rows())));
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes().max(1))) {
            let bytes = self.codes.len() / self.rows();
            let codes = &self.codes[row * bytes..(row + 1) * bytes];
            match self.layout {
                Layout::Fp8(block) => self.fp8_row(row, codes, block, out)?,
                Layout::Fp4 => self.fp4_row(row, codes, out)?,
                Layout::Affine(bits, group) => self.affine_row(row, codes, bits, group, out)?,
            }
        }
        Ok(())
    }

    fn fp8_row(
        &self,
        row: usize,
        codes: &[u8],
        [by_n, by_k]: [usize; 2],
        out: &mut [u8],
    ) -> Result<(), Error> {
        let is_nan = |c: &u8| c & 0x7f == 0x7f;
        // A search that does not stop is one of vectors.
        if codes.iter().fold(false, |nan, c| nan | is_nan(c)) {
            let column = codes.iter().position(is_nan).unwrap_or(0);
            return Err(self.bad(format!("has a NaN in row {row}, column {column}")));
        }
        let n = self.shape[self.shape.len() - 2];
        let scales = (row / n * n.div_ceil(by_n) + row % n / by_n) * self.k().div_ceil(by_k);
        for (b, (block, codes)) in out.chunks_exact_mut(4 + BLOCK).zip(codes.chunks_exact(BLOCK)).enumerate()
        {
            let scale = self.finite(&self.scales, scales + BLOCK * b / by_k, row)?;
            block[..4].copy_from_slice(&scale.to_le_bytes());
            block[4..].copy_from_slice(codes);
        }
        Ok(())
    }

    /// Neighbours share a byte in the file; numbers `i` and `16 + i` do in a block.
    fn fp4_row(&self, row: usize, codes: &[u8], out: &mut [u8]) -> Result<(), Error> {
        let first = row * self.k() / BLOCK;
        for (b, (block, codes)) in
            out.chunks_exact_mut(1 + BLOCK / 2).zip(codes.chunks_exact(BLOCK / 2)).enumerate()
        {
            self.finite(&self.scales, first + b, row)?;
            block[0] = self.scales.bytes[first + b];
            interleave(&mut block[1..], |j| codes[j / 2] >> (4 * (j % 2)) & 0xf);
        }
        Ok(())
    }

    fn affine_row(
        &self,
        row: usize,
        codes: &[u8],
        bits: usize,
        group: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let first = row * self.k() / group;
        let blocks = out.chunks_exact_mut(self.ty.block_bytes()).zip(codes.chunks_exact(BLOCK * bits / 8));
        for (b, (block, codes)) in blocks.enumerate() {
            let at = first + BLOCK * b / group;
            let scale = self.finite(&self.scales, at, row)?;
            let bias = self.biases.as_ref().map_or(Ok(0.0), |biases| self.finite(biases, at, row))?;
            block[..4].copy_from_slice(&scale.to_le_bytes());
            block[4..8].copy_from_slice(&bias.to_le_bytes());
            let codes = codes_of(codes, bits);
            if self.ty == BlockType::AFFINE4 {
                interleave(&mut block[8..], |j| codes[j]);
            } else {
                block[8..].copy_from_slice(&codes);
            }
        }
        Ok(())
    }

    fn finite(&self, scales: &Scales, i: usize, row: usize) -> Result<f32, Error> {
        match scales.get(i) {
            x if x.is_finite() => Ok(x),
            x => {
                Err(self
                    .bad(format!("has the scale or bias {x} for row {row}; it should be a finite number")))
            }
        }
    }

    fn bad(&self, why: String) -> Error {
        Error::Packed { file: self.dir.clone(), tensor: shown(&self.name), why }
    }
}

/// Writes 32 four-bit codes as the blocks of [`crate::decode`] have them.
fn interleave(out: &mut [u8], code: impl Fn(usize) -> u8) {
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = code(i) | code(i + BLOCK / 2) << 4;
    }
}

/// The 32 codes of a stream of `bits` bits each.
fn codes_of(stream: &[u8], bits: usize) -> [u8; BLOCK] {
    match bits {
        2 => codes_of_width::<2>(stream),
        3 => codes_of_width::<3>(stream),
        4 => codes_of_width::<4>(stream),
        5 => codes_of_width::<5>(stream),
        6 => codes_of_width::<6>(stream),
        _ => codes_of_width::<8>(stream),
    }
}

/// Eight codes are whole bytes; of a known width, so that shifts are by constants.
fn codes_of_width<const BITS: usize>(stream: &[u8]) -> [u8; BLOCK] {
    let mut codes = [0; BLOCK];
    for (eight, bytes) in codes.as_chunks_mut::<8>().0.iter_mut().zip(stream.as_chunks::<BITS>().0) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        *eight = std::array::from_fn(|i| (word >> (i * BITS) & ((1 << BITS) - 1)) as u8);
    }
    codes
}

//! Where a model's settings and weights come from, behind one face.
//!
//! Three sources: a GGUF file, a Hugging Face directory, and a [`Shape`] whose weights are made from a seed.
//! Settings are asked for by their GGUF key suffix and their `config.json` path; weights by the names that
//! each source gives them.

use std::path::Path;

use minfer_format::bytes::AlignedBuf;
use minfer_format::table::{RowTable, TableOptions, TablePart};
use minfer_format::{BlockType, Gguf, HfDir, Reading, TensorBytes, decode_row};
use minfer_graph::{HeadRows, WeightDecl, WeightMap};
use serde_json::Value as Json;

use crate::error::ModelError;
use crate::hyper::text_config;
use crate::shapes::Shape;
use crate::tensors::{self, Part};

/// An opened model file, directory or shape.
pub enum Checkpoint {
    /// A GGUF file.
    Gguf(Gguf),
    /// A Hugging Face directory.
    Hf(HfDir),
    /// Weights made from a seed.
    Shape(Shape),
}

/// The two names of a weight: GGUF and Hugging Face, without `.weight`, with `{}` for the layer.
pub(crate) type Names = (&'static str, &'static str);

impl Checkpoint {
    /// Opens a GGUF file, or a directory with `config.json`.
    ///
    /// # Errors
    /// The path does not exist, or what it holds is damaged, something else, or quantised in a way that is not known.
    pub fn open(path: &Path) -> Result<Checkpoint, ModelError> {
        if path.is_dir() {
            let dir = HfDir::open(path)?;
            dir.check_quantisation()?;
            return Ok(Checkpoint::Hf(dir));
        }
        Ok(Checkpoint::Gguf(Gguf::open(path)?))
    }

    /// The path or name, for messages.
    pub fn name(&self) -> String {
        match self {
            Checkpoint::Gguf(g) => g.path().display().to_string(),
            Checkpoint::Hf(d) => d.path().display().to_string(),
            Checkpoint::Shape(s) => s.to_string(),
        }
    }

    pub(crate) fn is_hf(&self) -> bool {
        matches!(self, Checkpoint::Hf(_))
    }

    /// The architecture's name as the source spells it.
    pub(crate) fn architecture(&self) -> Result<String, ModelError> {
        match self {
            Checkpoint::Gguf(g) => Ok(g.metadata().string("general.architecture")?.to_string()),
            Checkpoint::Hf(d) => match d.config().get("model_type").and_then(Json::as_str) {
                Some(name) => Ok(name.to_string()),
                None => Err(self.bad("config.json: model_type", "is missing")),
            },
            Checkpoint::Shape(s) => Ok(s.preset.arch.to_string()),
        }
    }

    pub(crate) fn bad(&self, key: &str, why: impl Into<String>) -> ModelError {
        ModelError::BadSetting { source_name: self.name(), key: key.to_string(), why: why.into() }
    }

    /// Type and shape of a tensor by its full name. `k` is the row length that the model expects: packs of integers in
    /// Hugging Face directories do not say it. The scales of such a pack are no tensor of their own.
    fn tensor(&self, name: &str, k: usize) -> Result<Option<(BlockType, Vec<usize>)>, ModelError> {
        match self {
            Checkpoint::Gguf(g) => Ok(g.tensor(name).map(|t| (t.ty, t.shape.clone()))),
            Checkpoint::Hf(d) => match (d.packed(name, k)?, self.stored_shape(name)) {
                (_, None) => Ok(None),
                (Some(packed), _) => Ok(Some((packed.ty(), packed.shape().to_vec()))),
                (None, Some(shape)) => Ok(Some((d.weight(name)?.0, shape.to_vec()))),
            },
            Checkpoint::Shape(_) => Ok(None),
        }
    }

    /// Dimensions of a tensor as they stand in the file; only the last one may differ from those of its numbers.
    fn stored_shape(&self, name: &str) -> Option<&[usize]> {
        match self {
            Checkpoint::Gguf(g) => g.tensor(name).map(|t| &t.shape[..]),
            Checkpoint::Hf(d) => d.tensor(name).filter(|_| !d.is_packed_scale(name)).map(|t| &t.shape[..]),
            Checkpoint::Shape(_) => None,
        }
    }

    /// The full name of a tensor in this source: `suffix` is `weight`, `bias`, `scale`, or empty.
    pub(crate) fn full_name(&self, names: Names, layer: Option<usize>, suffix: &str) -> String {
        let (gguf, hf) = names;
        let mut name = match (self.is_hf(), layer) {
            (true, Some(i)) => match self.draft_prefix(i) {
                Some(prefix) => format!("{prefix}{hf}"),
                None => format!("{}layers.{i}.{hf}", self.hf_prefix()),
            },
            (true, None) => match hf.strip_prefix("model.") {
                Some(stem) => format!("{}{stem}", self.hf_prefix()),
                None => hf.to_string(),
            },
            (false, Some(i)) => format!("blk.{i}.{gguf}"),
            (false, None) => gguf.to_string(),
        };
        if !suffix.is_empty() {
            name.push('.');
            name.push_str(suffix);
        }
        name
    }

    /// Layers of a draft head follow the model's in number. In directories that keep the head under `mtp.`
    /// they are counted from 0 there.
    fn draft_prefix(&self, layer: usize) -> Option<String> {
        let Checkpoint::Hf(d) = self else { return None };
        let layers = text_config(d.config()).get("num_hidden_layers").and_then(Json::as_u64)?;
        let draft = layer.checked_sub(usize::try_from(layers).ok()?)?;
        let has = |name: &str| d.tensor(name).is_some();
        if has("mtp.fc_hidden.weight") {
            return Some(format!("mtp.layers.{draft}."));
        }
        has("mtp.0.attn_norm.weight").then(|| format!("mtp.{draft}."))
    }

    /// What the decoder's tensors are called below in Hugging Face directories: models that also see
    /// images keep it one level deeper.
    fn hf_prefix(&self) -> &'static str {
        const NESTED: &str = "model.language_model.";
        match self {
            Checkpoint::Hf(d) if d.tensor(&format!("{NESTED}embed_tokens.weight")).is_some() => NESTED,
            // DeepSeek's own files have no prefix.
            Checkpoint::Hf(d) if d.tensor("embed.weight").is_some() => "",
            _ => "model.",
        }
    }

    /// Whether there is such a tensor.
    pub(crate) fn has(&self, names: Names, layer: Option<usize>, suffix: &str) -> Result<bool, ModelError> {
        let name = self.full_name(names, layer, suffix);
        Ok(match self {
            Checkpoint::Shape(s) => s.has(&name),
            _ => self.stored_shape(&name).is_some(),
        })
    }

    /// A weight that must be there, of this shape.
    pub(crate) fn weight(
        &self,
        names: Names,
        layer: Option<usize>,
        suffix: &str,
        shape: &[usize],
    ) -> Result<WeightDecl, ModelError> {
        let tensor = self.full_name(names, layer, suffix);
        if let Checkpoint::Shape(s) = self {
            let ty = s.tensor_type(&tensor, shape);
            return Ok(plain(tensor, ty, shape));
        }
        match self.optional(names, layer, suffix, shape)? {
            Some(decl) => Ok(decl),
            None => Err(ModelError::MissingTensor { source_name: self.name(), tensor }),
        }
    }

    /// A weight whose numbers the loader changes; it arrives as F32.
    pub(crate) fn mapped(
        &self,
        names: Names,
        layer: Option<usize>,
        suffix: &str,
        shape: &[usize],
        map: WeightMap,
    ) -> Result<WeightDecl, ModelError> {
        let decl = self.weight(names, layer, suffix, shape)?;
        Ok(if map == WeightMap::None { decl } else { WeightDecl { ty: BlockType::F32, map, ..decl } })
    }

    /// A weight that may be absent; if it is there, it must have this shape. A shape has no optional weights.
    pub(crate) fn optional(
        &self,
        names: Names,
        layer: Option<usize>,
        suffix: &str,
        shape: &[usize],
    ) -> Result<Option<WeightDecl>, ModelError> {
        self.named(self.full_name(names, layer, suffix), shape)
    }

    fn named(&self, name: String, shape: &[usize]) -> Result<Option<WeightDecl>, ModelError> {
        let Some((ty, found)) = self.tensor(&name, row_len(shape))? else { return Ok(None) };
        self.check_shape(&name, &found, shape)?;
        self.check_rows(&name, ty, shape)?;
        Ok(Some(plain(name, ty, shape)))
    }

    /// A stack of one matrix per expert: one tensor in GGUF, one per expert in Hugging Face directories,
    /// whose name has `{}` for the expert, or one tensor of MLX's name for the stack.
    pub(crate) fn experts(
        &self,
        names: Names,
        layer: usize,
        shape: [usize; 3],
    ) -> Result<WeightDecl, ModelError> {
        if !self.is_hf() {
            return self.weight(names, Some(layer), "weight", &shape);
        }
        let pattern = self.full_name(names, Some(layer), "weight");
        if let Some(decl) = self.named(pattern.replace("experts.{}", "switch_mlp"), &shape)? {
            return Ok(decl);
        }
        let name = |e: &str| pattern.replace("{}", e);
        let tensors = (0..shape[0]).map(|e| name(&e.to_string())).collect();
        self.stacked(name("*"), tensors, &shape[1..])
    }

    /// Tensors one below the other as one weight: `(names, suffix, rows)` of each, every row of shape `inner`.
    pub(crate) fn joined(
        &self,
        parts: &[(Names, &str, usize)],
        layer: Option<usize>,
        inner: &[usize],
    ) -> Result<WeightDecl, ModelError> {
        let (mut tensors, mut all) = (Vec::with_capacity(parts.len()), 0);
        for &(names, suffix, rows) in parts {
            tensors.push(self.weight(names, layer, suffix, &[&[rows], inner].concat())?.name);
            all += rows;
        }
        if let Checkpoint::Shape(s) = self {
            let (name, shape) = (tensors.join(" + "), [&[all], inner].concat());
            let ty = s.tensor_type(&name, &shape);
            return Ok(WeightDecl { name, ty, shape, tensors, map: WeightMap::None });
        }
        self.stacked(tensors.join(" + "), tensors, inner)
    }

    /// Some rows of the matrix of each of `heads` heads, which one tensor `[heads * group, k]` has below one another.
    pub(crate) fn head_rows(
        &self,
        names: Names,
        layer: Option<usize>,
        [heads, k]: [usize; 2],
        rows: HeadRows,
    ) -> Result<WeightDecl, ModelError> {
        let stored = self.weight(names, layer, "weight", &[heads * rows.group, k])?;
        let shape = if rows.transposed { vec![heads, k, rows.len] } else { vec![heads, rows.len, k] };
        Ok(WeightDecl { ty: BlockType::F32, shape, map: WeightMap::HeadRows(rows), ..stored })
    }

    /// A table of rows of `width` numbers: one tensor, or in Hugging Face directories shards of it, whose
    /// names have `{}` for the shard. In GGUF files it belongs to no layer.
    pub(crate) fn table(&self, names: Names, layer: usize, width: usize) -> Result<WeightDecl, ModelError> {
        if !self.is_hf() {
            let rows = self.rows_of(names)?;
            return self.weight(names, None, "weight", &[rows, width]);
        }
        let name = |shard: &str| self.full_name(names, Some(layer), "weight").replace("{}", shard);
        let mut tensors = vec![name("0")];
        while self.stored_shape(&name(&tensors.len().to_string())).is_some() {
            tensors.push(name(&tensors.len().to_string()));
        }
        self.stacked(name("*"), tensors, &[width])
    }

    /// Tensors of one type as one weight. Those of shape `inner` are one entry of the stack each; those with
    /// one dimension more have several.
    fn stacked(&self, name: String, tensors: Vec<String>, inner: &[usize]) -> Result<WeightDecl, ModelError> {
        let (mut first, mut outer) = (None, 0usize);
        for tensor in &tensors {
            let missing = || ModelError::MissingTensor { source_name: self.name(), tensor: tensor.clone() };
            let (ty, found) = self.tensor(tensor, row_len(inner))?.ok_or_else(missing)?;
            let several = found.first().filter(|_| found.len() > inner.len());
            let expected = several.iter().copied().chain(inner).copied().collect::<Vec<_>>();
            self.check_shape(tensor, &found, &expected)?;
            self.check_rows(tensor, ty, inner)?;
            outer = outer.saturating_add(several.copied().unwrap_or(1));
            let first_ty = *first.get_or_insert(ty);
            if first_ty != ty {
                return Err(ModelError::MixedTypes {
                    source_name: self.name(),
                    first: tensors[0].clone(),
                    first_ty: first_ty.to_string(),
                    second: tensor.clone(),
                    second_ty: ty.to_string(),
                });
            }
        }
        let shape = [&[outer], inner].concat();
        let ty = first.unwrap_or(BlockType::F32);
        Ok(WeightDecl { name, ty, shape, tensors, map: WeightMap::None })
    }

    fn check_shape(&self, tensor: &str, found: &[usize], expected: &[usize]) -> Result<(), ModelError> {
        // Convolution weights come as [channels, 1, kernel]; a dimension of one changes nothing.
        let squeezed = |s: &[usize]| s.iter().copied().filter(|&d| d != 1).collect::<Vec<_>>();
        // GGUF files keep a vector that spans several residual streams as one row per stream.
        let flat = expected.len() == 1
            && found.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) == Some(expected[0]);
        // Matrices of one width below one another may be kept as a stack of them.
        let stacked = expected.len() == 2 && found.len() == 3 && found[2] == expected[1];
        let stacked = stacked && found[0].checked_mul(found[1]) == Some(expected[0]);
        if flat || stacked || squeezed(found) == squeezed(expected) {
            return Ok(());
        }
        Err(ModelError::WrongShape {
            source_name: self.name(),
            tensor: tensor.to_string(),
            found: found.to_vec(),
            expected: expected.to_vec(),
        })
    }

    /// Products with quantised weights take activations in blocks of 32.
    fn check_rows(&self, tensor: &str, ty: BlockType, shape: &[usize]) -> Result<(), ModelError> {
        match shape.last() {
            Some(&k) if ty.block_len() > 1 && !k.is_multiple_of(32) => Err(ModelError::RowLength {
                source_name: self.name(),
                tensor: tensor.to_string(),
                ty: ty.to_string(),
                k,
            }),
            _ => Ok(()),
        }
    }

    /// Outermost dimension of a tensor, such as the vocabulary size of the embedding.
    pub(crate) fn rows_of(&self, names: Names) -> Result<usize, ModelError> {
        let tensor = self.full_name(names, None, "weight");
        if let Checkpoint::Shape(s) = self {
            return Ok(s.rows(&tensor));
        }
        match self.stored_shape(&tensor) {
            Some(&[rows, _]) => Ok(rows),
            Some(found) => Err(self.bad(&tensor, format!("has shape {found:?}, expected two dimensions"))),
            None => Err(ModelError::MissingTensor { source_name: self.name(), tensor }),
        }
    }

    /// The numbers of a small vector that the model needs before its graph is built.
    pub(crate) fn vector(&self, decl: &WeightDecl) -> Result<Vec<f32>, ModelError> {
        let bytes = self.load(decl)?;
        let mut numbers = vec![0.0; decl.shape.iter().product()];
        decode_row(decl.ty, &bytes, &mut numbers).map_err(|e| self.bad(&decl.name, e.to_string()))?;
        Ok(numbers)
    }

    /// The bytes of a weight in its own encoding; stacked tensors are joined.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn load(&self, decl: &WeightDecl) -> Result<TensorBytes, ModelError> {
        self.load_by(decl, Reading::Mapped)
    }

    /// [`Checkpoint::load`], with the choice how files are read.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn load_by(&self, decl: &WeightDecl, reading: Reading) -> Result<TensorBytes, ModelError> {
        match decl.map {
            WeightMap::None => return self.load_stored(decl, Checkpoint::stored_row(decl), reading),
            WeightMap::Ids => return self.load_ids(decl),
            WeightMap::AddOne | WeightMap::NegExp | WeightMap::HeadRows(_) => {}
        }
        let k = Checkpoint::stored_row(decl);
        let (stored_ty, _) = self.tensor(&decl.name, k)?.unwrap_or((decl.ty, vec![]));
        let stored = self.load_stored(
            &WeightDecl { ty: stored_ty, map: WeightMap::None, ..decl.clone() },
            k,
            reading,
        )?;
        let count: usize = decl.shape.iter().product();
        let stored_count = match decl.map {
            WeightMap::HeadRows(r) => count / r.len.max(1) * r.group,
            _ => count,
        };
        let mut numbers = vec![0.0f32; stored_count];
        decode_row(stored_ty, &stored, &mut numbers).map_err(|e| self.bad(&decl.name, e.to_string()))?;
        match decl.map {
            WeightMap::None | WeightMap::Ids => {}
            WeightMap::AddOne => numbers.iter_mut().for_each(|x| *x += 1.0),
            WeightMap::NegExp => numbers.iter_mut().for_each(|x| *x = -x.exp()),
            WeightMap::HeadRows(rows) => {
                numbers = cut(&numbers, decl.shape.first().copied().unwrap_or(1), rows)
            }
        }
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(AlignedBuf::from(&bytes[..]).into())
    }

    /// Numbers in a row of the tensors that a weight is read from.
    pub fn stored_row(decl: &WeightDecl) -> usize {
        match (decl.map, &decl.shape[..]) {
            (WeightMap::HeadRows(HeadRows { transposed: true, .. }), &[_, k, _]) => k,
            (_, shape) => row_len(shape),
        }
    }

    /// Opens a weight of rows that stays where it is, to be read row by row.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn row_table(&self, decl: &WeightDecl, options: TableOptions) -> Result<RowTable, ModelError> {
        if matches!(self, Checkpoint::Shape(_)) {
            return Ok(Shape::row_table(decl, options)?);
        }
        let parts = decl.tensors.iter().map(|name| {
            let location = match self {
                Checkpoint::Gguf(g) => g.location(name),
                Checkpoint::Hf(d) => d.location(name),
                Checkpoint::Shape(_) => None,
            };
            let rows = self.stored_shape(name).and_then(|shape| shape.first().copied());
            match (self.part(name, row_len(&decl.shape))?, location, rows) {
                (Part::Packed(packed), ..) => Ok(TablePart::Packed(packed)),
                (Part::Plain(_), Some((path, offset)), Some(rows)) => {
                    Ok(TablePart::File { path: path.to_owned(), offset, rows })
                }
                (Part::Plain(bytes), ..) => Ok(TablePart::Bytes(bytes)),
            }
        });
        let parts = parts.collect::<Result<Vec<_>, ModelError>>()?;
        Ok(RowTable::open(parts, decl.ty, decl.shape.last().copied().unwrap_or(0), options)?)
    }

    /// The stored numbers, in rows of `k`.
    fn load_stored(&self, decl: &WeightDecl, k: usize, reading: Reading) -> Result<TensorBytes, ModelError> {
        if let Checkpoint::Shape(s) = self {
            return self.fill(decl, s);
        }
        let parts = decl.tensors.iter().map(|name| Ok((name.as_str(), self.part(name, k)?)));
        let parts = parts.collect::<Result<Vec<_>, ModelError>>()?;
        Ok(tensors::join(&parts, reading)?)
    }

    fn fill(&self, decl: &WeightDecl, shape: &Shape) -> Result<TensorBytes, ModelError> {
        let bytes = decl.bytes().ok_or_else(|| self.bad(&decl.name, "has a size that overflows"))?;
        let mut buffer = AlignedBuf::zeroed(bytes);
        shape.fill(decl, &mut buffer);
        Ok(buffer.into())
    }

    /// Bytes of the weights' files; for a shape, 0.
    pub fn file_bytes(&self) -> u64 {
        match self {
            Checkpoint::Gguf(g) => g.file_bytes(),
            Checkpoint::Hf(d) => d.file_bytes(),
            Checkpoint::Shape(_) => 0,
        }
    }
}

/// Numbers in a row of a weight of this shape.
fn row_len(shape: &[usize]) -> usize {
    shape.last().copied().unwrap_or(1)
}

fn plain(tensor: String, ty: BlockType, shape: &[usize]) -> WeightDecl {
    let tensors = vec![tensor.clone()];
    WeightDecl { name: tensor, ty, shape: shape.to_vec(), tensors, map: WeightMap::None }
}

/// Rows of each head's matrix, as [`HeadRows`] says.
fn cut(numbers: &[f32], heads: usize, rows: HeadRows) -> Vec<f32> {
    let k = numbers.len() / (heads * rows.group).max(1);
    let mut out = Vec::with_capacity(heads * rows.len * k);
    for head in numbers.chunks_exact((rows.group * k).max(1)) {
        let wanted = &head[rows.from * k..(rows.from + rows.len) * k];
        if rows.transposed {
            (0..k).for_each(|c| out.extend(wanted.iter().skip(c).step_by(k)));
        } else {
            out.extend_from_slice(wanted);
        }
    }
    out
}

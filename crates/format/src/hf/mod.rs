//! Hugging Face model directories: `config.json` and its neighbours, and weights in safetensors files.
//!
//! In: a directory. Out: an [`HfDir`] with the parsed JSON files and a checked list of all tensors.
//! [`safetensors`] reads one weight file, `index` the list of shards, `json` bounded JSON; [`packed`] gathers
//! quantised weights, which are spread over several tensors, into blocks. What the fields of a configuration mean
//! (but for how its weights are quantised), and reading `tokenizer.json`, does not belong here.

mod index;
mod json;
pub mod packed;
pub mod safetensors;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::block::BlockType;
use crate::bytes::TensorBytes;
use crate::error::{Error, shown};
use crate::limits;

pub use ::safetensors::Dtype;
pub use packed::Packed;
pub use safetensors::{HfTensor, Safetensors};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const TOKENIZER: &str = "tokenizer.json";
const TEMPLATE: &str = "chat_template.jinja";

/// An open model directory.
#[derive(Debug)]
pub struct HfDir {
    path: PathBuf,
    config: Value,
    generation_config: Option<Value>,
    tokenizer_config: Option<Value>,
    tokenizer_json: Option<PathBuf>,
    chat_template: Option<String>,
    shards: Vec<Safetensors>,
    /// `(shard, tensor in it)`, in the order of the tensors' names.
    by_name: Vec<(u32, u32)>,
}

impl HfDir {
    /// Reads the JSON files and maps and checks every weight file of a directory.
    ///
    /// `config.json` and the weights must be there: `model.safetensors`, or the index with all shards that
    /// it names, each holding what the index says. The other files may be absent, but not malformed.
    pub fn open(dir: &Path) -> Result<HfDir, Error> {
        HfDir::open_weights(dir, None)
    }

    /// The same with one more safetensors file from anywhere, whose tensors join the directory's.
    ///
    /// # Errors
    /// As [`HfDir::open`] for both, and a tensor that both have.
    pub fn open_with(dir: &Path, side: &Path) -> Result<HfDir, Error> {
        HfDir::open_weights(dir, Some(side))
    }

    fn open_weights(dir: &Path, side: Option<&Path>) -> Result<HfDir, Error> {
        if !fs::metadata(dir).map_err(|e| Error::io(dir, e))?.is_dir() {
            return Err(Error::NotADirectory { dir: dir.to_owned() });
        }
        let config = json::read_optional(&dir.join("config.json"), limits::MAX_JSON)?
            .ok_or_else(|| Error::NoConfig { dir: dir.to_owned() })?;
        let generation_config = json::read_optional(&dir.join("generation_config.json"), limits::MAX_JSON)?;
        let tokenizer_config = json::read_optional(&dir.join("tokenizer_config.json"), limits::MAX_JSON)?;
        let chat_template = json::text_optional(&dir.join(TEMPLATE), limits::MAX_JSON)?
            .or_else(|| tokenizer_config.as_ref().and_then(template_in).map(str::to_owned));
        let tokenizer_json =
            json::size_optional(&dir.join(TOKENIZER), limits::MAX_TOKENIZER)?.map(|_| dir.join(TOKENIZER));
        let mut shards = open_weights(dir)?;
        if let Some(side) = side {
            shards.push(Safetensors::open(side)?);
        }
        let by_name = index::by_name(&shards)?;
        Ok(HfDir {
            path: dir.to_owned(),
            config,
            generation_config,
            tokenizer_config,
            tokenizer_json,
            chat_template,
            shards,
            by_name,
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json`.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// `tokenizer_config.json`.
    pub fn tokenizer_config(&self) -> Option<&Value> {
        self.tokenizer_config.as_ref()
    }

    /// The path of `tokenizer.json`, whose size has been checked.
    pub fn tokenizer_json_path(&self) -> Option<PathBuf> {
        self.tokenizer_json.clone()
    }

    /// The chat template: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (where
    /// that is a list, the entry named `default`).
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// All tensors, in the order of their names.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &HfTensor> {
        self.by_name.iter().map(|&(s, t)| &self.shards[s as usize].tensors()[t as usize])
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&HfTensor> {
        self.find(name).map(|(_, tensor)| tensor)
    }

    /// The bytes of a weight (F32, F16 or BF16), without copying.
    pub fn data(&self, name: &str) -> Result<TensorBytes, Error> {
        self.weight(name).map(|(_, bytes)| bytes)
    }

    /// The bytes of a weight, and how its numbers are stored.
    pub fn weight(&self, name: &str) -> Result<(BlockType, TensorBytes), Error> {
        self.shard(name)?.weight(name)
    }

    /// The bytes of a tensor of any dtype, for tables of integers.
    pub fn raw(&self, name: &str) -> Result<TensorBytes, Error> {
        self.shard(name)?.raw(name)
    }

    /// Where a tensor lies on disk: the file and its first byte there.
    pub fn location(&self, name: &str) -> Option<(&Path, u64)> {
        self.find(name)?.0.location(name)
    }

    /// Bytes of all weight files together.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(Safetensors::file_bytes).sum()
    }

    fn find(&self, name: &str) -> Option<(&Safetensors, &HfTensor)> {
        let of =
            |&(s, t): &(u32, u32)| (&self.shards[s as usize], &self.shards[s as usize].tensors()[t as usize]);
        let place = self.by_name.binary_search_by(|at| of(at).1.name.as_str().cmp(name)).ok()?;
        Some(of(&self.by_name[place]))
    }

    fn shard(&self, name: &str) -> Result<&Safetensors, Error> {
        let missing = || Error::MissingTensor { file: self.path.clone(), tensor: shown(name) };
        self.find(name).map(|(shard, _)| shard).ok_or_else(missing)
    }
}

fn open_weights(dir: &Path) -> Result<Vec<Safetensors>, Error> {
    let (single, sharded) = (dir.join(SINGLE), dir.join(INDEX));
    if single.exists() {
        return Ok(vec![Safetensors::open(&single)?]);
    }
    if sharded.exists() {
        return index::open_shards(dir, &sharded);
    }
    let other = ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "model.onnx"];
    let found = other.iter().find(|name| dir.join(name).exists()).map(|&name| name.to_owned());
    Err(Error::NoWeights { dir: dir.to_owned(), found })
}

fn template_in(tokenizer_config: &Value) -> Option<&str> {
    match tokenizer_config.get("chat_template")? {
        Value::String(template) => Some(template),
        Value::Array(named) => named.iter().find(|t| t["name"] == "default")?["template"].as_str(),
        _ => None,
    }
}

//! Everything that can be wrong with a model file, in one enum.
//!
//! Each message names the file, then the key or tensor, then what was found and what is allowed. Names
//! that come out of a file pass through [`shown`] first, so that a hostile file can neither flood nor
//! steer the terminal that the message is printed on.

use std::io;
use std::path::{Path, PathBuf};

use crate::block::BlockType;

/// Why a model file cannot be read, written or used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The message of each variant says what its fields are.
pub enum Error {
    #[error("{}: {source}", file.display())]
    Io { file: PathBuf, source: io::Error },
    #[error("{}: the tensor '{tensor}': {source}", file.display())]
    TensorRead { file: PathBuf, tensor: String, source: io::Error },
    #[error("{} has become shorter: the tensor '{tensor}' needs {bytes} bytes from byte {at} on; download or copy it again", file.display())]
    ShortRead { file: PathBuf, tensor: String, bytes: u64, at: u64 },
    #[error("row {row} of a table of {rows} rows")]
    TableRow { row: i64, rows: usize },
    #[error("table rows of {width} numbers are not whole {ty} blocks")]
    TableRows { ty: &'static str, width: usize },
    #[error("{} is {found}, not a regular file", file.display())]
    NotAFile { file: PathBuf, found: &'static str },
    #[error("{} is empty (0 bytes); download or copy it again", file.display())]
    Empty { file: PathBuf },

    #[error("{} is not a GGUF file: {found}", file.display())]
    NotGguf { file: PathBuf, found: String },
    #[error("{} is a big-endian GGUF file, which is not supported; convert the model again as little-endian", file.display())]
    BigEndian { file: PathBuf },
    #[error("{} is GGUF version {version}; versions 2 and 3 are supported (convert the model again with a current tool)", file.display())]
    Version { file: PathBuf, version: u32 },
    #[error("{} is truncated: {what} needs {needed} bytes, {available} are left; download or copy it again", file.display())]
    Truncated { file: PathBuf, what: String, needed: u64, available: u64 },
    #[error("{}: {what} is {found}, the limit is {limit}", file.display())]
    Limit { file: PathBuf, what: String, found: u64, limit: u64 },
    #[error("{}: {what} is not valid UTF-8", file.display())]
    NotUtf8 { file: PathBuf, what: String },

    #[error("{}: the key '{key}' occurs twice", file.display())]
    DuplicateKey { file: PathBuf, key: String },
    #[error("{}: the key '{key}' is missing", file.display())]
    MissingKey { file: PathBuf, key: String },
    #[error("{}: the key '{key}' should be {expected}, it is {found}", file.display())]
    WrongKeyType { file: PathBuf, key: String, expected: &'static str, found: String },
    #[error("{}: the key '{key}' has the unknown value type {number}", file.display())]
    UnknownValueType { file: PathBuf, key: String, number: u32 },
    #[error("{}: the key '{key}' holds arrays nested more than {} deep", file.display(), crate::limits::MAX_NESTING)]
    NestingTooDeep { file: PathBuf, key: String },
    #[error("{}: the key '{key}' holds the byte {found} as a boolean; only 0 and 1 are", file.display())]
    BadBool { file: PathBuf, key: String, found: u8 },
    #[error("{}: general.alignment is {found}; it must be a power of two up to {}", file.display(), crate::limits::MAX_ALIGNMENT)]
    Alignment { file: PathBuf, found: u64 },

    #[error("{}: the tensor '{tensor}' occurs twice", file.display())]
    DuplicateTensor { file: PathBuf, tensor: String },
    #[error("the tensor '{tensor}' is in {} and in {}; one of the two files is not part of this model", first.display(), second.display())]
    InTwoFiles { first: PathBuf, second: PathBuf, tensor: String },
    #[error("{}: there is no tensor '{tensor}'", file.display())]
    MissingTensor { file: PathBuf, tensor: String },
    #[error("{}: the tensor '{tensor}' has type {number} ({}), which is not supported; supported are {}", file.display(), .name.unwrap_or("unknown"), supported())]
    UnsupportedType { file: PathBuf, tensor: String, number: u32, name: Option<&'static str> },
    #[error("{}: the tensor '{tensor}' has the shape {shape:?}: {why}", file.display())]
    Shape { file: PathBuf, tensor: String, shape: Vec<u64>, why: &'static str },
    #[error("{}: a row of the tensor '{tensor}' has {k} numbers, which is not a multiple of the {} of a {ty} block", file.display(), ty.block_len())]
    PartialBlock { file: PathBuf, tensor: String, ty: BlockType, k: u64 },
    #[error("{}: the tensor '{tensor}' starts at {offset}, which is not a multiple of the alignment {alignment}", file.display())]
    Misaligned { file: PathBuf, tensor: String, offset: u64, alignment: u64 },
    #[error("{} is truncated: the tensor '{tensor}' ends at byte {end}, the file at {len}; download or copy it again", file.display())]
    OutOfFile { file: PathBuf, tensor: String, end: u64, len: u64 },
    #[error("{}: the tensors '{first}' and '{second}' overlap", file.display())]
    Overlap { file: PathBuf, first: String, second: String },

    #[error("{} is one of {count} parts, so its name should end in '{expected}'", file.display())]
    SplitName { file: PathBuf, count: u64, expected: String },
    #[error("{} is one of {count} parts, but {} is missing; put all parts into one directory", file.display(), part.display())]
    MissingPart { file: PathBuf, count: u64, part: PathBuf },
    #[error("{} does not belong to the other parts: {what} is {found}, expected {expected}", file.display())]
    WrongPart { file: PathBuf, what: String, expected: String, found: String },

    #[error("{} is not a directory", dir.display())]
    NotADirectory { dir: PathBuf },
    #[error("{} has no config.json; name a Hugging Face model directory or a GGUF file", dir.display())]
    NoConfig { dir: PathBuf },
    #[error("{} has neither model.safetensors nor model.safetensors.index.json{}", dir.display(), also(.found))]
    NoWeights { dir: PathBuf, found: Option<String> },
    #[error("{}, line {line}, column {column}: {reason}", file.display())]
    Json { file: PathBuf, line: usize, column: usize, reason: String },
    #[error("{} is not a safetensors file: {reason}", file.display())]
    SafetensorsHeader { file: PathBuf, reason: String },
    #[error("{}: the tensor '{tensor}' of {dtype} {shape:?} takes {expected} bytes, its range in the file has {found}", file.display())]
    TensorBytes { file: PathBuf, tensor: String, dtype: String, shape: Vec<usize>, expected: u64, found: u64 },
    #[error("{}: {gap} bytes before '{before}' belong to no tensor", file.display())]
    Gap { file: PathBuf, before: String, gap: u64 },
    #[error("{}: the tensor '{tensor}' is stored as {dtype}, which is not supported as a weight; F32, F16, BF16, and FP8, FP4 or MLX packs with their scales are", file.display())]
    UnsupportedDtype { file: PathBuf, tensor: String, dtype: String },
    #[error("{}: the quantised tensor '{tensor}' {why}", file.display())]
    Packed { file: PathBuf, tensor: String, why: String },
    #[error("{}: weights quantised as {found} are not supported; supported are FP8 (quant_method fp8), FP4 with E8M0 scales, and MLX's affine and mxfp4 packs: take one of these, the unquantised model or a GGUF file", dir.display())]
    Quantisation { dir: PathBuf, found: String },
    #[error("{} names the shard {}, which does not exist; download all shards into one directory", index.display(), shard.display())]
    MissingShard { index: PathBuf, shard: PathBuf },
    #[error("{} places the tensor '{tensor}' in {}, which does not have it", index.display(), shard.display())]
    NotInShard { index: PathBuf, shard: PathBuf, tensor: String },
    #[error("{} names the shard '{shard}', which is not a plain file name", index.display())]
    ShardName { index: PathBuf, shard: String },

    #[error("cannot write the tensor '{tensor}': {reason}")]
    Unwritable { tensor: String, reason: String },
}

impl Error {
    pub(crate) fn io(file: &Path, source: io::Error) -> Error {
        Error::Io { file: file.to_owned(), source }
    }
}

/// A name out of a file, fit for a message: control characters escaped, at most 120 characters.
pub(crate) fn shown(name: &str) -> String {
    const LONGEST: usize = 120;
    let mut text: String = name
        .chars()
        .take(LONGEST)
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    if name.chars().nth(LONGEST).is_some() {
        text.push('…');
    }
    text
}

fn supported() -> String {
    BlockType::ggml().map(BlockType::name).collect::<Vec<_>>().join(", ")
}

fn also(found: &Option<String>) -> String {
    found.as_ref().map_or(String::new(), |name| {
        format!(" (it has {name}, which is not supported; convert it to safetensors)")
    })
}

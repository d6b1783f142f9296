//! The bounds that readers put on what a file may ask for.
//!
//! Together they keep the memory of reading a file below its size plus [`SLACK`]: most parts of a file
//! take no more room in memory than in the file, and the counts below bound the three that do (a `String`
//! is 24 bytes where an empty GGUF string is 8; a tensor or a key carries its bookkeeping). All are far
//! above what published models use, and a file that exceeds one is refused with the limit in the message.

/// Memory that reading may take beyond the size of the file, in bytes.
pub const SLACK: usize = 64 << 20;

/// Longest GGUF string (a chat template is some 10 KiB), in bytes.
pub const MAX_STRING: u64 = 16 << 20;
/// Deepest nesting of GGUF arrays: an array of arrays of scalars.
pub const MAX_NESTING: usize = 2;
/// Most metadata keys of one GGUF file.
pub const MAX_KEYS: u64 = 1 << 16;
/// Most strings and inner arrays in the metadata of one model; vocabulary and merges of the largest
/// published tokenizers are some 800,000.
pub const MAX_ITEMS: u64 = 1_500_000;
/// Most tensors of one GGUF model, all parts together (experts are stacked, so thousands are usual).
pub const MAX_TENSORS: u64 = 1 << 16;
/// Most dimensions of a GGUF tensor, as in ggml.
pub const MAX_DIMS: u32 = 4;
/// Largest GGUF data alignment, in bytes.
pub const MAX_ALIGNMENT: u64 = 1 << 20;

/// Largest safetensors header, in bytes.
pub const MAX_SAFETENSORS_HEADER: u64 = 32 << 20;
/// Most tensors of one safetensors file.
pub const MAX_SHARD_TENSORS: usize = 1 << 17;
/// Most shards of a directory.
pub const MAX_SHARDS: usize = 1 << 12;
/// Most tensors of a sharded directory.
pub const MAX_INDEX_TENSORS: usize = 1 << 20;
/// Most dimensions of a safetensors tensor.
pub const MAX_SAFETENSORS_DIMS: usize = 8;
/// Longest string in a JSON file or a safetensors header, in bytes as written: the parser copies a string
/// several times to say what is wrong with it.
pub const MAX_JSON_STRING: usize = 1 << 20;
/// Longest tensor name in a Hugging Face directory, in bytes.
pub const MAX_NAME: usize = 4096;

/// Largest `tokenizer.json`, in bytes.
pub const MAX_TOKENIZER: u64 = 64 << 20;
/// Largest `model.safetensors.index.json`, in bytes.
pub const MAX_INDEX: u64 = 32 << 20;
/// Largest `config.json`, `generation_config.json`, `tokenizer_config.json`, `chat_template.jinja`, in bytes.
pub const MAX_JSON: u64 = 16 << 20;
/// Most commas and opening brackets in such a file: they bound its number of values, each of which takes
/// up to some 200 bytes in memory for as few as two in the file.
pub const MAX_JSON_VALUES: usize = 1 << 18;

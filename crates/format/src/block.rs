//! Storage types of weights: the one authority for names, numbers and block sizes.

use std::fmt;

/// How the numbers of a weight tensor are stored in a file.
///
/// The discriminants are ggml's type numbers, as they stand in GGUF files. A type that is not listed
/// here is refused by its number (and its name where [`ggml_name`] knows it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, non_camel_case_types)]
#[repr(u32)]
pub enum BlockType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    BF16 = 30,
    MXFP4 = 39,
}

struct Row {
    ty: BlockType,
    name: &'static str,
    /// Numbers in a block.
    len: usize,
    /// Bytes of a block.
    bytes: usize,
}

const fn row(ty: BlockType, name: &'static str, len: usize, bytes: usize) -> Row {
    Row { ty, name, len, bytes }
}

/// One line per type; everything else reads this table.
const TABLE: [Row; 16] = [
    row(BlockType::F32, "F32", 1, 4),
    row(BlockType::F16, "F16", 1, 2),
    row(BlockType::Q4_0, "Q4_0", 32, 18),
    row(BlockType::Q4_1, "Q4_1", 32, 20),
    row(BlockType::Q5_0, "Q5_0", 32, 22),
    row(BlockType::Q5_1, "Q5_1", 32, 24),
    row(BlockType::Q8_0, "Q8_0", 32, 34),
    row(BlockType::Q2_K, "Q2_K", 256, 84),
    row(BlockType::Q3_K, "Q3_K", 256, 110),
    row(BlockType::Q4_K, "Q4_K", 256, 144),
    row(BlockType::Q5_K, "Q5_K", 256, 176),
    row(BlockType::Q6_K, "Q6_K", 256, 210),
    row(BlockType::IQ4_NL, "IQ4_NL", 32, 18),
    row(BlockType::IQ4_XS, "IQ4_XS", 256, 136),
    row(BlockType::BF16, "BF16", 1, 2),
    row(BlockType::MXFP4, "MXFP4", 32, 17),
];

impl BlockType {
    /// Every supported type, in the order of ggml's numbers.
    pub fn all() -> impl Iterator<Item = BlockType> {
        TABLE.iter().map(|r| r.ty)
    }

    const fn row(self) -> &'static Row {
        let mut i = 0;
        while i + 1 < TABLE.len() && TABLE[i].ty as u32 != self as u32 {
            i += 1;
        }
        &TABLE[i]
    }

    /// The type with this ggml number, if it is supported.
    pub fn from_ggml(number: u32) -> Option<BlockType> {
        BlockType::all().find(|&t| t as u32 == number)
    }

    /// The type with this name, in any case: `q4_0`, `Q4_K`, `bf16`.
    pub fn from_name(name: &str) -> Option<BlockType> {
        BlockType::all().find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// The usual upper-case name.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Numbers in one block (1 for plain floats).
    pub const fn block_len(self) -> usize {
        self.row().len
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        self.row().bytes
    }

    /// Whether numbers are stored as integers with shared scales.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of a row of `k` numbers; `None` when `k` is not whole blocks or the size overflows.
    pub const fn row_bytes(self, k: usize) -> Option<usize> {
        if !k.is_multiple_of(self.block_len()) {
            return None;
        }
        (k / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// ggml's name of a type number, for messages about types that are not supported.
pub fn ggml_name(number: u32) -> Option<&'static str> {
    Some(match number {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        40 => "NVFP4",
        n => return BlockType::from_ggml(n).map(BlockType::name),
    })
}

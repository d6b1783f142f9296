//! Storage types of weights: the one authority for names, numbers and block sizes.

use std::fmt;

/// How the numbers of a weight tensor are stored in a file.
///
/// The discriminants are ggml's type numbers, as they stand in GGUF files. A type that is not listed
/// here is refused by its number (and its name where [`ggml_name`] knows it).
///
/// Types from [`BlockType::FIRST_INTERNAL`] on are no file's: weights of Hugging Face directories are spread over
/// several tensors (`hf::packed`), and are gathered into such blocks when they are loaded. Their numbers are far above
/// ggml's, which grow by a few a year, so that no GGUF file can name them.
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
    /// E4M3 floats under an `f32` scale.
    F8_E4M3 = 1000,
    /// Four-bit codes under an `f32` scale, plus an `f32` bias.
    AFFINE4 = 1001,
    /// Eight-bit codes under an `f32` scale, plus an `f32` bias.
    AFFINE8 = 1002,
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
const TABLE: [Row; 19] = [
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
    row(BlockType::F8_E4M3, "F8_E4M3", 32, 36),
    row(BlockType::AFFINE4, "AFFINE4", 32, 24),
    row(BlockType::AFFINE8, "AFFINE8", 32, 40),
];

impl BlockType {
    /// The first number that is not ggml's.
    pub const FIRST_INTERNAL: u32 = 1000;

    /// Every supported type, in the order of their numbers.
    pub fn all() -> impl Iterator<Item = BlockType> {
        TABLE.iter().map(|r| r.ty)
    }

    /// Every type that a GGUF file may have.
    pub fn ggml() -> impl Iterator<Item = BlockType> {
        BlockType::all().filter(|t| t.is_ggml())
    }

    /// Whether GGUF files have a number for it.
    pub const fn is_ggml(self) -> bool {
        (self as u32) < BlockType::FIRST_INTERNAL
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
        BlockType::ggml().find(|&t| t as u32 == number)
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

    /// Whether numbers are stored as integers with shared scales. [`BlockType::F8_E4M3`] has floats with shared scales.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1 && !matches!(self, BlockType::F8_E4M3)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_types_have_no_number_in_files() {
        for ty in BlockType::all() {
            assert_eq!(BlockType::from_name(ty.name()), Some(ty));
            assert_eq!(BlockType::from_ggml(ty as u32), ty.is_ggml().then_some(ty), "{ty}");
        }
        assert_eq!(BlockType::all().count() - BlockType::ggml().count(), 3);
        assert_eq!(ggml_name(BlockType::F8_E4M3 as u32), None);
    }
}

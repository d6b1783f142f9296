//! Exact decoding of stored blocks into `f32`: the readable definition of every format.
//!
//! In: whole blocks of one [`BlockType`]. Out: the numbers, equal bit for bit to what the Python package
//! `gguf` computes, torch and numpy for types that it does not have (`tests/decode.rs` compares them). The kernels of every device are tested against
//! these functions, so they favour plainness over speed. A format is one function in the file of its
//! family and one line in `DECODERS`.

mod affine;
mod float;
mod iq4;
mod k_quants;
mod legacy;

use half::f16;

use crate::block::BlockType;

pub use float::e4m3;

/// Decodes whole blocks; the lengths have been checked.
type Decoder = fn(&[u8], &mut [f32]);

const DECODERS: [(BlockType, Decoder); 19] = [
    (BlockType::F32, float::f32),
    (BlockType::F16, float::f16),
    (BlockType::BF16, float::bf16),
    (BlockType::Q4_0, legacy::q4_0),
    (BlockType::Q4_1, legacy::q4_1),
    (BlockType::Q5_0, legacy::q5_0),
    (BlockType::Q5_1, legacy::q5_1),
    (BlockType::Q8_0, legacy::q8_0),
    (BlockType::Q2_K, k_quants::q2_k),
    (BlockType::Q3_K, k_quants::q3_k),
    (BlockType::Q4_K, k_quants::q4_k),
    (BlockType::Q5_K, k_quants::q5_k),
    (BlockType::Q6_K, k_quants::q6_k),
    (BlockType::IQ4_NL, iq4::iq4_nl),
    (BlockType::IQ4_XS, iq4::iq4_xs),
    (BlockType::MXFP4, iq4::mxfp4),
    (BlockType::F8_E4M3, float::f8_e4m3),
    (BlockType::AFFINE4, affine::affine4),
    (BlockType::AFFINE8, affine::affine8),
];

/// Why blocks cannot be decoded: the caller's lengths do not fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The numbers asked for are not whole blocks.
    #[error("{len} numbers are not whole blocks of {ty}, which hold {}", ty.block_len())]
    PartialBlock {
        /// The type of the blocks.
        ty: BlockType,
        /// The numbers asked for.
        len: usize,
    },
    /// The bytes are not those of that many numbers.
    #[error("{len} numbers of {ty} take {expected} bytes, {found} were given")]
    Length {
        /// The type of the blocks.
        ty: BlockType,
        /// The numbers asked for.
        len: usize,
        /// The bytes that they take.
        expected: usize,
        /// The bytes that were given.
        found: usize,
    },
    /// The type has no line in the table of decoders.
    #[error("there is no decoder for {ty}")]
    NoDecoder {
        /// The type of the blocks.
        ty: BlockType,
    },
}

/// Decodes `bytes` (whole blocks: a row, or any number of rows) into `out`, which they must fill exactly.
pub fn decode_row(ty: BlockType, bytes: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
    let len = out.len();
    let expected = ty.row_bytes(len).ok_or(DecodeError::PartialBlock { ty, len })?;
    if bytes.len() != expected {
        return Err(DecodeError::Length { ty, len, expected, found: bytes.len() });
    }
    let (_, decode) = DECODERS.iter().find(|(t, _)| *t == ty).ok_or(DecodeError::NoDecoder { ty })?;
    decode(bytes, out);
    Ok(())
}

/// Calls `block` for each block of `BYTES` bytes and the `LEN` numbers that it decodes to.
fn each_block<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (stored, numbers) in bytes.as_chunks::<BYTES>().0.iter().zip(out.as_chunks_mut::<LEN>().0) {
        block(stored, numbers);
    }
}

/// The single-precision number at `at`.
fn single(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The half-precision number at `at`.
fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// The low four bits of a byte.
fn low(byte: u8) -> u8 {
    byte & 0xf
}

/// The high four bits of a byte.
fn high(byte: u8) -> u8 {
    byte >> 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_a_decoder_that_fills_its_output() {
        for ty in BlockType::all() {
            let n = 2 * ty.block_len();
            let mut out = vec![f32::NAN; n];
            decode_row(ty, &vec![0; 2 * ty.block_bytes()], &mut out).unwrap();
            assert!(out.iter().all(|x| x.is_finite()), "{ty}");
        }
    }

    #[test]
    fn lengths_are_checked() {
        let ty = BlockType::Q8_0;
        assert_eq!(decode_row(ty, &[0; 34], &mut [0.0; 31]), Err(DecodeError::PartialBlock { ty, len: 31 }));
        let wrong = DecodeError::Length { ty, len: 32, expected: 34, found: 33 };
        assert_eq!(decode_row(ty, &[0; 33], &mut [0.0; 32]), Err(wrong));
    }
}

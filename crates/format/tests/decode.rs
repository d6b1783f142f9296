//! Decoding against the reference: every stored type, bit for bit.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::Path;

use minfer_format::{BlockType, decode_row};

fn fixture(ty: BlockType, kind: &str) -> Vec<u8> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/blocks").join(format!("{ty}.{kind}"));
    fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Reference: `gguf.quants.dequantize`, torch and numpy (see `fixtures/README.md`); tolerance: none.
#[test]
fn decoding_equals_the_reference_bit_for_bit() {
    for ty in BlockType::all() {
        let (blocks, expected) = (fixture(ty, "blocks"), fixture(ty, "f32"));
        let mut numbers = vec![0.0; expected.len() / 4];
        assert!(numbers.len() >= 64 * ty.block_len(), "{ty}: too few blocks");
        decode_row(ty, &blocks, &mut numbers).unwrap();
        for (i, (x, bytes)) in numbers.iter().zip(expected.as_chunks::<4>().0).enumerate() {
            let reference = f32::from_le_bytes(*bytes);
            let (block, place) = (i / ty.block_len(), i % ty.block_len());
            assert!(
                x.to_bits() == reference.to_bits(),
                "{ty}, block {block}, number {place}: {x:e} ({:#010x}), reference {reference:e} ({:#010x})",
                x.to_bits(),
                reference.to_bits()
            );
        }
    }
}

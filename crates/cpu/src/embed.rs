//! Rows of an embedding table that is kept as it stands in the file.

use minfer_format::{BlockType, DecodeError, decode_row};

/// Why a row cannot be read from a table.
#[derive(Debug, thiserror::Error)]
pub enum EmbedError {
    /// A row is not whole blocks of the table's type.
    #[error("an embedding row of {width} numbers is not whole {ty} blocks of {} numbers", ty.block_len())]
    PartialBlock {
        /// The table's type.
        ty: BlockType,
        /// Numbers in a row.
        width: usize,
    },
    /// The id is outside the table.
    #[error("row {row} of an embedding table of {rows} rows; token ids must be below the vocabulary size")]
    NoSuchRow {
        /// The id that was asked for.
        row: usize,
        /// Rows in the table.
        rows: usize,
    },
    /// The row's bytes do not decode.
    #[error("row {row} of the embedding table does not decode: {source}")]
    Decode {
        /// The id that was asked for.
        row: usize,
        /// What is wrong with the bytes.
        source: DecodeError,
    },
}

/// Decodes row `row` of `table` (`[rows, out.len()]`, blocks of type `ty` in file order) exactly.
///
/// # Errors
/// When the row lies outside the table or its width is not whole blocks.
pub fn gather_row(ty: BlockType, table: &[u8], row: usize, out: &mut [f32]) -> Result<(), EmbedError> {
    let width = out.len();
    let bytes = ty.row_bytes(width).filter(|&b| b > 0).ok_or(EmbedError::PartialBlock { ty, width })?;
    let rows = table.len() / bytes;
    if row >= rows {
        return Err(EmbedError::NoSuchRow { row, rows });
    }
    let encoded = &table[row * bytes..(row + 1) * bytes];
    decode_row(ty, encoded, out).map_err(|source| EmbedError::Decode { row, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_decodes_exactly() {
        let table: Vec<u8> = (0..12).flat_map(|i| (i as f32 * 0.5 - 1.0).to_le_bytes()).collect();
        let mut out = [0.0; 4];
        gather_row(BlockType::F32, &table, 2, &mut out).unwrap();
        assert_eq!(out, [3.0, 3.5, 4.0, 4.5]);
    }

    /// Q8_0: an f16 scale, then 32 signed bytes.
    #[test]
    fn quantised_rows_are_found_by_their_block_size() {
        let block = |scale: f32, first: i8| {
            let mut b = half::f16::from_f32(scale).to_le_bytes().to_vec();
            b.extend((0..32).map(|i| (first + i) as u8));
            b
        };
        let table: Vec<u8> = [block(1.0, 0), block(0.5, -3), block(2.0, 1)].concat();
        let mut out = [0.0; 32];
        gather_row(BlockType::Q8_0, &table, 1, &mut out).unwrap();
        assert_eq!(out[..4], [-1.5, -1.0, -0.5, 0.0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let table = vec![0u8; 34 * 3];
        let refused = |row: usize, width: usize| {
            gather_row(BlockType::Q8_0, &table, row, &mut vec![0.0; width]).unwrap_err()
        };
        assert!(matches!(refused(3, 32), EmbedError::NoSuchRow { row: 3, rows: 3 }));
        assert!(matches!(refused(0, 33), EmbedError::PartialBlock { width: 33, .. }));
        assert!(matches!(refused(0, 0), EmbedError::PartialBlock { width: 0, .. }));
        assert!(matches!(refused(usize::MAX, 32), EmbedError::NoSuchRow { .. }));
    }
}

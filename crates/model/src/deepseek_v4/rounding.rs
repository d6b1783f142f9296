//! The round trips of DeepSeek's own graph, with which the weights were trained, where they are asked for: rows of keys,
//! which are also the values, through FP8 but for the numbers that are rotated; queries and keys of the indexer through a
//! Hadamard transform, which dot products do not see, and FP4. Other engines (transformers, MTPLX) leave both out.

use minfer_graph::{RoundFormat, RoundTrip, ValueId};

use super::{DeepseekV4, Step};
use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// Numbers under one scale.
const FP8_BLOCK: usize = 64;
const FP4_BLOCK: usize = 32;

impl DeepseekV4 {
    /// Fails, with the sizes, where rows are not whole blocks.
    pub(super) fn check_rounding(&self, ck: &Checkpoint) -> Result<(), ModelError> {
        let (h, index_dim) = (&self.hyper, self.sizes.index_dim);
        let plain = self.plain_dims();
        let refused = |why: String| ModelError::OfficialRounding { source_name: ck.name(), why };
        if plain == 0 || !plain.is_multiple_of(FP8_BLOCK) {
            return Err(refused(format!(
                "{plain} of the {} numbers of a head are not rotated, which are not whole blocks of {FP8_BLOCK}",
                h.head_dim
            )));
        }
        if !index_dim.is_power_of_two() || !index_dim.is_multiple_of(FP4_BLOCK) {
            return Err(refused(format!(
                "the indexer's heads have {index_dim} numbers, which is not a power of two in whole blocks of {FP4_BLOCK}"
            )));
        }
        Ok(())
    }

    /// Numbers of a head that are not rotated: the first ones.
    fn plain_dims(&self) -> usize {
        self.hyper.head_dim.saturating_sub(self.hyper.rope_dims)
    }
}

impl Step<'_> {
    /// Rows of keys as they are cached, after their rotation.
    pub(super) fn rounded_keys(&mut self, rows: ValueId) -> ValueId {
        let format = RoundFormat::Fp8 { block: FP8_BLOCK, from: 0, len: self.m.plain_dims() };
        self.rounded(rows, RoundTrip { group: self.m.hyper.head_dim, format })
    }

    /// The indexer's queries or keys, after their rotation.
    pub(super) fn rounded_index(&mut self, rows: ValueId) -> ValueId {
        let format = RoundFormat::Fp4Hadamard { block: FP4_BLOCK };
        self.rounded(rows, RoundTrip { group: self.m.sizes.index_dim, format })
    }

    fn rounded(&mut self, rows: ValueId, round: RoundTrip) -> ValueId {
        if self.m.official_rounding { self.p.b.round_trip(rows, round) } else { rows }
    }
}

//! The order in which vector kernels walk groups and rows.
//!
//! Weights are one sequential stream, which the hardware fetches ahead. Prefetching by hand as well, 512 to 8192 bytes
//! ahead and with every hint, cost 3 to 40 % of the rate of a single row on Zen 4 (2026).

use std::ops::Range;

use super::Job;

/// Activations that stay in the L2 cache while the weights stream by once: half of a small L2 (512 KiB).
const TILE_BYTES: usize = 256 << 10;

/// Rows of a tile: a multiple of `most`, and at least that.
pub(super) fn tile_rows(x_bytes: usize, most: usize) -> usize {
    (TILE_BYTES / x_bytes.max(1)).max(most) / most * most
}

/// How many of the `left` rows are computed together: `most`, or 8, 4, 2, 1 at the end.
#[inline(always)]
pub(super) fn rows_together(left: usize, most: usize) -> usize {
    match left {
        left if left >= most => most,
        8.. => 8,
        4.. => 4,
        2..=3 => 2,
        _ => 1,
    }
}

/// Calls `tile(weights of the group, group, first row, rows)` for all groups and rows, with [`rows_together`] of
/// `most`: row tiles outside, so that weights stream once per row tile, and a group's weights stay in L1 over the
/// rows of a tile.
///
/// # Safety
/// As [`super::MatmulFn`], for a kernel whose instruction sets the caller has enabled.
#[inline(always)]
pub(super) unsafe fn for_tiles(
    job: &Job<'_>,
    groups: Range<usize>,
    most: usize,
    x_bytes: usize,
    group_bytes: usize,
    tile: impl Fn(*const u8, usize, usize, usize),
) {
    let count = job.rows.len();
    let tile_rows = tile_rows(x_bytes, most);
    let mut start = 0;
    while start < count {
        let end = count.min(start.saturating_add(tile_rows));
        for group in groups.clone() {
            // SAFETY: the weight has this group.
            let weights = unsafe { job.weights.add(group * group_bytes) };
            let mut row = start;
            while row < end {
                let rows = rows_together(end - row, most);
                tile(weights, group, row, rows);
                row += rows;
            }
        }
        start = end;
    }
}

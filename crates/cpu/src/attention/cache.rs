//! Rows of a key or value cache, and the conversions between f32 and its formats. Widening is exact; narrowing to f16
//! rounds to nearest, ties to even, in software and in hardware alike; blocks of Q8_0 are in `q8`.

use half::f16;
use minfer_runtime::KvFormat;

use super::Tile;
use crate::Kernels;

/// A key or value cache, `[slots, width]`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum CacheRows<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    /// Rows of blocks, see [`KvFormat::Q8_0`].
    Q8_0(&'a [u8]),
}

impl<'a> CacheRows<'a> {
    /// Format and bytes.
    pub(super) fn bytes(&self) -> (KvFormat, &'a [u8]) {
        match self {
            CacheRows::F32(rows) => (KvFormat::F32, bytemuck::cast_slice(rows)),
            CacheRows::F16(rows) => (KvFormat::F16, bytemuck::cast_slice(rows)),
            CacheRows::Q8_0(rows) => (KvFormat::Q8_0, rows),
        }
    }

    /// Whether both are the same memory: latents are keys and values at once.
    pub(super) fn is(&self, other: &CacheRows<'_>) -> bool {
        let ((a_format, a), (b_format, b)) = (self.bytes(), other.bytes());
        a_format == b_format && std::ptr::eq(a, b)
    }

    /// Reads row `slot` of a cache as wide as `out`, widened exactly.
    ///
    /// # Panics
    /// When the slot is outside the cache; the caller validates slots.
    pub fn load(&self, kernels: &Kernels, slot: usize, out: &mut [f32]) {
        let width = out.len();
        let row = Tile::of_cache(*self, width, slot, (0, width), 1);
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (kernels.widen)(row, width, out) }
    }
}

/// The same for writing.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum CacheRowsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    /// Rows of blocks, see [`KvFormat::Q8_0`].
    Q8_0(&'a mut [u8]),
}

impl CacheRowsMut<'_> {
    /// Writes `row` (as wide as the cache) at `slot`.
    ///
    /// # Panics
    /// When the slot is outside the cache; the caller validates slots.
    pub fn store(&mut self, kernels: &Kernels, slot: usize, row: &[f32]) {
        let at = slot * row.len()..(slot + 1) * row.len();
        match self {
            CacheRowsMut::F32(rows) => rows[at].copy_from_slice(row),
            // SAFETY: `Kernels` holds only what this machine can run; both slices have one length.
            CacheRowsMut::F16(rows) => unsafe { (kernels.narrow)(row, &mut rows[at]) },
            CacheRowsMut::Q8_0(rows) => {
                let bytes = KvFormat::Q8_0.row_bytes(row.len());
                // SAFETY: as above; the slice is as long as the row needs.
                unsafe { (kernels.narrow_q8)(row, &mut rows[slot * bytes..][..bytes]) }
            }
        }
    }
}

/// Number `i` of a row: the definition of widening.
#[inline(always)]
pub(super) fn widen_number(format: KvFormat, row: &[u8], i: usize) -> f32 {
    match format {
        KvFormat::F32 => f32::from_ne_bytes([row[4 * i], row[4 * i + 1], row[4 * i + 2], row[4 * i + 3]]),
        // The `const` conversion is software on every machine; the others may use F16C themselves.
        KvFormat::F16 => f16::from_ne_bytes([row[2 * i], row[2 * i + 1]]).to_f32_const(),
        KvFormat::Q8_0 => super::q8::number(row, i),
    }
}

pub(crate) mod scalar {
    use half::f16;

    // The `const` conversion is software on every machine; the others may use F16C themselves.
    pub(crate) fn narrow(x: &[f32], out: &mut [f16]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = f16::from_f32_const(*x);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use std::arch::x86_64::*;

    use half::f16;

    use crate::math::{LANES, avx2::load};

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn narrow(x: &[f32], out: &mut [f16]) {
        let (x8, x_tail) = x.as_chunks::<LANES>();
        let (out8, out_tail) = out.as_chunks_mut::<LANES>();
        for (o, x) in out8.iter_mut().zip(x8) {
            let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load(x));
            // SAFETY: `o` is eight f16, 16 bytes; the store needs no alignment.
            unsafe { _mm_storeu_si128(o.as_mut_ptr().cast(), bits) }
        }
        super::scalar::narrow(x_tail, out_tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_same_bits, with_edge_cases};

    fn narrow(k: &Kernels, x: &[f32]) -> Vec<u16> {
        let mut out = vec![f16::ZERO; x.len()];
        CacheRowsMut::F16(&mut out).store(k, 0, x);
        out.iter().map(|h| h.to_bits()).collect()
    }

    /// Every f16, every midpoint between neighbours (the ties) and its f32 neighbours, and random bits.
    #[test]
    fn narrowing_is_the_same_in_software_and_hardware() {
        let mut x = Vec::new();
        for bits in 0..0x7C00u16 {
            let (a, b) = (f16::from_bits(bits).to_f32_const(), f16::from_bits(bits + 1).to_f32_const());
            let middle = if b.is_finite() { a + (b - a) / 2.0 } else { 65520.0 };
            for v in [a, middle, middle.next_up(), middle.next_down()] {
                x.extend([v, -v]);
            }
        }
        let mut rng = Rng::new(20);
        x.extend((0..200_003).map(|_| f32::from_bits(rng.next())));
        let x = with_edge_cases(x);
        let (want, got) = (narrow(&Kernels::scalar(), &x), narrow(&Kernels::detect(), &x));
        for ((x, want), got) in x.iter().zip(want).zip(got) {
            assert_eq!(got, want, "{x:e} ({:08x})", x.to_bits());
        }
    }

    #[test]
    fn ties_go_to_even() {
        let halfway = |odd_or_even: f32| odd_or_even + 0.5 * 2f32.powi(-10);
        let x = [halfway(1.0), halfway(1.0 + 2f32.powi(-10)), 65519.9, 65520.0];
        assert_eq!(narrow(&Kernels::detect(), &x), [0x3C00, 0x3C02, 0x7BFF, 0x7C00]);
    }

    /// Every f16, in rows that do not fill registers and with gaps between them.
    #[test]
    fn widening_is_exact_and_the_same_everywhere() {
        let x: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for (stride, dim) in [(64, 64), (16, 13)] {
            let want: Vec<f32> = x.chunks(stride).flat_map(|x| &x[..dim]).map(|x| x.to_f32_const()).collect();
            for kernels in [Kernels::scalar(), Kernels::detect()] {
                let mut got = vec![0.0; want.len()];
                let rows = Tile::of_cache(CacheRows::F16(&x), stride, 0, (0, dim), x.len() / stride);
                // SAFETY: `Kernels` holds only what this machine can run.
                unsafe { (kernels.widen)(rows, dim, &mut got) }
                assert_same_bits(&got, &want);
            }
        }
    }

    #[test]
    fn a_stored_row_lies_at_its_slot() {
        let mut rows = [0.0; 6];
        CacheRowsMut::F32(&mut rows).store(&Kernels::detect(), 1, &[1.0, 2.0]);
        assert_eq!(rows, [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]);
        let mut row = [0.0; 2];
        CacheRows::F32(&rows).load(&Kernels::detect(), 1, &mut row);
        assert_eq!(row, [1.0, 2.0]);
        let halves = [0.5, 3.0, -1.5, 8.0].map(f16::from_f32_const);
        CacheRows::F16(&halves).load(&Kernels::detect(), 1, &mut row);
        assert_eq!(row, [-1.5, 8.0]);
    }
}

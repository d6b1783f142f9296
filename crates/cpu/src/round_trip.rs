//! Rows through a small float format and back, as DeepSeek's own graph rounds what it caches (`RoundTrip`).
//!
//! Powers of two are read off and made from exponent bits, and dividing by one is exact, so each number is rounded
//! once. Every number stands alone but for its block's largest one, so the AVX2 kernel is the scalar source compiled
//! once more with the wider instructions.

use minfer_graph::RoundTrip;

use crate::Kernels;

impl Kernels {
    /// Rounds the groups of a row, which they fill (graph validation has checked the sizes).
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn round_trip(&self, r: &RoundTrip, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "round_trip: lengths differ");
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.round_trip)(r, x, out) }
    }
}

pub(crate) mod scalar {
    use minfer_graph::{RoundFormat, RoundTrip};

    /// A float format with a sign, without infinities.
    struct Small {
        mantissa_bits: i32,
        /// Exponent of the smallest normal number.
        smallest: i32,
        largest: f32,
        /// What a block's largest number is raised to before its scale is chosen.
        floor: f32,
    }

    /// OCP 8-bit Floating Point Specification 1.0.
    const E4M3: Small = Small { mantissa_bits: 3, smallest: -6, largest: 448.0, floor: 1e-4 };
    /// OCP Microscaling Formats 1.0.
    const E2M1: Small = Small { mantissa_bits: 1, smallest: 0, largest: 6.0, floor: 6.0 * f32::MIN_POSITIVE };

    #[inline(always)]
    pub(crate) fn round_trip(r: &RoundTrip, x: &[f32], out: &mut [f32]) {
        out.copy_from_slice(x);
        for group in out.chunks_exact_mut(r.group) {
            match r.format {
                RoundFormat::Fp8 { block, from, len } => {
                    group[from..from + len].chunks_exact_mut(block).for_each(|b| round_block(&E4M3, b));
                }
                RoundFormat::Fp4Hadamard { block } => {
                    hadamard(group);
                    group.chunks_exact_mut(block).for_each(|b| round_block(&E2M1, b));
                }
            }
        }
    }

    #[inline(always)]
    fn round_block(format: &Small, block: &mut [f32]) {
        // A NaN would not win the comparison.
        if block.iter().any(|x| !x.is_finite()) {
            block.fill(f32::NAN);
            return;
        }
        let largest = block.iter().fold(format.floor, |m, x| if x.abs() > m { x.abs() } else { m });
        let scale = power(ceil_log2(largest / format.largest));
        for x in block {
            *x = scale * nearest(format, *x / scale);
        }
    }

    /// `ceil(log2(x))` of a positive normal number.
    #[inline(always)]
    fn ceil_log2(x: f32) -> i32 {
        let bits = x.to_bits();
        (bits >> 23) as i32 - 127 + i32::from(bits & 0x007f_ffff != 0)
    }

    /// `2^e` for exponents of normal numbers.
    #[inline(always)]
    fn power(e: i32) -> f32 {
        f32::from_bits(((e + 127) as u32) << 23)
    }

    /// The nearest value of the format: a multiple of the distance of values about `x`.
    #[inline(always)]
    fn nearest(format: &Small, x: f32) -> f32 {
        let exponent = ((x.to_bits() >> 23 & 0xff) as i32 - 127).max(format.smallest);
        let step = power(exponent - format.mantissa_bits);
        let rounded = (x / step).round_ties_even() * step;
        rounded.clamp(-format.largest, format.largest)
    }

    /// Times the orthonormal Hadamard matrix: sums and differences at distances 1, 2, 4 .., then one factor.
    #[inline(always)]
    fn hadamard(x: &mut [f32]) {
        let mut distance = 1;
        while distance < x.len() {
            for pair in x.chunks_exact_mut(2 * distance) {
                let (a, b) = pair.split_at_mut(distance);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        let factor = (1.0 / (x.len() as f64).sqrt()) as f32;
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use minfer_graph::RoundTrip;

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn round_trip(r: &RoundTrip, x: &[f32], out: &mut [f32]) {
        super::scalar::round_trip(r, x, out);
    }
}

//! Quantised activations (the graph's `Q8`): rows of f32 become int8 in blocks of 32 with one scale each.
//!
//! In: a row of `k` numbers, `k` a multiple of 32. Out: [`q8_row_bytes`]`(k)` bytes,
//! `[k x i8 codes][k/32 x f32 scales][k/16 x i16 sums of 16 consecutive codes][k/32 x f32 sums of 32 codes, scaled]`,
//! native byte order. The sums serve weights with offsets and minima. Weights are not quantised here; see `pack`.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;

use crate::isa::Isa;

/// Numbers that share one scale.
pub const Q8_BLOCK: usize = 32;

/// Bytes of a quantised row of `k` numbers: `k + 3k/8`.
pub const fn q8_row_bytes(k: usize) -> usize {
    k + k / 8 * 3
}

/// A quantiser of whole blocks of a row: `x` belongs at block `first` of the row `out`, which has `k` numbers. Workers may
/// share a row by its blocks.
///
/// # Safety
/// The machine must have the instruction set that the function was selected for. `x` and `k` are whole blocks of 32,
/// the blocks lie within the row, `out` is writable for [`q8_row_bytes`]`(k)`, and nobody else uses these blocks.
pub type QuantizeFn = unsafe fn(x: &[f32], first: usize, k: usize, out: *mut u8);

/// The quantiser for an instruction set; all give the same bytes.
pub fn select(isa: Isa) -> QuantizeFn {
    match isa {
        Isa::Scalar => blocks,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => avx2::blocks,
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => blocks,
    }
}

/// Quantises a row: the definition.
///
/// Per block of 32: `d = amax / 127`, `q = round_ties_even(x * (127 / amax))`. A block whose `127 / amax`
/// is not finite (all zero, or below 4e-37) becomes zero. A block that holds an infinity or a NaN gets a NaN
/// scale, so that every output it touches is NaN instead of silently wrong.
///
/// # Panics
/// When the lengths do not fit each other.
pub fn row(x: &[f32], out: &mut [u8]) {
    let k = x.len();
    assert!(k.is_multiple_of(Q8_BLOCK), "{k} numbers are not whole blocks of {Q8_BLOCK}");
    assert!(out.len() == q8_row_bytes(k), "a Q8 row of {k} has {} bytes, not {}", q8_row_bytes(k), out.len());
    // SAFETY: the lengths fit, and the row is borrowed mutably.
    unsafe { blocks(x, 0, k, out.as_mut_ptr()) }
}

/// [`row`] for some of its blocks. See [`QuantizeFn`].
///
/// # Safety
/// As [`QuantizeFn`].
unsafe fn blocks(x: &[f32], first: usize, k: usize, out: *mut u8) {
    for (b, block) in x.chunks_exact(Q8_BLOCK).enumerate() {
        let (scale, inverse) = scale_of(amax_bits(block));
        // A zero inverse marks a block without codes; its numbers may be NaN.
        let code = |v: &f32| if inverse == 0.0 { 0 } else { (v * inverse).round_ties_even() as i8 };
        let codes: [i8; Q8_BLOCK] = std::array::from_fn(|i| code(&block[i]));
        let sums = [0, 16].map(|half| codes[half..half + 16].iter().map(|&q| i16::from(q)).sum());
        // SAFETY: the caller's promise.
        unsafe {
            out.add(Q8_BLOCK * (first + b)).cast::<[i8; Q8_BLOCK]>().write(codes);
            put_scales(scale, sums, first + b, k, out);
        }
    }
}

/// Writes what a row keeps of block `b` beside its codes.
///
/// # Safety
/// Block `b` lies within the row `out` of `k` numbers, and nobody else uses it.
#[inline(always)]
unsafe fn put_scales(scale: f32, sums: [i16; 2], b: usize, k: usize, out: *mut u8) {
    // SAFETY: the caller's promise; the three parts of 4 bytes a block follow the codes.
    unsafe {
        out.add(k + 4 * b).cast::<f32>().write_unaligned(scale);
        out.add(k + k / 8 + 4 * b).cast::<[i16; 2]>().write_unaligned(sums);
        out.add(k + k / 4 + 4 * b).cast::<f32>().write_unaligned(scale * f32::from(sums[0] + sums[1]));
    }
}

/// The largest magnitude as bits: with the sign cleared, the order of floats is the order of their bits,
/// and everything that is not finite is at least [`INFINITE`].
fn amax_bits(block: &[f32]) -> u32 {
    block.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff))
}

const INFINITE: u32 = 0x7f80_0000;

/// The scale of a block and the factor that turns its numbers into codes (0 when its codes are all 0).
fn scale_of(amax_bits: u32) -> (f32, f32) {
    if amax_bits >= INFINITE {
        return (f32::NAN, 0.0);
    }
    let amax = f32::from_bits(amax_bits);
    let inverse = 127.0 / amax;
    if inverse.is_finite() { (amax / 127.0, inverse) } else { (0.0, 0.0) }
}

/// A quantised row, for reading.
#[derive(Clone, Copy, Debug)]
pub struct Q8Row<'a> {
    /// `[k]` codes in `-127..=127`.
    pub codes: &'a [i8],
    /// `[k/32]` scales.
    pub scales: &'a [f32],
    /// `[k/16]` sums of 16 consecutive codes.
    pub sums: &'a [i16],
    /// `[k/32]` products of a block's scale and the sum of its codes, rounded to f32.
    pub scaled_sums: &'a [f32],
}

impl<'a> Q8Row<'a> {
    /// Views the bytes of a row of `k` numbers; `None` when the length or the alignment (4) does not fit.
    pub fn new(bytes: &'a [u8], k: usize) -> Option<Q8Row<'a>> {
        if !k.is_multiple_of(Q8_BLOCK) || bytes.len() != q8_row_bytes(k) {
            return None;
        }
        let (codes, rest) = bytes.split_at(k);
        let (scales, rest) = rest.split_at(k / 8);
        let (sums, scaled_sums) = rest.split_at(k / 8);
        Some(Q8Row {
            codes: bytemuck::cast_slice(codes),
            scales: bytemuck::try_cast_slice(scales).ok()?,
            sums: bytemuck::try_cast_slice(sums).ok()?,
            scaled_sums: bytemuck::try_cast_slice(scaled_sums).ok()?,
        })
    }

    /// The number in column `i` that the row stands for.
    pub fn value(&self, i: usize) -> f32 {
        self.scales[i / Q8_BLOCK] * f32::from(self.codes[i])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aligned(k: usize) -> Vec<u32> {
        vec![0; q8_row_bytes(k) / 4]
    }

    /// Numbers of many magnitudes from a seed (xorshift).
    fn numbers(seed: u64, k: usize) -> Vec<f32> {
        let mut s = seed | 1;
        let mut next = || {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            s
        };
        let mut x = Vec::new();
        for _ in 0..k / 32 {
            let scale = 2f32.powi((next() % 60) as i32 - 30);
            x.extend((0..32).map(|_| (next() as i32 as f32) / 2f32.powi(31) * scale));
        }
        x
    }

    /// Reference: the definition in f64. Tolerance: half a step (`d/2`) plus f32 rounding, per number.
    #[test]
    fn codes_are_within_half_a_step() {
        let x = numbers(1, 1024);
        let mut buf = aligned(1024);
        row(&x, bytemuck::cast_slice_mut(&mut buf));
        let q = Q8Row::new(bytemuck::cast_slice(&buf), 1024).unwrap();
        for (i, v) in x.iter().enumerate() {
            let d = f64::from(q.scales[i / 32]);
            assert!((f64::from(*v) - f64::from(q.codes[i]) * d).abs() <= d * 0.5 * (1.0 + 1e-4), "{i}");
        }
        for (i, half) in q.codes.chunks_exact(16).enumerate() {
            assert_eq!(i32::from(q.sums[i]), half.iter().map(|&c| i32::from(c)).sum::<i32>());
        }
        for (b, scaled) in q.scaled_sums.iter().enumerate() {
            assert_eq!(*scaled, q.scales[b] * f32::from(q.sums[2 * b] + q.sums[2 * b + 1]));
        }
        assert!(q.codes.contains(&127) && q.codes.contains(&-127));
    }

    #[test]
    fn special_blocks() {
        let mut x = vec![1.0f32; 32 * 6];
        x[3] = f32::NAN;
        x[32 + 5] = f32::NEG_INFINITY;
        x[64..96].fill(-0.0);
        x[96..128].fill(f32::from_bits(77));
        x[128..160].fill(f32::MAX);
        // With 127 the factor is 1, so these are ties: to the even neighbour, not away from zero.
        x[160..192].fill(127.0);
        (x[160], x[161]) = (62.5, -2.5);
        let mut buf = aligned(x.len());
        row(&x, bytemuck::cast_slice_mut(&mut buf));
        let q = Q8Row::new(bytemuck::cast_slice(&buf), x.len()).unwrap();
        assert!(q.scales[0].is_nan() && q.scales[1].is_nan());
        assert_eq!(&q.scales[2..4], &[0.0, 0.0]);
        assert!(q.codes[..128].iter().all(|&c| c == 0));
        assert!(q.codes[128..160].iter().all(|&c| c == 127) && q.scales[4].is_finite());
        assert_eq!(&q.codes[160..163], &[62, -2, 127]);
    }

    /// Reference: the scalar row. Equal bytes (NaN scales included, both are the same constant).
    #[test]
    fn every_instruction_set_gives_the_same_bytes() {
        for isa in Isa::ALL.into_iter().filter(|i| i.is_available()) {
            for seed in 0..200u64 {
                let k = 32 * (1 + seed as usize % 9);
                let mut x = numbers(seed * 77 + 5, k);
                match seed % 7 {
                    1 => x[seed as usize % k] = f32::NAN,
                    2 => x[seed as usize % k] = f32::INFINITY,
                    3 => x[..32].fill(0.0),
                    4 => x[..32].iter_mut().for_each(|v| *v = f32::from_bits(v.to_bits() & 0x807f_ffff)),
                    5 => {
                        x[..32].iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32 - 15.5) / 127.0 * 2.0)
                    }
                    _ => {}
                }
                let (mut a, mut b) = (aligned(k), aligned(k));
                row(&x, bytemuck::cast_slice_mut(&mut a));
                // SAFETY: only available instruction sets are tried.
                unsafe { select(isa)(&x, 0, k, b.as_mut_ptr().cast()) };
                assert_eq!(a, b, "{isa:?}, seed {seed}");
            }
        }
    }
}

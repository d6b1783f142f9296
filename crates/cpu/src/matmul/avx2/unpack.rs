//! 32 columns of 8 rows of a packed weight, half a group, from the stream into registers.

use std::arch::x86_64::*;

use crate::pack::layout::*;
use crate::pack::{Format, GROUP};

/// Rows of a register.
pub(super) const HALF: usize = GROUP / 2;

/// 32 columns of 8 rows. What a format does not have is zero or one, and folds away.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Lane `r` of vector `g` holds the codes of row `r`, columns `4g .. 4g + 4`: signed, or unsigned with offset.
    pub(super) codes: [__m256i; 8],
    /// f32 scale of each row.
    pub(super) scale: __m256,
    /// f32 minimum of each row.
    pub(super) min: __m256,
    /// i16 factors of the first and of the last 16 columns, twice in each lane.
    pub(super) factors: [__m256i; 2],
    /// Both i16 factors in each lane, as the activations' sums lie.
    pub(super) factor_pairs: __m256i,
    /// Both i16 factors of the minima in each lane.
    pub(super) min_factors: __m256i,
}

/// Scales and minima of a file block's rows `HALF * half..`.
///
/// # Safety
/// `p` points to the head of a packed block, `half` is 0 or 1, and the code is inlined into a function with AVX2 and
/// F16C.
#[inline(always)]
pub(super) unsafe fn head<F: Format>(p: *const u8, half: usize) -> (__m256, __m256) {
    // SAFETY: the head has 16 numbers of each kind.
    unsafe {
        let at = |bytes: usize, kind: usize| p.add(bytes * (GROUP * kind + HALF * half));
        match F::HEAD {
            Head::Scale => (halves(at(2, 0)), _mm256_setzero_ps()),
            Head::ScaleMin => (halves(at(2, 0)), halves(at(2, 1))),
            Head::WideScaleMin => (_mm256_loadu_ps(at(4, 0).cast()), _mm256_loadu_ps(at(4, 1).cast())),
            Head::Exponent => (exponents(at(1, 0)), _mm256_setzero_ps()),
        }
    }
}

/// # Safety
/// `p` points to 8 f16.
#[inline(always)]
unsafe fn halves(p: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
}

/// `2^(e - 128)`: see the scalar `half_exponent`.
///
/// # Safety
/// `p` points to 8 bytes.
#[inline(always)]
unsafe fn exponents(p: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let e = bytes_u(p);
        let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, _mm256_set1_epi32(1)));
        let subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
        let is_normal = _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1));
        _mm256_castsi256_ps(_mm256_blendv_epi8(subnormal, normal, is_normal))
    }
}

/// # Safety
/// `p` points to 8 bytes.
#[inline(always)]
unsafe fn bytes_u(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())) }
}

/// # Safety
/// `p` points to 8 bytes.
#[inline(always)]
unsafe fn bytes_i(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())) }
}

/// Unpacks half of the 32 columns at `p` (sub-scales, then codes) under its head.
///
/// # Safety
/// `p` points to a packed body, `half` is 0 or 1, and the code is inlined into a function with AVX2.
#[inline(always)]
pub(super) unsafe fn unpack<F: Format>((scale, min): (__m256, __m256), p: *const u8, half: usize) -> Block {
    // SAFETY: the caller's promise.
    unsafe {
        let one = _mm256_set1_epi16(1);
        let codes = values::<F>(stored_codes::<F>(p.add(F::SUB_BYTES + VECTOR / 2 * half)));
        let p = p.add(F::SUB.stride() * HALF * half);
        let mut block = Block { codes, scale, min, factors: [one; 2], factor_pairs: one, min_factors: one };
        match F::SUB {
            Sub::None => {}
            Sub::Scale => block.scale = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(bytes_i(p))),
            Sub::ScaleMin => {
                block.scale = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(bytes_u(p)));
                block.min = _mm256_mul_ps(min, _mm256_cvtepi32_ps(bytes_u(p.add(GROUP))));
            }
            Sub::Pair => set_pairs(&mut block, _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast()))),
            Sub::PairMin => {
                let both = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
                set_pairs(&mut block, _mm256_and_si256(both, _mm256_set1_epi16(15)));
                block.min_factors = _mm256_srli_epi16::<4>(both);
            }
        }
        block
    }
}

/// # Safety
/// None beyond the instruction set.
#[inline(always)]
unsafe fn set_pairs(block: &mut Block, pairs: __m256i) {
    // SAFETY: no memory is accessed.
    unsafe {
        let first = _mm256_set1_epi32(0x0100_0100);
        let lanes = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c));
        let low = _mm256_add_epi8(first, lanes);
        let high = _mm256_add_epi8(low, _mm256_set1_epi8(2));
        block.factors = [_mm256_shuffle_epi8(pairs, low), _mm256_shuffle_epi8(pairs, high)];
        block.factor_pairs = pairs;
    }
}

/// The stored codes, gathered from the planes: vector `g` for columns `4g .. 4g + 4`.
///
/// # Safety
/// `p` points to the codes of a packed body, or half a [`VECTOR`] behind for its second half.
#[inline(always)]
unsafe fn stored_codes<F: Format>(p: *const u8) -> [__m256i; 8] {
    // SAFETY: `place` stays within the planes.
    unsafe {
        let low = F::LOW_BITS;
        let mut codes = [_mm256_setzero_si256(); 8];
        for (g, code) in codes.iter_mut().enumerate() {
            *code = field(p.add(F::HIGH_BYTES), low, g, 0);
            if F::BITS > low {
                *code = _mm256_or_si256(*code, field(p, F::BITS - low, g, low));
            }
        }
        codes
    }
}

/// Column group `g` of a plane of `bits` bits, moved to bit `to` of each byte. All arguments but `plane` are
/// constants after inlining.
///
/// # Safety
/// `plane` points to a plane of a packed body.
#[inline(always)]
unsafe fn field(plane: *const u8, bits: usize, g: usize, to: usize) -> __m256i {
    let (vector, shift) = place(bits, g);
    // SAFETY: the caller's promise.
    unsafe {
        let v = _mm256_loadu_si256(plane.add(VECTOR * vector).cast());
        if bits == 8 {
            return v;
        }
        // Shifts of 16-bit lanes; bits that cross a byte are masked off.
        let v = if shift > to {
            _mm256_srl_epi16(v, _mm_cvtsi32_si128((shift - to) as i32))
        } else {
            _mm256_sll_epi16(v, _mm_cvtsi32_si128((to - shift) as i32))
        };
        _mm256_and_si256(v, _mm256_set1_epi8((((1usize << bits) - 1) << to) as i8))
    }
}

/// Replaces stored codes by table entries where the format has a table.
///
/// # Safety
/// None beyond the instruction set.
#[inline(always)]
unsafe fn values<F: Format>(mut codes: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: the tables have 16 bytes.
    unsafe {
        let table = match F::CODES {
            Codes::Signed | Codes::SignedOffset(_) | Codes::Offset(_) => return codes,
            Codes::SignedTable(table) => _mm_loadu_si128(table.as_ptr().cast()),
            Codes::OffsetTable(table, _) => _mm_loadu_si128(table.as_ptr().cast()),
        };
        let table = _mm256_broadcastsi128_si256(table);
        for code in &mut codes {
            *code = _mm256_shuffle_epi8(table, *code);
        }
        codes
    }
}

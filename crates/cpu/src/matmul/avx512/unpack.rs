//! 32 columns of the 16 rows of a packed weight, from the stream into registers.

use std::arch::x86_64::*;

use crate::pack::Format;
use crate::pack::GROUP;
use crate::pack::layout::*;

/// 32 columns of 16 rows.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Lane `r` of vector `g` holds the unsigned codes of row `r`, columns `4g .. 4g + 4`: [`offset`] too large.
    pub(super) codes: [__m512i; 8],
    pub(super) scales: Scales,
}

/// What the integers of 32 columns of 16 rows are weighed with. What a format does not have is zero or one, and folds
/// away.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    /// f32 scale of each row.
    pub(super) scale: __m512,
    /// f32 minimum of each row.
    pub(super) min: __m512,
    /// i32 factors of the first and of the last 16 columns.
    pub(super) factors: [__m512i; 2],
    /// Both i16 factors of the minima in each lane.
    pub(super) min_factors: __m512i,
}

/// What the unsigned codes of [`Block`] are too large by.
pub(super) const fn offset<F: Format>() -> i16 {
    match F::CODES {
        Codes::Signed | Codes::SignedTable(_) => 128,
        Codes::SignedOffset(offset) => 128 - offset,
        Codes::Offset(offset) | Codes::OffsetTable(_, offset) => offset,
    }
}

/// Scales and minima of a file block's 16 rows.
///
/// # Safety
/// `p` points to the head of a packed block, and the code is inlined into a function with AVX-512 F.
#[inline(always)]
pub(super) unsafe fn head<F: Format>(p: *const u8) -> (__m512, __m512) {
    // SAFETY: the head has 16 numbers of each kind.
    unsafe {
        match F::HEAD {
            Head::Scale => (halves(p), _mm512_setzero_ps()),
            Head::ScaleMin => (halves(p), halves(p.add(2 * GROUP))),
            Head::WideScaleMin => (_mm512_loadu_ps(p.cast()), _mm512_loadu_ps(p.add(4 * GROUP).cast())),
            Head::Exponent => (exponents(p), _mm512_setzero_ps()),
        }
    }
}

/// # Safety
/// `p` points to 16 f16.
#[inline(always)]
unsafe fn halves(p: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
}

/// `2^(e - 128)`: see the scalar `half_exponent`.
///
/// # Safety
/// `p` points to 16 bytes.
#[inline(always)]
unsafe fn exponents(p: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let e = bytes_u(p);
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
        let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
        let is_normal = _mm512_cmpgt_epi32_mask(e, _mm512_set1_epi32(1));
        _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_normal, subnormal, normal))
    }
}

/// # Safety
/// `p` points to 16 bytes.
#[inline(always)]
unsafe fn bytes_u(p: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
}

/// # Safety
/// `p` points to 16 bytes.
#[inline(always)]
unsafe fn bytes_i(p: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())) }
}

/// Unpacks the 32 columns at `p` (sub-scales, then codes) under a head.
///
/// # Safety
/// `p` points to a packed body, and the code is inlined into a function with AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn unpack<F: Format>((scale, min): (__m512, __m512), p: *const u8) -> Block {
    // SAFETY: the caller's promise.
    unsafe {
        let one = _mm512_set1_epi32(1);
        let codes = values::<F>(stored_codes::<F>(p.add(F::SUB_BYTES)));
        let mut scales = Scales { scale, min, factors: [one; 2], min_factors: one };
        match F::SUB {
            Sub::None => {}
            Sub::Scale => scales.scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(bytes_i(p))),
            Sub::ScaleMin => {
                scales.scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(bytes_u(p)));
                scales.min = _mm512_mul_ps(min, _mm512_cvtepi32_ps(bytes_u(p.add(GROUP))));
            }
            Sub::Pair => {
                let pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast()));
                let first = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
                scales.factors = [first, _mm512_srai_epi32::<16>(pairs)];
            }
            Sub::PairMin => {
                let both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast()));
                let pairs = _mm512_and_si512(both, _mm512_set1_epi16(15));
                let first = _mm512_and_si512(pairs, _mm512_set1_epi32(15));
                scales.factors = [first, _mm512_srli_epi32::<16>(pairs)];
                scales.min_factors = _mm512_srli_epi16::<4>(both);
            }
        }
        Block { codes, scales }
    }
}

/// The stored codes, gathered from the planes: vector `g` for columns `4g .. 4g + 4`.
///
/// # Safety
/// `p` points to the codes of a packed body.
#[inline(always)]
unsafe fn stored_codes<F: Format>(p: *const u8) -> [__m512i; 8] {
    // SAFETY: `place` stays within the planes.
    unsafe {
        let low = F::LOW_BITS;
        let mut codes = [_mm512_setzero_si512(); 8];
        for (g, code) in codes.iter_mut().enumerate() {
            *code = field(p.add(F::HIGH_BYTES), low, g, 0);
            if F::BITS > low {
                *code = _mm512_or_si512(*code, field(p, F::BITS - low, g, low));
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
unsafe fn field(plane: *const u8, bits: usize, g: usize, to: usize) -> __m512i {
    let (vector, shift) = place(bits, g);
    // SAFETY: the caller's promise.
    unsafe {
        let v = _mm512_loadu_si512(plane.add(VECTOR * vector).cast());
        if bits == 8 {
            return v;
        }
        // Shifts of 16-bit lanes; bits that cross a byte are masked off.
        let v = if shift > to {
            _mm512_srl_epi16(v, _mm_cvtsi32_si128((shift - to) as i32))
        } else {
            _mm512_sll_epi16(v, _mm_cvtsi32_si128((to - shift) as i32))
        };
        _mm512_and_si512(v, _mm512_set1_epi8((((1usize << bits) - 1) << to) as i8))
    }
}

/// Stored codes as unsigned ones: table entries where the format has a table, signed ones plus 128.
///
/// # Safety
/// None beyond the instruction set.
#[inline(always)]
unsafe fn values<F: Format>(codes: [__m512i; 8]) -> [__m512i; 8] {
    // SAFETY: the tables have 16 bytes.
    unsafe {
        let sign = _mm512_set1_epi8(-128);
        let table = match F::CODES {
            Codes::Offset(_) => return codes,
            Codes::Signed | Codes::SignedOffset(_) => return codes.map(|c| _mm512_xor_si512(c, sign)),
            Codes::SignedTable(table) => _mm_loadu_si128(table.as_ptr().cast()),
            Codes::OffsetTable(table, _) => _mm_loadu_si128(table.as_ptr().cast()),
        };
        let mut table = _mm512_broadcast_i32x4(table);
        if matches!(F::CODES, Codes::SignedTable(_)) {
            table = _mm512_xor_si512(table, sign);
        }
        codes.map(|c| _mm512_shuffle_epi8(table, c))
    }
}

//! The arithmetic that every kernel shares: the exponential, the order of sums, and the maximum.
//!
//! A kernel exists twice, as a scalar definition and for AVX2, and the two must agree bit for bit.
//! That is decided here. A sum of products has eight partial sums, as many as a vector register has
//! f32 lanes: element `i` is folded into lane `i % 8` with one rounding (FMA), `i` ascending, and
//! [`sum_lanes`] adds the lanes in one fixed tree. The order depends on the length of the row alone,
//! so a row's result never depends on its neighbours. Anything that knows of norms, attention or
//! models belongs elsewhere.

/// Partial sums of a reduction: the f32 lanes of a 256-bit register.
pub const LANES: usize = 8;

/// Adds the partial sums: `((l0+l4)+(l2+l6)) + ((l1+l5)+(l3+l7))`.
///
/// The tree is what halving a register gives: upper half onto lower, upper pair onto lower, and the
/// two that are left.
#[inline(always)]
pub fn sum_lanes(l: [f32; LANES]) -> f32 {
    ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]))
}

/// Constants of [`exp`].
mod exp_const {
    /// `1.5 * 2^23`: adding it leaves the nearest integer (ties to even) in the low mantissa bits.
    pub(super) const ROUND: f32 = 12_582_912.0;
    /// ln 2 as the nearest f32, and what that rounding lost.
    pub(super) const LN2_HI: f32 = std::f32::consts::LN_2;
    pub(super) const LN2_LO: f32 = -1.904_654_3e-9;
    /// Largest argument whose result is finite.
    pub(super) const MAX: f32 = 88.722_83;
    /// Smallest argument whose result is a normal number; below it the result is 0.
    pub(super) const MIN: f32 = -87.336_54;
    /// Taylor coefficients 1/2! to 1/7!, highest degree first. On |r| <= ln 2 / 2 the first omitted
    /// term is below 6e-9, a tenth of half a unit in the last place.
    pub(super) const TAYLOR: [f32; 6] =
        [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0];
}

/// `e^x` with a relative error of at most 2e-7, the same bits on every machine.
///
/// `x = n ln 2 + r` with `n` the nearest integer; `e^r` is a polynomial and `2^n` goes straight into
/// the exponent bits. Results that would be subnormal are 0, `exp(-inf)` is 0, results above
/// `f32::MAX` are infinite, and NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    use exp_const::*;
    let t = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut q = TAYLOR[0];
    for c in &TAYLOR[1..] {
        q = q.mul_add(r, *c);
    }
    let y = q.mul_add(r * r, r) + 1.0;
    // The low bits of `t` are n modulo 2^22; of these the shift keeps what the exponent field holds.
    let y = f32::from_bits(y.to_bits().wrapping_add(t.to_bits() << 23));
    let y = if x > MAX { f32::INFINITY } else { y };
    let y = if x < MIN { 0.0 } else { y };
    if x.is_nan() { x } else { y }
}

/// The definitions.
pub mod scalar {
    use super::{LANES, sum_lanes};

    /// `sum(a[i] * b[i])` in lanes.
    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for (i, (x, y)) in a.iter().zip(b).enumerate() {
            lanes[i % LANES] = x.mul_add(*y, lanes[i % LANES]);
        }
        sum_lanes(lanes)
    }

    /// `sum(x[i])` in lanes.
    pub fn sum(x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for (i, x) in x.iter().enumerate() {
            lanes[i % LANES] += x;
        }
        sum_lanes(lanes)
    }

    /// The largest number; NaN never is, and an empty or all-NaN row gives `-inf`.
    #[inline(always)]
    pub fn max(x: &[f32]) -> f32 {
        x.iter().fold(f32::NEG_INFINITY, |best, &x| if x > best { x } else { best })
    }
}

/// The same operations on registers. Loads and stores take arrays, so that kernels built from them
/// need no pointers.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use super::{LANES, exp_const, sum_lanes};
    use std::arch::x86_64::*;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn load(x: &[f32; LANES]) -> __m256 {
        // SAFETY: the array holds eight floats; the load needs no alignment.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn store(out: &mut [f32; LANES], v: __m256) {
        // SAFETY: the array holds eight floats; the store needs no alignment.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), v) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn to_array(v: __m256) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        store(&mut lanes, v);
        lanes
    }

    /// [`super::exp`] of eight numbers, operation by operation.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn exp(x: __m256) -> __m256 {
        use exp_const::*;
        let round = _mm256_set1_ps(ROUND);
        let t = _mm256_fmadd_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E), round);
        let n = _mm256_sub_ps(t, round);
        let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-LN2_HI), x);
        let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-LN2_LO), r);
        let mut q = _mm256_set1_ps(TAYLOR[0]);
        for c in &TAYLOR[1..] {
            q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(*c));
        }
        let y = _mm256_add_ps(_mm256_fmadd_ps(q, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0));
        let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
        let y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
        let above = _mm256_cmp_ps::<_CMP_GT_OQ>(x, _mm256_set1_ps(MAX));
        let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(MIN));
        let y = _mm256_blendv_ps(y, _mm256_set1_ps(f32::INFINITY), above);
        let y = _mm256_andnot_ps(below, y);
        _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x))
    }

    /// [`sum_lanes`] of four registers at once: a transpose turns the tree into vertical adds.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn sum_lanes_of_4(v: [__m256; 4]) -> __m128 {
        let half = |v: __m256| _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let [a, b, c, d] = [half(v[0]), half(v[1]), half(v[2]), half(v[3])];
        let (ab_lo, ab_hi) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let (cd_lo, cd_hi) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        let (h0, h1) = (_mm_movelh_ps(ab_lo, cd_lo), _mm_movehl_ps(cd_lo, ab_lo));
        let (h2, h3) = (_mm_movelh_ps(ab_hi, cd_hi), _mm_movehl_ps(cd_hi, ab_hi));
        _mm_add_ps(_mm_add_ps(h0, h2), _mm_add_ps(h1, h3))
    }

    /// [`sum_lanes`] of eight registers at once, in their order.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn sum_lanes_of_8(v: [__m256; 8]) -> __m256 {
        // Halves of number i below, of number i + 4 above; then pairs, then single lanes.
        let half = |a, b| {
            let (low, high) = (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            _mm256_add_ps(low, high)
        };
        let pair = |a, b| _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let ab = pair(half(v[0], v[4]), half(v[1], v[5]));
        let cd = pair(half(v[2], v[6]), half(v[3], v[7]));
        let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        let (even, odd) = (_mm256_unpacklo_pd(ab, cd), _mm256_unpackhi_pd(ab, cd));
        _mm256_add_ps(_mm256_castpd_ps(even), _mm256_castpd_ps(odd))
    }

    /// Ends a dot product: folds the elements that do not fill a register into the lanes, then adds.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn finish_dot(lanes: __m256, a_tail: &[f32], b_tail: &[f32]) -> f32 {
        let mut lanes = to_array(lanes);
        for (l, (x, y)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
            *l = x.mul_add(*y, *l);
        }
        sum_lanes(lanes)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let (a8, a_tail) = a.as_chunks::<LANES>();
        let (b8, b_tail) = b.as_chunks::<LANES>();
        let mut lanes = _mm256_setzero_ps();
        for (x, y) in a8.iter().zip(b8) {
            lanes = _mm256_fmadd_ps(load(x), load(y), lanes);
        }
        finish_dot(lanes, a_tail, b_tail)
    }

    /// `maxps` returns its second operand when one is NaN, which keeps NaN out of the maximum.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn max(x: &[f32]) -> f32 {
        let (x8, tail) = x.as_chunks::<LANES>();
        let mut best = _mm256_set1_ps(f32::NEG_INFINITY);
        for x in x8 {
            best = _mm256_max_ps(load(x), best);
        }
        super::scalar::max(&to_array(best)).max(super::scalar::max(tail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_same_bits, with_edge_cases};

    /// Relative error against f64 over a scan of the range that softmax and silu use; bound 2e-7.
    #[test]
    fn exp_is_accurate() {
        let mut worst = 0.0f64;
        let steps = 1_500_000;
        for i in 0..=steps {
            let x = -87.0 + 175.0 * (i as f32 / steps as f32);
            let want = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - want) / want).abs());
        }
        assert!(worst <= 2e-7, "worst relative error {worst:e}");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(-1e30).to_bits(), 0);
        assert_eq!(exp(exp_const::MIN.next_down()).to_bits(), 0);
        assert!(exp(exp_const::MIN) >= f32::MIN_POSITIVE);
        assert!(exp(exp_const::MAX).is_finite() && exp(exp_const::MAX) > 3.4e38);
        assert_eq!(exp(exp_const::MAX.next_up()), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan() && exp(-f32::NAN).is_nan());
    }

    /// `2^24 + 1` rounds to `2^24` and `2^24 + 3` to `2^24 + 4`, so adding in sequence or neighbours first
    /// gives 5; only the tree keeps lanes 0, 2, 4 and 6 apart from lane 1 and gives 3.
    #[test]
    fn lanes_are_added_in_the_documented_tree() {
        let big = 2f32.powi(24);
        assert_eq!(sum_lanes([big, 3.0, -big, 0.0, 1.0, 0.0, 0.0, 0.0]), 3.0);
        // Element 8 joins lane 0, where it is lost as well.
        assert_eq!(scalar::sum(&[big, 3.0, -big, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]), 3.0);
    }

    #[test]
    fn max_ignores_nan() {
        assert_eq!(scalar::max(&[f32::NAN, 1.0, f32::NAN, 3.0, 2.0]), 3.0);
        assert_eq!(scalar::max(&[f32::NAN; 11]), f32::NEG_INFINITY);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn avx2_equals_scalar() {
        if crate::Kernels::avx2().is_none() {
            return;
        }
        let mut rng = Rng::new(1);
        for n in [0, 1, 7, 8, 9, 31, 64, 100, 1000] {
            let (a, b) = (rng.floats(n, 2.0), rng.floats(n, 2.0));
            // SAFETY: `Kernels::avx2` found the instructions.
            let (dot, max) = unsafe { (avx2::dot(&a, &b), avx2::max(&a)) };
            assert_same_bits(&[dot, max], &[scalar::dot(&a, &b), scalar::max(&a)]);
        }
        let x = with_edge_cases(rng.floats(100_000, 110.0));
        for x in x.as_chunks::<LANES>().0 {
            // SAFETY: as above.
            let got = unsafe { avx2::to_array(avx2::exp(avx2::load(x))) };
            assert_same_bits(&got, &x.map(exp));
            // SAFETY: as above.
            let sums = unsafe { avx2::sum_lanes_of_4([avx2::load(x); 4]) };
            // SAFETY: as above; `__m128` is four floats.
            let sums: [f32; 4] = unsafe { std::mem::transmute(sums) };
            assert_same_bits(&sums, &[sum_lanes(*x); 4]);
            // Eight different registers, so that their order counts.
            let rotated: [[f32; LANES]; 8] =
                std::array::from_fn(|i| std::array::from_fn(|l| x[(l + i) % LANES] + i as f32));
            // SAFETY: as above.
            let sums = unsafe { avx2::to_array(avx2::sum_lanes_of_8(rotated.map(|x| avx2::load(&x)))) };
            assert_same_bits(&sums, &rotated.map(sum_lanes));
        }
    }
}

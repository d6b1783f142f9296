//! What the unit tests share: seeded numbers and a comparison of bits.

/// A small seeded generator (Knuth's 64-bit linear congruential one, upper bits).
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// Below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Uniform in `-range..range`.
    pub(crate) fn float(&mut self, range: f32) -> f32 {
        (self.next() as f32 / 2f32.powi(31) - 1.0) * range
    }

    pub(crate) fn floats(&mut self, n: usize, range: f32) -> Vec<f32> {
        (0..n).map(|_| self.float(range)).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// Puts zeros, subnormals, infinities and NaN among ordinary numbers.
pub(crate) fn with_edge_cases(mut x: Vec<f32>) -> Vec<f32> {
    let edges = [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for (i, edge) in edges.into_iter().enumerate() {
        let at = i * 5 + 2;
        if at < x.len() {
            x[at] = edge;
        }
    }
    x
}

/// Equal bits; any NaN equals any NaN, because the language leaves NaN payloads open.
#[track_caller]
pub(crate) fn assert_same_bits(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
        assert!(same, "element {i}: {g:e} ({:08x}) is not {w:e} ({:08x})", g.to_bits(), w.to_bits());
    }
}

/// |got - want| <= tolerance * max(1, |want|), element by element.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*g) - w).abs();
        assert!(error <= tolerance * w.abs().max(1.0), "element {i}: {g} is not {w} (error {error:e})");
    }
}

//! Rotary position embedding: the table of one position, and its application to one row of heads.
//!
//! Frequencies (with whatever scaling a model asks for) come in; how they are computed is the
//! model's affair. Products and sums round one by one, as in the `transformers` library, so no FMA.

use minfer_graph::RopeStyle;

use crate::Kernels;

/// Writes the table of one position: `[cos x half | sin x half]`, `half = inv_freq.len()`.
///
/// The angle is `position as f32 * inv_freq[i]` in f32; both functions are multiplied by
/// `attn_scale` (1 unless the model uses YaRN). Positions above 2^24 are not exact in f32.
///
/// # Panics
/// When `out` is not twice as long as `inv_freq`.
pub fn table(inv_freq: &[f32], attn_scale: f32, position: i32, out: &mut [f32]) {
    assert_eq!(out.len(), 2 * inv_freq.len(), "rope: the table is [cos | sin]");
    let (cos, sin) = out.split_at_mut(inv_freq.len());
    for ((cos, sin), f) in cos.iter_mut().zip(sin).zip(inv_freq) {
        let angle = position as f32 * f;
        *cos = angle.cos() * attn_scale;
        *sin = angle.sin() * attn_scale;
    }
}

impl Kernels {
    /// Rotates the first `dims` numbers of each head of a row (`[heads, head_dim]`) by a table of
    /// `dims` numbers and copies the rest.
    ///
    /// Of a pair `(a, b)` become `(a cos - b sin, b cos + a sin)`.
    ///
    /// # Panics
    /// When `dims` (the table's length) is odd or above `head_dim`, or the rows are not whole heads.
    pub fn rope(&self, style: RopeStyle, x: &[f32], head_dim: usize, table: &[f32], out: &mut [f32]) {
        assert!(table.len().is_multiple_of(2) && table.len() <= head_dim, "rope: dims");
        assert!(x.len() == out.len() && head_dim > 0 && x.len().is_multiple_of(head_dim), "rope: rows");
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (self.rope)(style, x, head_dim, table, out) }
    }
}

pub(crate) mod scalar {
    use minfer_graph::RopeStyle;

    #[inline(always)]
    pub(crate) fn rope(style: RopeStyle, x: &[f32], head_dim: usize, table: &[f32], out: &mut [f32]) {
        let dims = table.len();
        let (cos, sin) = table.split_at(dims / 2);
        for (x, out) in x.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
            let (x, x_rest) = x.split_at(dims);
            let (out, out_rest) = out.split_at_mut(dims);
            match style {
                RopeStyle::HalfSplit => half_split(x, cos, sin, out),
                RopeStyle::Interleaved => interleaved(x, cos, sin, out),
            }
            out_rest.copy_from_slice(x_rest);
        }
    }

    #[inline(always)]
    fn half_split(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
        let (a, b) = x.split_at(cos.len());
        let (out_a, out_b) = out.split_at_mut(cos.len());
        let pairs = a.iter().zip(b).zip(cos.iter().zip(sin));
        for ((oa, ob), ((a, b), (cos, sin))) in out_a.iter_mut().zip(out_b).zip(pairs) {
            *oa = a * cos - b * sin;
            *ob = b * cos + a * sin;
        }
    }

    #[inline(always)]
    fn interleaved(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
        let pairs = x.as_chunks::<2>().0.iter().zip(cos.iter().zip(sin));
        for (o, ([a, b], (cos, sin))) in out.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
            *o = [a * cos - b * sin, b * cos + a * sin];
        }
    }
}

/// The scalar source with wider instructions; pairs stand alone, so the bits are the same.
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2 {
    use minfer_graph::RopeStyle;

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn rope(style: RopeStyle, x: &[f32], head_dim: usize, table: &[f32], out: &mut [f32]) {
        super::scalar::rope(style, x, head_dim, table, out);
    }
}

#[cfg(test)]
mod tests {
    use minfer_graph::RopeStyle;

    use super::table;
    use crate::Kernels;
    use crate::testing::{Rng, assert_close, assert_same_bits};

    fn inv_freq(dims: usize) -> Vec<f32> {
        (0..dims / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / dims as f32)).collect()
    }

    /// Rotation of each pair in f64, by the f32 angle that the definition names.
    fn reference(style: RopeStyle, x: &[f32], head_dim: usize, dims: usize, position: i32) -> Vec<f64> {
        let mut out: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for head in out.chunks_mut(head_dim) {
            for (i, f) in inv_freq(dims).iter().enumerate() {
                let (a, b) = match style {
                    RopeStyle::HalfSplit => (i, i + dims / 2),
                    RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                };
                let (sin, cos) = f64::from(position as f32 * f).sin_cos();
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
            }
        }
        out
    }

    /// Against f64 with the same angle; a table entry and three roundings on |x| <= 3, bound 1e-6.
    #[test]
    fn rotates_pairs_and_copies_the_rest() {
        let mut rng = Rng::new(7);
        for (head_dim, dims) in [(2, 2), (64, 64), (80, 32), (128, 128), (10, 6)] {
            for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
                let x = rng.floats(3 * head_dim, 3.0);
                let mut entries = vec![0.0; dims];
                table(&inv_freq(dims), 1.0, 1234, &mut entries);
                let [mut got, mut want] = [vec![0.0; x.len()], vec![0.0; x.len()]];
                Kernels::detect().rope(style, &x, head_dim, &entries, &mut got);
                Kernels::scalar().rope(style, &x, head_dim, &entries, &mut want);
                assert_same_bits(&got, &want);
                assert_close(&got, &reference(style, &x, head_dim, dims, 1234), 1e-6);
                for (x, y) in x.chunks(head_dim).zip(got.chunks(head_dim)) {
                    assert_eq!(x[dims..], y[dims..]);
                }
            }
        }
    }

    #[test]
    fn the_table_is_cosines_then_sines_scaled() {
        let mut entries = [0.0; 4];
        table(&[1.0, 0.5], 2.0, 3, &mut entries);
        assert_eq!(entries, [3f32.cos() * 2.0, 1.5f32.cos() * 2.0, 3f32.sin() * 2.0, 1.5f32.sin() * 2.0]);
    }
}

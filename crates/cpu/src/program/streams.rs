//! Row steps that rearrange or weigh numbers of a row: activations, bounds, slices, residual streams.

use minfer_graph::{Op, Rope, Slice};

use super::rows::Row;
use crate::Kernels;

impl Row<'_> {
    /// # Safety
    /// As `Row::compute`, for one of these ops.
    pub(super) unsafe fn rearrange(&self) {
        let k = self.run.kernels;
        // SAFETY: as in `compute`.
        unsafe {
            let (x, out): (&[f32], &mut [f32]) = (self.f32(0), self.out(0));
            match &self.step.op {
                Op::Act(a) => k.act(*a, x, out),
                Op::Clamp(c) => k.clamp(*c, x, out),
                Op::ScaleVec => k.scale_groups(x, self.vector(), out),
                Op::Slice(s) => slice(s, x, out),
                Op::Repeat(_) => out.chunks_exact_mut(x.len()).for_each(|out| out.copy_from_slice(x)),
                Op::StreamSum(s) => k.stream_sum(x, s.scale, out),
                Op::RoundTrip(r) => k.round_trip(r, x, out),
                Op::RopeTail(r) => rope_tail(k, r, x, self.f32(1), out),
                Op::StreamDot(s) => k.stream_dot(x, self.f32(1), s.scale, out),
                Op::StreamMul(_) => k.stream_mul(x, self.f32(1), out),
                Op::StreamAdd(_) => k.stream_add(x, self.f32(1), self.f32(2), out),
                Op::StreamWeightedSum(_) => k.stream_weighted_sum(x, self.f32(1), out),
                Op::StreamMix(_) => k.stream_mix(x, self.f32(1), self.f32(2), self.f32(3), out),
                Op::HyperMix(h) => k.hyper_mix(h, x, self.vector(), [out, self.out(1), self.out(2)]),
                other => self.run.fail(format!("{} does not rearrange a row", other.name())),
            }
        }
    }
}

/// Rotates the last `table.len()` numbers of each head.
fn rope_tail(k: &Kernels, r: &Rope, x: &[f32], table: &[f32], out: &mut [f32]) {
    let plain = r.head_dim - table.len();
    for (x, out) in x.chunks_exact(r.head_dim).zip(out.chunks_exact_mut(r.head_dim)) {
        out[..plain].copy_from_slice(&x[..plain]);
        k.rope(r.style, &x[plain..], table.len(), table, &mut out[plain..]);
    }
}

fn slice(s: &Slice, x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks_exact(s.group).zip(out.chunks_exact_mut(s.len)) {
        out.copy_from_slice(&x[s.from..][..s.len]);
    }
}

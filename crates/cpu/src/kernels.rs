//! The table of kernels of one instruction set.
//!
//! Each module of this crate defines its operations as plain Rust (`scalar`), repeats them for other
//! instruction sets (`avx2`), and puts a checked method on [`Kernels`]. Which of them runs is decided
//! once, when the table is made. Every table gives the same bits.
//!
//! Matrix products select their kernels themselves (`matmul`), because they depend on the weight format.

use half::f16;
use minfer_graph::{Act, RopeStyle, RoundTrip};

use crate::isa::Isa;
use crate::{
    attention, compress, delta_rule, elementwise, index, math, norm, rope, round_trip, router, streams,
};

/// `x, out`.
type Unary = unsafe fn(&[f32], &mut [f32]);
/// `a, b, out`.
type Binary = unsafe fn(&[f32], &[f32], &mut [f32]);

/// The row kernels of one instruction set, as function pointers.
///
/// Invariant, and what makes the calls sound: a table exists only for an instruction set that this
/// machine can run.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    isa: Isa,
    pub(crate) max: unsafe fn(&[f32]) -> f32,
    pub(crate) dot: unsafe fn(&[f32], &[f32]) -> f32,
    pub(crate) add: Binary,
    pub(crate) mul: Binary,
    pub(crate) silu: Unary,
    pub(crate) swiglu: Binary,
    pub(crate) fold: Binary,
    pub(crate) act: unsafe fn(Act, &[f32], &mut [f32]),
    pub(crate) stream_add: unsafe fn(&[f32], f32, &[f32], &mut [f32]),
    pub(crate) stream_fold: unsafe fn(f32, &[f32], &mut [f32]),
    pub(crate) hyper_mix: streams::mixer::MixerFn,
    pub(crate) relu_fold: unsafe fn(f32, &[f32], &mut [f32]),
    pub(crate) gate_max: Binary,
    pub(crate) gate_fold: compress::FoldFn,
    pub(crate) delta_step: delta_rule::StepFn,
    pub(crate) rms_norm: unsafe fn(&[f32], usize, &[f32], f32, &mut [f32]),
    pub(crate) rope: unsafe fn(RopeStyle, &[f32], usize, &[f32], &mut [f32]),
    pub(crate) round_trip: unsafe fn(&RoundTrip, &[f32], &mut [f32]),
    pub(crate) softmax: Unary,
    pub(crate) combine: Binary,
    pub(crate) narrow: unsafe fn(&[f32], &mut [f16]),
    pub(crate) narrow_q8: unsafe fn(&[f32], &mut [u8]),
    pub(crate) widen: attention::WidenFn,
    pub(crate) score: attention::ScoreFn,
    pub(crate) exp_and_sum: unsafe fn(&mut [f32], f32) -> f32,
    pub(crate) accumulate: attention::AccumulateFn,
    pub(crate) merge: unsafe fn(&[f32], f32, f32, &mut [f32]),
}

impl Kernels {
    /// The definitions; they run everywhere.
    pub const fn scalar() -> Kernels {
        Kernels {
            isa: Isa::Scalar,
            max: math::scalar::max,
            dot: math::scalar::dot,
            add: elementwise::scalar::add,
            mul: elementwise::scalar::mul,
            silu: elementwise::scalar::silu,
            swiglu: elementwise::scalar::swiglu,
            fold: elementwise::scalar::fold,
            act: elementwise::scalar::act,
            stream_add: streams::scalar::add,
            stream_fold: streams::scalar::fold,
            hyper_mix: streams::mixer::scalar::hyper_mix,
            relu_fold: index::scalar::relu_fold,
            gate_max: compress::scalar::gate_max,
            gate_fold: compress::scalar::gate_fold,
            delta_step: delta_rule::scalar::step,
            rms_norm: norm::scalar::rms_norm,
            rope: rope::scalar::rope,
            round_trip: round_trip::scalar::round_trip,
            softmax: router::scalar::softmax,
            combine: router::scalar::combine,
            narrow: attention::scalar::narrow,
            narrow_q8: attention::scalar::narrow_q8,
            widen: attention::scalar::widen,
            score: attention::scalar::score,
            exp_and_sum: attention::scalar::exp_and_sum,
            accumulate: attention::scalar::accumulate,
            merge: attention::scalar::merge,
        }
    }

    /// The AVX2 kernels; `None` on a machine without AVX2, FMA and F16C.
    pub fn avx2() -> Option<Kernels> {
        #[cfg(target_arch = "x86_64")]
        if Isa::Avx2.is_available() {
            return Some(Kernels {
                isa: Isa::Avx2,
                max: math::avx2::max,
                dot: math::avx2::dot,
                add: elementwise::avx2::add,
                mul: elementwise::avx2::mul,
                silu: elementwise::avx2::silu,
                swiglu: elementwise::avx2::swiglu,
                fold: elementwise::avx2::fold,
                act: elementwise::avx2::act,
                stream_add: streams::avx2::add,
                stream_fold: streams::avx2::fold,
                hyper_mix: streams::mixer::avx2::hyper_mix,
                relu_fold: index::avx2::relu_fold,
                gate_max: compress::avx2::gate_max,
                gate_fold: compress::avx2::gate_fold,
                delta_step: delta_rule::avx2::step,
                rms_norm: norm::avx2::rms_norm,
                rope: rope::avx2::rope,
                round_trip: round_trip::avx2::round_trip,
                softmax: router::avx2::softmax,
                combine: router::avx2::combine,
                narrow: attention::avx2::narrow,
                narrow_q8: attention::avx2::narrow_q8,
                widen: attention::avx2::widen,
                score: attention::avx2::score,
                exp_and_sum: attention::avx2::exp_and_sum,
                accumulate: attention::avx2::accumulate,
                merge: attention::avx2::merge,
            });
        }
        None
    }

    /// The AVX-512 kernels; `None` on a machine without AVX-512 F, BW, DQ, VL and VNNI.
    pub fn avx512() -> Option<Kernels> {
        let kernels = Kernels::avx2()?;
        Isa::Avx512.is_available().then_some(Kernels { isa: Isa::Avx512, ..kernels })
    }

    /// The kernels of this instruction set; `None` where the machine lacks it.
    pub fn for_isa(isa: Isa) -> Option<Kernels> {
        match isa {
            Isa::Scalar => Some(Kernels::scalar()),
            Isa::Avx2 => Kernels::avx2(),
            Isa::Avx512 => Kernels::avx512(),
            // Tiles serve matrix products only.
            Isa::Amx => {
                let kernels = Kernels::avx512()?;
                Isa::Amx.is_available().then_some(Kernels { isa: Isa::Amx, ..kernels })
            }
        }
    }

    /// The fastest kernels of this machine.
    pub fn detect() -> Kernels {
        Kernels::for_isa(Isa::detect()).unwrap_or(Kernels::scalar())
    }

    /// The instruction set that the kernels use.
    pub const fn isa(&self) -> Isa {
        self.isa
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_exist_exactly_where_the_machine_can_run_them() {
        for isa in Isa::ALL {
            assert_eq!(Kernels::for_isa(isa).map(|k| k.isa()), isa.is_available().then_some(isa));
        }
        assert_eq!(Kernels::detect().isa(), Isa::detect());
    }
}

//! Plain floating-point numbers.

use half::{bf16 as Bf16, f16 as F16};

pub(super) fn f32(bytes: &[u8], out: &mut [f32]) {
    for (stored, x) in bytes.as_chunks().0.iter().zip(out) {
        *x = f32::from_le_bytes(*stored);
    }
}

pub(super) fn f16(bytes: &[u8], out: &mut [f32]) {
    for (stored, x) in bytes.as_chunks().0.iter().zip(out) {
        *x = F16::from_le_bytes(*stored).to_f32();
    }
}

pub(super) fn bf16(bytes: &[u8], out: &mut [f32]) {
    for (stored, x) in bytes.as_chunks().0.iter().zip(out) {
        *x = Bf16::from_le_bytes(*stored).to_f32();
    }
}

//! Which instruction set the kernels use. Decided once per device from the machine, passed down as a value.
//!
//! A kernel family offers `select(isa)`, which returns a function pointer; nothing here computes.

/// An instruction set that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust: the readable definition of every kernel.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C. Kernels selected for it may only run where [`Isa::is_available`] holds.
    Avx2,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 2] = [Isa::Scalar, Isa::Avx2];

    /// The fastest instruction set of this machine.
    pub fn detect() -> Isa {
        if Isa::Avx2.is_available() { Isa::Avx2 } else { Isa::Scalar }
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 => false,
        }
    }

    /// The lower-case name that reports print.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
        }
    }
}

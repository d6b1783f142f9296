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
    /// The same with AVX-512 F, BW, DQ, VL and VNNI: kernels of its own where they pay, those of AVX2 elsewhere.
    Avx512,
    /// AVX-512 with AMX tiles of int8 (Intel, from Sapphire Rapids on) for products of many rows. Linux only: a process
    /// asks the system for the use of tiles.
    Amx,
}

impl Isa {
    /// Every instruction set, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The fastest instruction set of this machine.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
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
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => {
                Isa::Avx512.is_available() && amx::processor_has_tiles() && amx::system_allows_tiles()
            }
            #[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
            Isa::Amx => false,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => false,
        }
    }

    /// The lower-case name that reports print.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::x86_64::__cpuid_count;

    /// AMX-TILE and AMX-INT8 of CPUID leaf 7 (Intel SDM, volume 2, CPUID).
    pub(super) fn processor_has_tiles() -> bool {
        let needed = 1 << 24 | 1 << 25;
        __cpuid_count(7, 0).edx & needed == needed
    }

    /// Asks Linux for the tile registers, whose state is large, for this process and its threads
    /// (`Documentation/arch/x86/xstate.rst`). It may be asked any number of times.
    pub(super) fn system_allows_tiles() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: the call only changes what this process may use; unknown requests are answered with an error.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }
}

//! What the machine could do at best: reads of memory, and multiplications of what is in registers.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use minfer_cpu::Isa;
use minfer_cpu::pool::Pool;

/// Operations (a product and a sum are two) per second of all workers together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peak {
    /// Of int8 into i32.
    pub(crate) int8: f64,
    /// Of f32.
    pub(crate) float: f64,
}

/// Measures both peaks of an instruction set: the best of five runs.
pub(crate) fn peak(isa: Isa, pool: &Pool) -> Result<Peak, Box<dyn Error>> {
    const TIMES: usize = 1_000_000;
    let (int8, float) = loops(isa);
    let best = |(run, operations): Loop| {
        let mut best = 0f64;
        for _ in 0..5 {
            let start = Instant::now();
            pool.run(&|_| run(TIMES))?;
            let all = operations * TIMES as f64 * pool.threads() as f64;
            best = best.max(all / start.elapsed().as_secs_f64());
        }
        Ok::<f64, Box<dyn Error>>(best)
    };
    Ok(Peak { int8: best(int8)?, float: best(float)? })
}

/// Runs so many turns of a loop, and the operations of one turn.
type Loop = (fn(usize), f64);

/// Loops of int8 and f32 arithmetic.
fn loops(isa: Isa) -> (Loop, Loop) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => ((x86::maddubs, 12.0 * 64.0), (x86::fma256, 12.0 * 16.0)),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => ((x86::dpbusd, 12.0 * 128.0), (x86::fma512, 12.0 * 32.0)),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => ((x86::tiles, 4.0 * 2.0 * 16.0 * 16.0 * 64.0), (x86::fma512, 12.0 * 32.0)),
        _ => ((scalar, 2.0), (scalar, 2.0)),
    }
}

fn scalar(times: usize) {
    let mut sum = 0f32;
    for _ in 0..times {
        sum = black_box(1.5f32).mul_add(black_box(0.5), sum);
    }
    black_box(sum);
}

/// Twelve independent chains each, enough to hide latencies. Only called where [`Isa::is_available`] holds.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    macro_rules! peak_loop {
        ($name:ident, $features:literal, $zero:ident, |$acc:ident, $a:ident| $step:expr, $one:expr) => {
            pub(super) fn $name(times: usize) {
                #[target_feature(enable = $features)]
                fn run(times: usize) {
                    let mut acc = [$zero(); 12];
                    let $a = black_box($one);
                    for _ in 0..times {
                        for $acc in &mut acc {
                            *$acc = $step;
                        }
                    }
                    black_box(acc);
                }
                // SAFETY: called only where the instruction set is available.
                unsafe { run(times) }
            }
        };
    }

    peak_loop!(
        fma256,
        "avx2,fma",
        _mm256_setzero_ps,
        |acc, a| _mm256_fmadd_ps(a, a, *acc),
        _mm256_set1_ps(1.0)
    );
    peak_loop!(
        fma512,
        "avx512f",
        _mm512_setzero_ps,
        |acc, a| _mm512_fmadd_ps(a, a, *acc),
        _mm512_set1_ps(1.0)
    );
    peak_loop!(
        dpbusd,
        "avx512f,avx512vnni",
        _mm512_setzero_si512,
        |acc, a| _mm512_dpbusd_epi32(*acc, a, a),
        _mm512_set1_epi8(1)
    );
    peak_loop!(
        maddubs,
        "avx2",
        _mm256_setzero_si256,
        |acc, a| {
            let pairs = _mm256_maddubs_epi16(_mm256_xor_si256(a, *acc), a);
            _mm256_add_epi32(*acc, _mm256_madd_epi16(pairs, a))
        },
        _mm256_set1_epi8(1)
    );

    /// Four sums of 16 x 16, 64 columns at a time.
    pub(super) fn tiles(times: usize) {
        #[repr(C, align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..6 {
            config.0[16 + 2 * tile] = 64;
            config.0[48 + tile] = 16;
        }
        // SAFETY: called only where AMX is available; the configuration is valid, and nobody else uses tiles.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly));
            asm!("tilezero tmm4", "tilezero tmm5", options(nostack, nomem));
            for _ in 0..times {
                asm!(
                    "tdpbusd tmm0, tmm4, tmm5",
                    "tdpbusd tmm1, tmm4, tmm5",
                    "tdpbusd tmm2, tmm4, tmm5",
                    "tdpbusd tmm3, tmm4, tmm5",
                    options(nostack, nomem)
                );
            }
            asm!("tilerelease", options(nostack, nomem));
        }
    }
}

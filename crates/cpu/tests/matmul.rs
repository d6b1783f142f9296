//! The matrix kernels through their public face: packed weights, quantised rows, every format.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use minfer_cpu::Isa;
use minfer_cpu::matmul::{Job, RowPair, Rows, select, x_row_bytes};
use minfer_cpu::pack::{GROUP, PackError, PackedMatrix, pack_into};
use minfer_cpu::quantize::{self, Q8Row};
use minfer_format::{BlockType, decode_row, synth};

/// Activation rows as a kernel for `ty` reads them.
struct Activations {
    /// Aligned to 4.
    words: Vec<u32>,
    stride: usize,
}

impl Activations {
    fn new(ty: BlockType, k: usize, rows: &[Vec<f32>]) -> Activations {
        let stride = x_row_bytes(ty, k);
        let mut words = vec![0u32; stride / 4 * rows.len()];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for (row, out) in rows.iter().zip(bytes.chunks_exact_mut(stride)) {
            if ty.is_quantized() {
                quantize::row(row, out);
            } else {
                out.copy_from_slice(bytemuck::cast_slice(row));
            }
        }
        Activations { words, stride }
    }

    /// The numbers that row `i` stands for.
    fn values(&self, ty: BlockType, k: usize, i: usize) -> Vec<f64> {
        let bytes = &bytemuck::cast_slice::<u32, u8>(&self.words)[i * self.stride..][..self.stride];
        if ty.is_quantized() {
            let row = Q8Row::new(bytes, k).unwrap();
            (0..k).map(|c| f64::from(row.scales[c / 32]) * f64::from(row.codes[c])).collect()
        } else {
            bytemuck::cast_slice::<u8, f32>(bytes).iter().map(|&v| f64::from(v)).collect()
        }
    }
}

fn random_rows(seed: u64, count: usize, k: usize) -> Vec<Vec<f32>> {
    let mut bytes = vec![0u8; 4 * k * count];
    synth::fill_random(BlockType::F32, seed, 1.0, &mut bytes);
    let value = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
    bytes.chunks_exact(4 * k).map(|row| row.chunks_exact(4).map(value).collect()).collect()
}

fn random_weight(ty: BlockType, seed: u64, n: usize, k: usize) -> Vec<u8> {
    let mut raw = vec![0u8; n * ty.row_bytes(k).unwrap()];
    synth::fill_random(ty, seed, 0.05, &mut raw);
    raw
}

/// Bytes without any structure: scales may be infinite, NaN or subnormal.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

const UNTOUCHED: f32 = -123456.0;

/// Runs all groups in ranges of `step` groups; gives `y_rows` rows of `n`.
fn product(w: &PackedMatrix, isa: Isa, x: &Activations, rows: Rows, y_rows: usize, step: usize) -> Vec<f32> {
    let mut y = vec![UNTOUCHED; y_rows * w.n()];
    let job = Job {
        k: w.k(),
        n: w.n(),
        weights: w.bytes().as_ptr(),
        x: x.words.as_ptr().cast(),
        x_stride: x.stride,
        y: y.as_mut_ptr(),
        y_stride: 4 * w.n(),
        rows,
    };
    for start in (0..w.groups()).step_by(step) {
        // SAFETY: the sizes above are those of the weight, and the instruction set is available.
        unsafe { select(w.ty(), isa)(&job, start..w.groups().min(start + step)) };
    }
    y
}

/// Bits, with every NaN as one: x86 gives NaNs of either sign.
fn bits(y: &[f32]) -> Vec<u32> {
    y.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// A row length of three file blocks, or one that is not a multiple of anything.
fn some_k(ty: BlockType) -> usize {
    if ty.block_len() > 1 { 3 * ty.block_len() } else { 67 }
}

/// Reference: the scalar kernel. Tolerance: none, bits are equal.
#[test]
fn instruction_sets_agree_bit_for_bit() {
    for ty in BlockType::all() {
        let k = some_k(ty);
        for (case, n) in [1, 8, 19, 32].into_iter().enumerate() {
            let raw = random_weight(ty, case as u64 + 1, n, k);
            let hostile = noise(case as u64 + 99, raw.len());
            for (raw, finite) in [(raw, true), (hostile, false)] {
                let w = PackedMatrix::pack(ty, n, k, &raw).unwrap();
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 9, 33] {
                    let x = Activations::new(ty, k, &random_rows(rows as u64, rows, k));
                    let scalar = product(&w, Isa::Scalar, &x, Rows::All(rows), rows, 100);
                    assert!(!finite || scalar.iter().all(|v| v.is_finite() && *v != UNTOUCHED));
                    for isa in isas() {
                        let y = product(&w, isa, &x, Rows::All(rows), rows, 100);
                        assert_eq!(bits(&y), bits(&scalar), "{ty} {isa:?} n {n} rows {rows} finite {finite}");
                    }
                }
            }
        }
    }
}

/// Reference: f64 product of the decoded weights with the numbers that the activations stand for. Tolerance: one
/// f32 rounding per operation of an output, relative to the sum of magnitudes (minima add a second term
/// to each block, hence the factor for cancellation).
#[test]
fn products_are_right() {
    for ty in BlockType::all() {
        let (n, k, rows) = (21, if ty.block_len() > 1 { 2048 } else { 1023 }, 3);
        let raw = random_weight(ty, 7, n, k);
        let w = PackedMatrix::pack(ty, n, k, &raw).unwrap();
        let x = Activations::new(ty, k, &random_rows(3, rows, k));
        let mut decoded = vec![0f32; n * k];
        decode_row(ty, &raw, &mut decoded).unwrap();
        let operations = if ty.is_quantized() { k as f64 / 32.0 * 4.0 } else { k as f64 / 4.0 };
        let tolerance = operations * f64::from(f32::EPSILON);
        for isa in isas() {
            let y = product(&w, isa, &x, Rows::All(rows), rows, 2);
            for (i, y) in y.iter().enumerate() {
                let (row, o) = (i / n, i % n);
                let terms = decoded[o * k..][..k].iter().zip(x.values(ty, k, row));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), (w, x)| {
                    let term = f64::from(*w) * x;
                    (sum + term, size + term.abs())
                });
                assert!(
                    (f64::from(*y) - sum).abs() <= tolerance * size,
                    "{ty} {isa:?}: {y} for {sum} of {size}"
                );
            }
        }
    }
}

/// Reference: the same rows one at a time, in one range. Tolerance: none, bits are equal.
#[test]
fn a_row_does_not_depend_on_its_company() {
    for ty in BlockType::all() {
        let (n, k, count) = (43, some_k(ty), 300);
        let w = PackedMatrix::pack(ty, n, k, &random_weight(ty, 5, n, k)).unwrap();
        let rows = random_rows(11, count, k);
        let x = Activations::new(ty, k, &rows);
        for isa in isas().filter(|&isa| isa != Isa::Scalar) {
            let together = product(&w, isa, &x, Rows::All(count), count, 2);
            for (i, row) in rows.iter().enumerate() {
                let alone = Activations::new(ty, k, std::slice::from_ref(row));
                let y = product(&w, isa, &alone, Rows::All(1), 1, 100);
                assert_eq!(bits(&y), bits(&together[i * n..][..n]), "{ty} {isa:?} row {i}");
            }
        }
    }
}

/// Row tiles (activations of about 256 KiB) do not change anything either.
#[test]
fn long_rows_are_tiled() {
    let (ty, n, k, count) = (BlockType::Q4_0, 9, 65536, 9);
    let w = PackedMatrix::pack(ty, n, k, &random_weight(ty, 5, n, k)).unwrap();
    let x = Activations::new(ty, k, &random_rows(11, count, k));
    let scalar = product(&w, Isa::Scalar, &x, Rows::All(count), count, 100);
    for isa in isas() {
        assert_eq!(bits(&product(&w, isa, &x, Rows::All(count), count, 100)), bits(&scalar));
    }
}

#[test]
fn rows_are_gathered_and_scattered() {
    let pairs = [(4, 1), (0, 6), (4, 0), (2, 3), (1, 7)].map(|(x, y)| RowPair { x, y });
    for ty in BlockType::all() {
        let (n, k) = (19, some_k(ty));
        let w = PackedMatrix::pack(ty, n, k, &random_weight(ty, 5, n, k)).unwrap();
        let x = Activations::new(ty, k, &random_rows(11, 5, k));
        for isa in isas() {
            let all = product(&w, isa, &x, Rows::All(5), 5, 100);
            let y = product(&w, isa, &x, Rows::Pairs(&pairs), 9, 1);
            for (i, row) in y.chunks_exact(n).enumerate() {
                match pairs.iter().find(|p| p.y as usize == i) {
                    Some(p) => assert_eq!(row, &all[p.x as usize * n..][..n], "{ty} {isa:?}"),
                    None => assert!(row.iter().all(|&v| v == UNTOUCHED)),
                }
            }
            let nothing = product(&w, isa, &x, Rows::Pairs(&[]), 1, 100);
            assert!(nothing.iter().all(|&v| v == UNTOUCHED));
        }
    }
}

/// Where a file block keeps its f16 scale and minimum.
fn set_unit_scales(ty: BlockType, block: &mut [u8]) {
    let places: &[usize] = match ty {
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::IQ4_NL | BlockType::IQ4_XS => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        BlockType::MXFP4 => &[],
        BlockType::AFFINE4 | BlockType::AFFINE8 => {
            block[..4].copy_from_slice(&1f32.to_le_bytes());
            block[4..8].copy_from_slice(&1f32.to_le_bytes());
            &[]
        }
        _ => panic!("{ty} has no scales"),
    };
    for &at in places {
        block[at..at + 2].copy_from_slice(&0x3c00u16.to_le_bytes());
    }
    if ty == BlockType::MXFP4 {
        block[0] = 128; // codes are doubled, so this is 2^0 of a code
    }
}

/// A quantised row of unit scales from its codes.
fn unit_row(codes: &[i8]) -> Activations {
    let stride = x_row_bytes(BlockType::Q8_0, codes.len());
    let mut words = vec![0u32; stride / 4];
    let (head, rest) = bytemuck::cast_slice_mut::<u32, u8>(&mut words).split_at_mut(codes.len());
    let (scales, rest) = rest.split_at_mut(codes.len() / 8);
    let (sums, scaled) = rest.split_at_mut(codes.len() / 8);
    head.copy_from_slice(bytemuck::cast_slice(codes));
    bytemuck::cast_slice_mut::<u8, f32>(scales).fill(1.0);
    for (sum, codes) in bytemuck::cast_slice_mut::<u8, i16>(sums).iter_mut().zip(codes.chunks_exact(16)) {
        *sum = codes.iter().map(|&c| i16::from(c)).sum();
    }
    for (sum, codes) in bytemuck::cast_slice_mut::<u8, f32>(scaled).iter_mut().zip(codes.chunks_exact(32)) {
        *sum = codes.iter().map(|&c| f32::from(c)).sum();
    }
    Activations { words, stride }
}

/// Every stored byte at its extremes (and all 256 values) against every sign pattern of the largest activations.
/// Reference: i64 arithmetic on the decoded integers. Tolerance: none: with unit scales and one block of 32
/// activations, every step of the definition is exact in f32.
#[test]
fn integers_never_saturate() {
    let patterns: [fn(usize) -> i8; 5] =
        [|_| 127, |_| -127, |i| if i % 2 == 0 { 127 } else { -127 }, |i| (i * 37 % 255) as i8, |_| 0];
    for ty in BlockType::all().filter(|ty| ty.is_quantized()) {
        let (k, bytes) = (ty.block_len(), ty.block_bytes());
        let fills = (0..=255u8).map(|b| vec![b; bytes]).chain((0..64).map(|seed| noise(seed, bytes)));
        let mut raw: Vec<u8> = fills.flatten().collect();
        raw.chunks_exact_mut(bytes).for_each(|block| set_unit_scales(ty, block));
        let n = raw.len() / bytes;
        let mut decoded = vec![0f32; n * k];
        decode_row(ty, &raw, &mut decoded).unwrap();
        let w = PackedMatrix::pack(ty, n, k, &raw).unwrap();
        for (block, pattern) in (0..k / 32).flat_map(|b| patterns.iter().map(move |p| (b, p))) {
            let mut codes = vec![0i8; k];
            codes[32 * block..][..32].iter_mut().enumerate().for_each(|(i, c)| *c = pattern(i));
            let x = unit_row(&codes);
            for isa in isas() {
                let y = product(&w, isa, &x, Rows::All(1), 1, 100);
                for (o, y) in y.iter().enumerate() {
                    let terms = decoded[o * k..][..k].iter().zip(&codes);
                    let exact: i64 = terms.map(|(&w, &c)| w as i64 * i64::from(c)).sum();
                    assert_eq!(*y as i64, exact, "{ty} {isa:?} weight row {o}, block {block}");
                }
            }
        }
    }
}

/// All f16 and all MX exponents as scales, infinities, NaNs and subnormals included. Reference: `decode_row`.
/// Tolerance: none: one activation of 1 picks one number of each row.
#[test]
fn every_scale_is_read_exactly() {
    for (ty, scale_bytes) in [(BlockType::Q8_0, 2), (BlockType::MXFP4, 1)] {
        let (n, bytes) = (1usize << (8 * scale_bytes), ty.block_bytes());
        let mut raw = vec![0u8; n * bytes];
        for (scale, block) in raw.chunks_exact_mut(bytes).enumerate() {
            block[scale_bytes..].fill(0x31);
            block[..scale_bytes].copy_from_slice(&scale.to_le_bytes()[..scale_bytes]);
        }
        let mut decoded = vec![0f32; 32 * n];
        decode_row(ty, &raw, &mut decoded).unwrap();
        let w = PackedMatrix::pack(ty, n, 32, &raw).unwrap();
        let mut codes = [0i8; 32];
        codes[3] = 1;
        // The sum starts at +0, which turns -0 into +0.
        let picked: Vec<f32> = decoded.chunks_exact(32).map(|row| row[3] + 0.0).collect();
        for isa in isas() {
            let y = product(&w, isa, &unit_row(&codes), Rows::All(1), 1, 1 << 20);
            assert!(bits(&y) == bits(&picked), "{ty} {isa:?}");
        }
    }
}

/// Every E4M3 float but its NaNs, under scales at the ends of f32's range. Reference: `decode_row`. Tolerance: none: one
/// activation of 1 picks one number of each row.
#[test]
fn every_float8_is_read_exactly() {
    let (ty, scales) = (BlockType::F8_E4M3, [1.0f32, -0.3, f32::MIN_POSITIVE, 1e-42, 2f32.powi(119), 0.0]);
    let bytes = (0..=255u8).filter(|b| b & 0x7f != 0x7f);
    let block = |scale: f32, byte| [&scale.to_le_bytes()[..], &[byte; 32]].concat();
    let raw: Vec<u8> = bytes.flat_map(|b| scales.map(|s| block(s, b))).flatten().collect();
    let n = raw.len() / ty.block_bytes();
    let mut decoded = vec![0f32; 32 * n];
    decode_row(ty, &raw, &mut decoded).unwrap();
    let w = PackedMatrix::pack(ty, n, 32, &raw).unwrap();
    let mut one = vec![0f32; 32];
    one[5] = 1.0;
    let picked: Vec<f32> = decoded.chunks_exact(32).map(|row| row[5] + 0.0).collect();
    assert!(picked.iter().filter(|x| x.is_subnormal()).count() > 100);
    for isa in isas() {
        let x = Activations::new(ty, 32, std::slice::from_ref(&one));
        let y = product(&w, isa, &x, Rows::All(1), 1, 1 << 20);
        assert!(bits(&y) == bits(&picked), "{isa:?}");
    }
}

/// Reference: the bytes of files. K formats may grow by 4 %, others not at all.
#[test]
fn packed_sizes() {
    for ty in BlockType::all() {
        let (n, k) = (16, 512);
        let (file, packed) = (n * ty.row_bytes(k).unwrap(), PackedMatrix::packed_bytes(ty, n, k).unwrap());
        let limit = if ty.block_len() == 256 { file + file / 25 } else { file };
        assert!(packed >= file && packed <= limit, "{ty}: {packed} for {file}");
        assert_eq!(PackedMatrix::packed_bytes(ty, n - 7, k), PackedMatrix::packed_bytes(ty, n, k));
        assert_eq!(PackedMatrix::packed_bytes(ty, usize::MAX, k), None);
        assert_eq!(PackedMatrix::packed_bytes(ty, 0, k), Some(0));
    }
    assert_eq!(PackedMatrix::packed_bytes(BlockType::Q4_K, 8, 128), None);
}

#[test]
fn packing_in_parts_is_packing() {
    for ty in BlockType::all() {
        let (n, k) = (75, some_k(ty));
        let raw = random_weight(ty, 2, n, k);
        let whole = PackedMatrix::pack(ty, n, k, &raw).unwrap();
        let mut parts = PackedMatrix::zeroed(ty, n, k).unwrap();
        let group = parts.bytes().len() / parts.groups();
        for (start, end) in [(3, 5), (0, 1), (1, 3)] {
            pack_into(ty, n, k, &raw, start..end, &mut parts.bytes_mut()[start * group..end * group])
                .unwrap();
        }
        assert_eq!(whole.bytes(), parts.bytes(), "{ty}");
        assert!(whole.bytes().as_ptr().addr().is_multiple_of(64));
    }
}

#[test]
fn bad_shapes_are_refused() {
    let ty = BlockType::Q4_0;
    let mut out = [0u8; 18 * GROUP];
    let refused = |r: Result<(), PackError>| r.unwrap_err().to_string();
    assert!(refused(pack_into(ty, 1, 33, &[0; 18], 0..1, &mut out)).contains("blocks of 32"));
    assert!(refused(pack_into(ty, usize::MAX, 32, &[0; 18], 0..1, &mut out)).contains("cannot be packed"));
    assert!(refused(pack_into(ty, 1, 32, &[0; 17], 0..1, &mut out)).contains("17 bytes of file data"));
    assert!(refused(pack_into(ty, 1, 32, &[0; 18], 0..2, &mut out)).contains("outside"));
    assert!(refused(pack_into(ty, 1, 32, &[0; 18], 0..1, &mut out[1..])).contains("packed data"));
    assert!(pack_into(ty, 1, 32, &[0; 18], 0..1, &mut out).is_ok());
    let huge = PackedMatrix::zeroed(ty, 1 << 50, 1 << 9).unwrap_err();
    assert!(matches!(huge, PackError::Memory { .. }), "{huge}");
}

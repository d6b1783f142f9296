//! Random weights in every stored format, for benchmarks of a shape and for tests.
//!
//! In: a type, a seed, a standard deviation. Out: valid blocks whose decoded numbers are finite, have a
//! mean near zero and roughly that deviation. The same arguments give the same bytes on every machine and
//! however the work is divided: chunk `i` of [`chunk_bytes`] depends on the seed and `i` only.

use half::{bf16, f16};

use crate::block::BlockType;
use crate::decode::decode_row;

/// Deviation of a uniform byte: `sqrt((256² - 1) / 12)`.
const BYTE_STD: f32 = 73.9;
/// Scales vary between blocks by these factors. Their squares have a mean of 1; both signs occur equally,
/// because the quants of most formats lean to one side.
const SPREAD: [f32; 4] = [0.7, -0.7, 1.2288, -1.2288];

/// Bytes of the pieces that are random on their own: the whole blocks in 64 KiB.
pub fn chunk_bytes(ty: BlockType) -> usize {
    (64 << 10) / ty.block_bytes() * ty.block_bytes()
}

/// Fills `out` (whole blocks; a rest smaller than a block is left alone) with a tensor of its own.
pub fn fill_random(ty: BlockType, seed: u64, std: f32, out: &mut [u8]) {
    let filler = Filler::new(ty, std);
    for (index, chunk) in out.chunks_mut(chunk_bytes(ty)).enumerate() {
        filler.fill(seed, index, chunk);
    }
}

/// Fills chunk number `index` of a tensor: [`fill_random`] in pieces, for several threads.
pub fn fill_chunk(ty: BlockType, seed: u64, std: f32, index: usize, chunk: &mut [u8]) {
    Filler::new(ty, std).fill(seed, index, chunk);
}

/// What is worked out once for a type and a deviation.
#[derive(Clone, Debug)]
pub struct Filler {
    ty: BlockType,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// Floats, uniform over an interval around zero of this width.
    F32(f32),
    /// Half-precision floats: 256 evenly spaced ones, of which each number is one.
    Half(Box<[[u8; 2]; 256]>),
    /// Random bytes; then these four variants of scale (and minimum) bytes over the places that hold them.
    Scaled { places: &'static [usize], variants: [Vec<[u8; 2]>; 4] },
    /// Random bytes; then one of four power-of-two exponents as the first byte.
    Exponent([u8; 4]),
    /// Random bytes; then one of four `f32` scales (and biases) in front of the block.
    Wide([Vec<u8>; 4]),
    /// Random E4M3 floats of magnitudes below 2; then one of four `f32` scales in front of the block.
    Float8([f32; 4]),
}

/// Where a format keeps its half-precision scales, and the number of scales that its minimum takes to
/// centre the numbers: half the largest quant, times -1 where the minimum is added.
struct Layout {
    places: &'static [usize],
    min_per_scale: f32,
}

fn layout(ty: BlockType) -> Option<Layout> {
    let (places, min_per_scale): (&'static [usize], f32) = match ty {
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::IQ4_NL | BlockType::IQ4_XS => {
            (&[0], 0.0)
        }
        BlockType::Q4_1 => (&[0, 2], -7.5),
        BlockType::Q5_1 => (&[0, 2], -15.5),
        BlockType::Q2_K => (&[80, 82], 1.5),
        BlockType::Q3_K => (&[108], 0.0),
        BlockType::Q4_K => (&[0, 2], 7.5),
        BlockType::Q5_K => (&[0, 2], 15.5),
        BlockType::Q6_K => (&[208], 0.0),
        BlockType::F32 | BlockType::F16 | BlockType::BF16 | BlockType::MXFP4 => return None,
        BlockType::F8_E4M3 | BlockType::AFFINE4 | BlockType::AFFINE8 => return None,
    };
    Some(Layout { places, min_per_scale })
}

impl Filler {
    /// Prepares to fill tensors of this type with numbers of this deviation.
    pub fn new(ty: BlockType, std: f32) -> Filler {
        let levels = |to_bytes: fn(f32) -> [u8; 2]| {
            Kind::Half(Box::new(std::array::from_fn(|i| to_bytes((i as f32 - 127.5) * std / BYTE_STD))))
        };
        let kind = match (ty, layout(ty)) {
            (BlockType::F32, _) => Kind::F32(std * 12f32.sqrt()),
            (BlockType::F16, _) => levels(|x| f16::from_f32(x).to_le_bytes()),
            (BlockType::BF16, _) => levels(|x| bf16::from_f32(x).to_le_bytes()),
            (_, Some(layout)) => scaled(ty, &layout, std),
            (BlockType::AFFINE4, None) => wide(ty, -7.5, std),
            (BlockType::AFFINE8, None) => wide(ty, -127.5, std),
            (BlockType::F8_E4M3, None) => {
                let unit = unit_std(ty, &Kind::Float8([1.0; 4]));
                Kind::Float8(SPREAD.map(|s| s * std / unit))
            }
            // Blocks under a power of two; only MXFP4 so far.
            (_, None) => Kind::Exponent(exponents(std / unit_std(ty, &Kind::Exponent([127; 4])))),
        };
        Filler { ty, kind }
    }

    /// Fills chunk number `index` of the tensor with this seed.
    pub fn fill(&self, seed: u64, index: usize, chunk: &mut [u8]) {
        let mut random = Random(mix(seed ^ mix(index as u64)));
        match &self.kind {
            Kind::F32(width) => {
                for pair in chunk.chunks_mut(8) {
                    let bits = random.next();
                    for (one, word) in pair.chunks_exact_mut(4).zip([bits as u32, (bits >> 32) as u32]) {
                        // 23 random bits behind the exponent of 1: uniform from 1 to 2.
                        let x = (f32::from_bits(0x3f80_0000 | word >> 9) - 1.5) * width;
                        one.copy_from_slice(&x.to_le_bytes());
                    }
                }
            }
            Kind::Half(levels) => {
                for eight in chunk.chunks_mut(16) {
                    let bytes = random.next().to_le_bytes();
                    for (one, byte) in eight.chunks_exact_mut(2).zip(bytes) {
                        one.copy_from_slice(&levels[usize::from(byte)]);
                    }
                }
            }
            Kind::Scaled { places, variants } => {
                random.bytes(chunk);
                for block in chunk.chunks_exact_mut(self.ty.block_bytes()) {
                    let variant = &variants[(random.next() >> 62) as usize];
                    for (&at, bytes) in places.iter().zip(variant) {
                        block[at..at + 2].copy_from_slice(bytes);
                    }
                }
            }
            Kind::Exponent(variants) => {
                random.bytes(chunk);
                for block in chunk.chunks_exact_mut(self.ty.block_bytes()) {
                    block[0] = variants[(random.next() >> 62) as usize];
                }
            }
            Kind::Wide(variants) => {
                random.bytes(chunk);
                for block in chunk.chunks_exact_mut(self.ty.block_bytes()) {
                    let variant = &variants[(random.next() >> 62) as usize];
                    block[..variant.len()].copy_from_slice(variant);
                }
            }
            Kind::Float8(scales) => {
                random.bytes(chunk);
                for block in chunk.chunks_exact_mut(self.ty.block_bytes()) {
                    // 0x3f, below the exponent of 2; the sign stays.
                    block.iter_mut().for_each(|byte| *byte &= 0xbf);
                    block[..4].copy_from_slice(&scales[(random.next() >> 62) as usize].to_le_bytes());
                }
            }
        }
    }
}

fn scaled(ty: BlockType, layout: &Layout, std: f32) -> Kind {
    let variants = |factor: f32, spread: [f32; 4]| {
        spread.map(|s| {
            let scale = f16::from_f32(s * factor);
            let min = f16::from_f32(scale.to_f32() * layout.min_per_scale);
            [scale, min].map(f16::to_le_bytes)[..layout.places.len()].to_vec()
        })
    };
    let unit = Kind::Scaled { places: layout.places, variants: variants(1.0, [1.0; 4]) };
    Kind::Scaled { places: layout.places, variants: variants(std / unit_std(ty, &unit), SPREAD) }
}

/// Scales and biases of `f32`, of which a bias takes `min_per_scale` scales.
fn wide(ty: BlockType, min_per_scale: f32, std: f32) -> Kind {
    let variants = |factor: f32, spread: [f32; 4]| {
        spread.map(|s| [s * factor, s * factor * min_per_scale].map(f32::to_le_bytes).concat())
    };
    let unit = Kind::Wide(variants(1.0, [1.0; 4]));
    Kind::Wide(variants(std / unit_std(ty, &unit), SPREAD))
}

/// The deviation of a sample with a scale of 1: it depends on the format's quants and inner scales.
fn unit_std(ty: BlockType, unit: &Kind) -> f32 {
    const NUMBERS: usize = 16 << 10;
    let mut bytes = vec![0; NUMBERS / ty.block_len() * ty.block_bytes()];
    Filler { ty, kind: unit.clone() }.fill(0, 0, &mut bytes);
    let mut numbers = vec![0.0; NUMBERS];
    // The lengths fit by construction; zeros would leave the scale at its unit.
    if decode_row(ty, &bytes, &mut numbers).is_err() {
        return 1.0;
    }
    let squares: f64 = numbers.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (squares / NUMBERS as f64).sqrt() as f32
}

/// Four biased exponents, each a neighbour of `scale`, mixed so that the mean square is near `scale²`.
fn exponents(scale: f32) -> [u8; 4] {
    let below = scale.log2().floor();
    let fraction = ((scale / below.exp2()).powi(2) - 1.0) / 3.0;
    let above = (4.0 * fraction).round() as usize;
    std::array::from_fn(|i| (below + 127.0 + f32::from(i < above)).clamp(0.0, 254.0) as u8)
}

/// The SplitMix64 generator (Steele, Lea and Flood 2014): one addition and one mix per number.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn bytes(&mut self, out: &mut [u8]) {
        let (words, rest) = out.as_chunks_mut::<8>();
        for word in words {
            *word = self.next().to_le_bytes();
        }
        rest.copy_from_slice(&self.next().to_le_bytes()[..rest.len()]);
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(ty: BlockType, seed: u64, std: f32) -> Vec<f32> {
        let n = 256 << 10;
        let mut bytes = vec![0; ty.row_bytes(n).unwrap()];
        fill_random(ty, seed, std, &mut bytes);
        let mut out = vec![0.0; n];
        decode_row(ty, &bytes, &mut out).unwrap();
        out
    }

    /// Deviation within 10 % and mean within 0.1 of it, for deviations that weights have. The bounds are
    /// those of the purpose (weights of a plausible size), not of a distribution.
    #[test]
    fn moments_are_as_asked_for_every_type() {
        for ty in BlockType::all() {
            for std in [0.01f32, 0.04, 1.0] {
                let x = decoded(ty, 7, std);
                assert!(x.iter().all(|v| v.is_finite()), "{ty}");
                let n = x.len() as f64;
                let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
                let found = (x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n).sqrt();
                let std = f64::from(std);
                assert!((found / std - 1.0).abs() < 0.1, "{ty}: deviation {found}, asked for {std}");
                assert!((mean / std).abs() < 0.1, "{ty}: mean {mean} at a deviation of {std}");
            }
        }
    }

    #[test]
    fn chunks_do_not_depend_on_who_fills_them() {
        for ty in BlockType::all() {
            let size = chunk_bytes(ty);
            let mut whole = vec![0; 2 * size + 3 * ty.block_bytes()];
            fill_random(ty, 5, 0.02, &mut whole);
            let mut pieces = vec![0; whole.len()];
            for (i, chunk) in pieces.chunks_mut(size).enumerate().rev() {
                fill_chunk(ty, 5, 0.02, i, chunk);
            }
            assert!(whole == pieces, "{ty}");
            assert!(whole[..size] != whole[size..2 * size], "{ty}: chunks differ from each other");
            fill_random(ty, 6, 0.02, &mut pieces);
            assert!(whole != pieces, "{ty}: seeds differ");
        }
    }
}

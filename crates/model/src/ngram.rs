//! Rows of an n-gram table: which entries of a hashed embedding a token looks up, from the tokens before it.
//!
//! For each n-gram length 2..=N the token and its predecessors are hashed (products with odd multipliers,
//! joined by exclusive or), and each of several heads takes the hash modulo its own prime. An end token
//! closes a segment: what lies before it is replaced by end tokens. Depends on tokens only, so rows are known
//! before a step runs. The table itself stays in its file (`minfer_format::table`); the engine reads it.

use minfer_format::gguf::Array;
use minfer_format::{HfDir, Metadata};

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;
use crate::integers::integers;

/// The hash of an n-gram table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ngram {
    /// One per position of the longest n-gram, the token's own first.
    multipliers: Vec<i64>,
    /// Heads of the bigram, then of the trigram, and so on.
    heads: Vec<Head>,
    heads_per_ngram: usize,
    segment_end: u32,
}

/// Rows `offset..offset + size` of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    size: i64,
    offset: i64,
}

/// Settings from which the hash's constants can be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    pub(crate) vocab: usize,
    /// Each head's size is a prime not below this.
    pub(crate) vocab_base: usize,
    pub(crate) seed: u64,
}

/// Numbers that any source of constants must agree with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// Tokens of the longest n-gram.
    pub(crate) ngram_size: usize,
    pub(crate) heads_per_ngram: usize,
    /// Rows of the table.
    pub(crate) rows: usize,
    pub(crate) segment_end: u32,
}

impl Geometry {
    fn heads(&self) -> usize {
        (self.ngram_size - 1) * self.heads_per_ngram
    }
}

impl Ngram {
    /// Rows looked up per token.
    pub fn heads(&self) -> usize {
        self.heads.len()
    }

    /// Tokens before one that its rows can depend on.
    pub fn history(&self) -> usize {
        self.multipliers.len().saturating_sub(1)
    }

    /// Appends the rows of the token at position `at` of a sequence, one per head. `tokens` holds the
    /// sequence up to there at least.
    pub fn rows(&self, tokens: &[u32], at: usize, out: &mut Vec<i32>) {
        let (mut hash, mut same_segment) = (0i64, true);
        for (back, multiplier) in self.multipliers.iter().enumerate() {
            let token = at.checked_sub(back).and_then(|i| tokens.get(i)).copied();
            // The token itself belongs to its segment even where it ends it.
            same_segment &= back == 0 || token.is_some_and(|t| t != self.segment_end);
            let token = token.filter(|_| same_segment).unwrap_or(self.segment_end);
            hash ^= i64::from(token).wrapping_mul(*multiplier);
            if let Some(ngram) = back.checked_sub(1) {
                let heads = &self.heads[ngram * self.heads_per_ngram..][..self.heads_per_ngram];
                out.extend(heads.iter().map(|h| (hash.rem_euclid(h.size) + h.offset) as i32));
            }
        }
    }

    /// The constants that a Hugging Face directory carries as integer tensors `{stem}.*`, or those that
    /// follow from its settings where it has none.
    pub(crate) fn from_hf(
        ck: &Checkpoint,
        dir: &HfDir,
        stem: &str,
        geometry: Geometry,
        recipe: Recipe,
    ) -> Result<Ngram, ModelError> {
        let name = |what: &str| format!("{stem}.{what}");
        if dir.tensor(&name("layer_multipliers")).is_none() {
            return Ngram::from_recipe(ck, stem, geometry, recipe);
        }
        let multipliers = integers(ck, dir, &name("layer_multipliers"))?;
        let sizes = integers(ck, dir, &name("ngram_heads_vocab_sizes"))?;
        let offsets = integers(ck, dir, &name("ngram_heads_offsets"))?;
        Ngram::new(ck, stem, multipliers, pair(&sizes, &offsets), geometry)
    }

    /// The constants that follow from settings.
    pub(crate) fn from_recipe(
        ck: &Checkpoint,
        stem: &str,
        geometry: Geometry,
        recipe: Recipe,
    ) -> Result<Ngram, ModelError> {
        let (multipliers, heads) = recipe.constants(geometry);
        Ngram::new(ck, stem, multipliers, heads, geometry)
    }

    /// The constants that a GGUF file carries as `{arch}.ple.*`.
    pub(crate) fn from_gguf(
        ck: &Checkpoint,
        m: &Metadata,
        arch: &str,
        geometry: Geometry,
    ) -> Result<Ngram, ModelError> {
        let list = |what: &str| {
            let key = format!("{arch}.ple.{what}");
            integers_of(m.array(&key)?).ok_or_else(|| ck.bad(&key, "is not an array of integers"))
        };
        let (multipliers, sizes) = (list("layer_multipliers")?, list("head_vocab_sizes")?);
        let heads = pair(&sizes, &list("head_offsets")?);
        Ngram::new(ck, &format!("{arch}.ple"), multipliers, heads, geometry)
    }

    fn new(
        ck: &Checkpoint,
        what: &str,
        multipliers: Vec<i64>,
        heads: Vec<Head>,
        g: Geometry,
    ) -> Result<Ngram, ModelError> {
        if multipliers.len() != g.ngram_size || heads.len() != g.heads() {
            let (m, h) = (multipliers.len(), heads.len());
            let why = format!("has {m} multipliers and {h} heads, not {} and {}", g.ngram_size, g.heads());
            return Err(ck.bad(what, why));
        }
        let last = g.rows.min(i32::MAX as usize) as i64;
        let inside = |h: &Head| h.size > 0 && h.offset >= 0 && h.size <= last && h.offset <= last - h.size;
        if let Some(h) = heads.iter().find(|h| !inside(h)) {
            let why = format!("has a head of {} rows from {} in a table of {last}", h.size, h.offset);
            return Err(ck.bad(what, why));
        }
        let (heads_per_ngram, segment_end) = (g.heads_per_ngram, g.segment_end);
        Ok(Ngram { multipliers, heads, heads_per_ngram, segment_end })
    }
}

fn pair(sizes: &[i64], offsets: &[i64]) -> Vec<Head> {
    sizes.iter().zip(offsets).map(|(&size, &offset)| Head { size, offset }).collect()
}

fn integers_of(array: &Array) -> Option<Vec<i64>> {
    match array {
        Array::U32(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
        Array::I32(v) => Some(v.iter().map(|&x| i64::from(x)).collect()),
        Array::U64(v) => v.iter().map(|&x| i64::try_from(x).ok()).collect(),
        Array::I64(v) => Some(v.clone()),
        _ => None,
    }
}

impl Recipe {
    /// Odd multipliers from a generator, bounded so that products with token ids fit 63 bits, and
    /// consecutive primes, head after head.
    fn constants(&self, g: Geometry) -> (Vec<i64>, Vec<Head>) {
        let bound = ((i64::MAX as u64 / (self.vocab.max(1) as u64)) / 2).max(1);
        let multiplier = |i: u64| {
            let x = self.seed.wrapping_add(SPLITMIX_GAMMA.wrapping_mul(i));
            (2 * (splitmix64(x) % bound) + 1) as i64
        };
        let multipliers = (1..=g.ngram_size as u64).map(multiplier).collect();
        (multipliers, self.heads(g.heads()))
    }

    fn heads(&self, count: usize) -> Vec<Head> {
        let primes = (self.vocab_base as i64..).filter(|&n| is_prime(n)).take(count);
        let heads = primes.scan(0i64, |offset, size| {
            let head = Head { size, offset: *offset };
            *offset += size;
            Some(head)
        });
        heads.collect()
    }

    /// Rows that all heads have together.
    pub(crate) fn rows(&self, heads: usize) -> usize {
        self.heads(heads).iter().map(|h| h.size as usize).sum()
    }
}

/// Increment and mixing constants of SplitMix64 (Steele, Lea & Flood 2014).
const SPLITMIX_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

fn splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(SPLITMIX_GAMMA);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn is_prime(n: i64) -> bool {
    n >= 2 && (2..).take_while(|d| d * d <= n).all(|d| n % d != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(recipe: Recipe, ngram_size: usize, heads_per_ngram: usize, segment_end: u32) -> Ngram {
        let g = Geometry { ngram_size, heads_per_ngram, rows: 0, segment_end };
        let (multipliers, heads) = recipe.constants(g);
        Ngram { multipliers, heads, heads_per_ngram, segment_end }
    }

    /// Reference: the constants of Qwen3.8-Flash-Next as its specification prints them.
    #[test]
    fn constants_of_the_published_model() {
        let n = made(Recipe { vocab: 248_320, vocab_base: 20_000_000, seed: 1234 }, 3, 8, 248_044);
        assert_eq!(n.multipliers, [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]);
        let last: Vec<i64> = n.heads.iter().map(|h| h.size - 20_000_000).collect();
        assert_eq!(last, [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171]);
        let end = n.heads[15].offset + n.heads[15].size;
        assert_eq!(end, 320_001_446, "rows before padding");
        let recipe = Recipe { vocab: 248_320, vocab_base: 20_000_000, seed: 1234 };
        assert_eq!(recipe.rows(16), 320_001_446);
    }

    /// An end token sees its own segment, the token after it only end tokens.
    #[test]
    fn segments_end() {
        let n = made(Recipe { vocab: 131, vocab_base: 50, seed: 1234 }, 3, 4, 5);
        let rows = |tokens: &[u32]| {
            let mut out = vec![];
            n.rows(tokens, tokens.len() - 1, &mut out);
            out
        };
        assert_eq!(rows(&[9, 8, 5, 7]), rows(&[7]));
        assert_eq!(rows(&[9, 8, 5, 7]), rows(&[5, 5, 7]));
        assert_eq!(rows(&[9, 5, 6, 7]), rows(&[6, 7]));
        assert_ne!(rows(&[9, 8, 5]), rows(&[5]));
        assert_ne!(rows(&[9, 6, 7]), rows(&[6, 7]));
    }

    /// Reads past the end are end tokens, not panics.
    #[test]
    fn positions_outside_the_sequence() {
        let n = made(Recipe { vocab: 131, vocab_base: 50, seed: 1234 }, 3, 4, 5);
        let mut out = vec![];
        n.rows(&[], usize::MAX, &mut out);
        assert_eq!(out.len(), n.heads());
    }
}

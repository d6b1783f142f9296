//! SentencePiece BPE: neighbours whose concatenation is a token are merged, the best score first.
//!
//! The `tokenizers` crate orders merges by *pairs*, this algorithm by the score of the *result*: two
//! pairs with the same result have one priority, and of equal scores the leftmost goes first. A list of
//! pairs cannot say that, hence this loop. What is left over is written as byte tokens.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use tokenizers::models::bpe::Vocab as Ids;

use super::vocab::METASPACE;
use crate::Error;

/// A vocabulary with scores.
pub(crate) struct Spm {
    /// Tokens that text may become; control and byte tokens are not among them.
    pub(crate) ids: Ids,
    /// By token id.
    pub(crate) scores: Vec<f32>,
    /// Token of each byte.
    pub(crate) bytes: Box<[Option<u32>; 256]>,
    pub(crate) unknown: Option<u32>,
    /// Every stretch of text starts with a space of ours.
    pub(crate) space_prefix: bool,
}

/// A part of the text; an empty one was merged into its left neighbour.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that may be merged; outdated when their lengths no longer add up to `len`.
struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}
impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Candidate {}

impl Spm {
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut escaped = String::with_capacity(text.len() + 3);
        escaped.extend(self.space_prefix.then_some(METASPACE));
        escaped.extend(text.chars().map(|c| if c == ' ' { METASPACE } else { c }));
        let symbols = self.merge(&escaped);
        let mut ids = Vec::with_capacity(symbols.len());
        for symbol in symbols {
            let piece = &escaped[symbol.start..symbol.start + symbol.len];
            match self.ids.get(piece) {
                Some(&id) => ids.push(id),
                None => self.push_bytes(piece, &mut ids)?,
            }
        }
        Ok(ids)
    }

    fn merge(&self, text: &str) -> Vec<Symbol> {
        let mut symbols = characters(text);
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            queue.extend(self.candidate(text, &symbols, Some(right - 1), Some(right)));
        }
        while let Some(Candidate { left, right, len, .. }) = queue.pop() {
            let (l, r) = (symbols[left], symbols[right]);
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue;
            }
            symbols[left] = Symbol { len, next: r.next, ..l };
            symbols[right].len = 0;
            if let Some(next) = r.next {
                symbols[next].prev = Some(left);
            }
            queue.extend(self.candidate(text, &symbols, l.prev, Some(left)));
            queue.extend(self.candidate(text, &symbols, Some(left), r.next));
        }
        symbols.retain(|symbol| symbol.len > 0);
        symbols
    }

    fn candidate(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: Option<usize>,
        right: Option<usize>,
    ) -> Option<Candidate> {
        let (left, right) = (left?, right?);
        let len = symbols[left].len + symbols[right].len;
        let id = *self.ids.get(&text[symbols[left].start..][..len])?;
        let score = self.scores.get(id as usize).copied().unwrap_or(0.0);
        Some(Candidate { score, left, right, len })
    }

    fn push_bytes(&self, piece: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        let tokens: Option<Vec<u32>> = piece.bytes().map(|byte| self.bytes[usize::from(byte)]).collect();
        match (tokens, self.unknown, piece.bytes().find(|&byte| self.bytes[usize::from(byte)].is_none())) {
            (Some(tokens), _, _) => ids.extend(tokens),
            (None, Some(unknown), _) => ids.push(unknown),
            (None, None, byte) => return Err(Error::Unencodable { byte: byte.unwrap_or_default() }),
        }
        Ok(())
    }
}

fn characters(text: &str) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = text
        .char_indices()
        .enumerate()
        .map(|(i, (start, c))| Symbol { start, len: c.len_utf8(), prev: i.checked_sub(1), next: Some(i + 1) })
        .collect();
    if let Some(last) = symbols.last_mut() {
        last.next = None;
    }
    symbols
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spm(tokens: &[(&str, f32)], unknown: Option<u32>) -> Spm {
        let ids = tokens.iter().enumerate().map(|(i, (text, _))| (text.to_string(), i as u32)).collect();
        let scores = tokens.iter().map(|(_, score)| *score).collect();
        let mut bytes = Box::new([None; 256]);
        bytes[usize::from(b'z')] = Some(99);
        Spm { ids, scores, bytes, unknown, space_prefix: false }
    }

    #[test]
    fn the_best_score_goes_first_and_ties_from_the_left() {
        let tokens = [("a", -1.0), ("b", -1.0), ("ab", -3.0), ("ba", -2.0), ("aa", -9.0), ("aaa", -9.0)];
        let spm = spm(&tokens, None);
        assert_eq!(spm.encode("aba").unwrap(), [0, 3]);
        assert_eq!(spm.encode("aaaa").unwrap(), [5, 0]);
    }

    #[test]
    fn what_is_no_token_becomes_bytes_or_unknown_or_an_error() {
        let tokens = [("a", -1.0)];
        assert_eq!(spm(&tokens, None).encode("az").unwrap(), [0, 99]);
        assert_eq!(spm(&tokens, Some(7)).encode("aé").unwrap(), [0, 7]);
        assert!(matches!(spm(&tokens, None).encode("é"), Err(Error::Unencodable { byte: 0xC3 })));
    }
}

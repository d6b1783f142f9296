//! BPE by a list of pairs: of all neighbours in the list, the pair that stands first in it is merged, the leftmost first.
//!
//! The `tokenizers` crate does the same, and is what this equals to the id; but it wants the vocabulary and the pairs
//! as maps of strings of its own, which take longer to build than a small model takes to load.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

use super::vocab::Vocab;

/// A list of pairs with what is needed to apply it.
pub(crate) struct Pairs {
    pub(crate) vocab: Arc<Vocab>,
    /// Tokens of one character; other characters are dropped.
    pub(crate) letters: HashMap<char, u32>,
    /// Place in the list and id of the result, by the ids of both sides.
    pub(crate) merges: HashMap<(u32, u32), Merge>,
    /// A word that is a token is that token, whatever the pairs make of it.
    pub(crate) whole_words: bool,
}

#[derive(Clone, Copy)]
pub(crate) struct Merge {
    pub(crate) rank: u32,
    pub(crate) result: u32,
}

/// A token of a word; its right neighbour is the next one that is not gone.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    prev: Option<usize>,
    next: Option<usize>,
    gone: bool,
}

impl Pairs {
    /// The ids of a word.
    pub(crate) fn encode(&self, word: &str) -> Vec<u32> {
        if self.whole_words
            && let Some(id) = self.vocab.text_id(word)
        {
            return vec![id];
        }
        let ids: Vec<u32> = word.chars().filter_map(|c| self.letters.get(&c).copied()).collect();
        self.merge(&ids)
    }

    fn merge(&self, ids: &[u32]) -> Vec<u32> {
        let last = ids.len().saturating_sub(1);
        let symbol = |(i, &id): (usize, &u32)| Symbol {
            id,
            prev: i.checked_sub(1),
            next: (i < last).then_some(i + 1),
            gone: false,
        };
        let mut symbols: Vec<Symbol> = ids.iter().enumerate().map(symbol).collect();
        // The smallest rank first, then the leftmost.
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        queue.extend((0..last).filter_map(|left| self.candidate(&symbols, left)));
        while let Some(Reverse((_, left, result))) = queue.pop() {
            let l = symbols[left];
            let Some(right) = l.next.filter(|_| !l.gone) else { continue };
            let r = symbols[right];
            // One of the two may have been merged since.
            if self.merges.get(&(l.id, r.id)).is_none_or(|m| m.result != result) {
                continue;
            }
            symbols[left] = Symbol { id: result, next: r.next, ..l };
            symbols[right].gone = true;
            if let Some(next) = r.next {
                symbols[next].prev = Some(left);
            }
            queue.extend(l.prev.and_then(|prev| self.candidate(&symbols, prev)));
            queue.extend(self.candidate(&symbols, left));
        }
        symbols.iter().filter(|s| !s.gone).map(|s| s.id).collect()
    }

    /// Rank, place and result of merging a symbol with its right neighbour.
    fn candidate(&self, symbols: &[Symbol], left: usize) -> Option<Reverse<(u32, usize, u32)>> {
        let right = symbols[left].next?;
        let merge = self.merges.get(&(symbols[left].id, symbols[right].id))?;
        Some(Reverse((merge.rank, left, merge.result)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::models::bpe::BPE;
    use tokenizers::tokenizer::Model;

    use super::*;
    use crate::tokenizer::vocab::{Encoding, Kind};

    /// Letters `a` to `d`, then every result of the pairs, which are drawn among the tokens so far.
    fn both(drawn: &[(usize, usize)], whole_words: bool) -> (Pairs, BPE) {
        let mut tokens: Vec<String> = "abcd".chars().map(String::from).collect();
        let mut list: Vec<(String, String)> = Vec::new();
        for &(left, right) in drawn {
            let pair = (tokens[left % tokens.len()].clone(), tokens[right % tokens.len()].clone());
            let result = format!("{}{}", pair.0, pair.1);
            if !tokens.contains(&result) {
                tokens.push(result);
            }
            if !list.contains(&pair) {
                list.push(pair);
            }
        }
        let texts = tokens.iter().map(|t| (t.as_str(), Kind::Normal));
        let vocab = Vocab::new(texts, Encoding::ByteLevel).unwrap();
        let id = |text: &str| vocab.text_id(text).unwrap();
        let merge = |(rank, (l, r)): (usize, &(String, String))| {
            let result = id(&format!("{l}{r}"));
            ((id(l), id(r)), Merge { rank: rank as u32, result })
        };
        let merges = list.iter().enumerate().map(merge).collect();
        let letters = "abcd".chars().map(|c| (c, id(&c.to_string()))).collect();
        let ids: tokenizers::models::bpe::Vocab = tokens.iter().map(|t| (t.clone(), id(t))).collect();
        let bpe = BPE::builder().vocab_and_merges(ids, list).ignore_merges(whole_words).build().unwrap();
        (Pairs { vocab: Arc::new(vocab), letters, merges, whole_words }, bpe)
    }

    proptest! {
        /// Reference: the `tokenizers` crate. Tolerance: none.
        #[test]
        fn equals_the_crate(
            drawn in proptest::collection::vec((0usize..40, 0usize..40), 0..30),
            words in proptest::collection::vec("[a-e]{0,40}", 1..8),
            whole_words: bool,
        ) {
            let (pairs, bpe) = both(&drawn, whole_words);
            for word in &words {
                let expected: Vec<u32> = bpe.tokenize(word).unwrap().iter().map(|t| t.id).collect();
                prop_assert_eq!(pairs.encode(word), expected, "{}", word);
            }
        }
    }
}

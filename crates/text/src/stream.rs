//! The streaming detokeniser: token ids in, whole characters out.
//!
//! Tokens are byte strings, so a character may be split over several of them. A stream holds back an
//! incomplete UTF-8 tail (at most three bytes) until it is complete or certainly wrong; wrong bytes become
//! U+FFFD by the same rule as [`String::from_utf8_lossy`]. All pieces together are what
//! [`Tokenizer::decode`] makes of all ids at once.

use std::sync::Arc;

use crate::Tokenizer;

/// U+FFFD in UTF-8: stands for bytes that are no text, and for ids that are no token.
pub(crate) const REPLACEMENT: &str = "\u{FFFD}";

/// The state of one output stream.
#[derive(Clone, Debug)]
pub struct TokenStream {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Nothing was visible yet, so that a leading space may be the tokenizer's own.
    at_start: bool,
    /// An incomplete UTF-8 tail.
    held: Vec<u8>,
}

impl TokenStream {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> TokenStream {
        TokenStream { tokenizer, skip_special, at_start: true, held: Vec::new() }
    }

    /// Takes the next token and gives the characters that are now certain. An id that is no token shows
    /// as U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        self.held.extend_from_slice(self.tokenizer.visible(id, self.skip_special, &mut self.at_start));
        take_certain(&mut self.held)
    }

    /// The end of the stream: an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

/// Takes everything but an incomplete tail out of `bytes`.
fn take_certain(bytes: &mut Vec<u8>) -> String {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let Some(chunk) = rest.utf8_chunks().next() else { break };
        text.push_str(chunk.valid());
        rest = &rest[chunk.valid().len()..];
        let wrong = chunk.invalid();
        if wrong.is_empty() || is_incomplete(rest) {
            break;
        }
        text.push_str(REPLACEMENT);
        rest = &rest[wrong.len()..];
    }
    let kept = rest.len();
    bytes.drain(..bytes.len() - kept);
    text
}

/// Whether more bytes could still make these valid.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(bytes: &[u8], cuts: &[usize]) -> Vec<String> {
        let mut held = Vec::new();
        let mut out = Vec::new();
        let mut at = 0;
        for &cut in cuts {
            let end = (at + cut).min(bytes.len());
            held.extend_from_slice(&bytes[at..end]);
            out.push(take_certain(&mut held));
            assert!(held.len() < 4, "an incomplete character has at most three bytes");
            at = end;
        }
        held.extend_from_slice(&bytes[at..]);
        out.push(take_certain(&mut held));
        out.push(String::from_utf8_lossy(&held).into_owned());
        out
    }

    #[test]
    fn a_character_waits_for_its_last_byte() {
        assert_eq!(pieces("a😀b".as_bytes(), &[2, 1, 1, 1]), ["a", "", "", "😀", "b", ""]);
        assert_eq!(pieces("日".as_bytes(), &[1]), ["", "日", ""]);
    }

    #[test]
    fn wrong_bytes_show_as_soon_as_they_are_certain() {
        assert_eq!(pieces(b"\xF0\x9Fa", &[1, 1]), ["", "", "\u{FFFD}a", ""]);
        assert_eq!(pieces(b"\xFF", &[1]), ["\u{FFFD}", "", ""]);
        assert_eq!(pieces(b"x\xE6\x97", &[3]), ["x", "", "\u{FFFD}"]);
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            prop::collection::vec(any::<u8>(), 0..6),
            any::<String>().prop_map(String::into_bytes),
            prop::sample::select(vec!["😀", "日本語", "e\u{301}", "\u{10FFFF}"])
                .prop_map(|s| s.as_bytes().to_vec()),
        ];
        prop::collection::vec(part, 0..6).prop_map(|parts| parts.concat())
    }

    proptest! {
        /// Reference: the standard library's conversion of all bytes at once.
        #[test]
        fn pieces_add_up_to_the_whole(bytes in bytes(), cuts in prop::collection::vec(0usize..5, 0..40)) {
            prop_assert_eq!(pieces(&bytes, &cuts).concat(), String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}

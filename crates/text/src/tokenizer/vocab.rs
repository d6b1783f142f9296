//! The table of tokens: text as written, bytes stood for, kind; and the two ways to undo an encoding.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use crate::Error;

/// What a token is. The names and roles are those of `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    /// `<0xNN>`: one byte.
    Byte,
    /// No token has this id.
    Absent,
}

impl Kind {
    /// The kind of a number in `tokenizer.ggml.token_type`; numbers without a meaning are ordinary tokens.
    pub(crate) fn from_ggml(number: i32) -> Kind {
        match number {
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Normal,
        }
    }

    /// Not part of the text.
    pub(crate) fn is_special(self) -> bool {
        matches!(self, Kind::Control | Kind::Unknown)
    }

    /// Matched as a whole in the text before words are split.
    pub(crate) fn is_added(self) -> bool {
        matches!(self, Kind::Control | Kind::Unknown | Kind::UserDefined)
    }
}

/// How the texts of ordinary tokens stand for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Each byte is written as one of 256 printable characters.
    ByteLevel,
    /// A space is written as U+2581.
    Metaspace,
}

/// U+2581, which stands for a space in SentencePiece vocabularies.
pub(crate) const METASPACE: char = '\u{2581}';

/// All tokens, by id.
pub(crate) struct Vocab {
    texts: Pieces,
    bytes: Pieces,
    kinds: Vec<Kind>,
    /// Finds tokens that have a text.
    by_text: Index,
}

/// Byte strings, one after the other: a vocabulary has a few hundred thousand, which are all made at once.
#[derive(Default)]
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Pieces {
    fn push(&mut self, piece: impl IntoIterator<Item = u8>) {
        self.bytes.extend(piece);
        self.ends.push(self.bytes.len());
    }

    fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)?;
        let start = i.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.bytes[start..end])
    }
}

/// A hash table of ids whose keys are the texts of the tokens, which it does not own.
struct Index {
    /// An id or [`Index::FREE`]; the length is a power of two, and half of them are free.
    slots: Vec<u32>,
    /// Seeded by chance, so that no file can make all its tokens meet in one slot.
    hash: RandomState,
}

impl Index {
    const FREE: u32 = u32::MAX;

    fn new(tokens: usize) -> Index {
        Index { slots: vec![Index::FREE; (2 * tokens + 1).next_power_of_two()], hash: RandomState::new() }
    }

    /// The slot of this text: of a token that has it, or free.
    fn slot(&self, texts: &Pieces, text: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = self.hash.hash_one(text) as usize & mask;
        while self.slots[slot] != Index::FREE && texts.get(self.slots[slot] as usize) != Some(text) {
            slot = (slot + 1) & mask;
        }
        slot
    }

    fn get(&self, texts: &Pieces, text: &[u8]) -> Option<u32> {
        Some(self.slots[self.slot(texts, text)]).filter(|&id| id != Index::FREE)
    }
}

impl Vocab {
    /// Two tokens with the same text are refused; tokens without a text are never matched.
    pub(crate) fn new<'a>(
        tokens: impl ExactSizeIterator<Item = (&'a str, Kind)>,
        encoding: Encoding,
    ) -> Result<Vocab, Error> {
        let by_text = Index::new(tokens.len());
        let kinds = Vec::with_capacity(tokens.len());
        let mut vocab = Vocab { texts: Pieces::default(), bytes: Pieces::default(), kinds, by_text };
        for (id, (text, kind)) in (0..).zip(tokens) {
            vocab.texts.push(text.bytes());
            push_bytes(text, kind, encoding, &mut vocab.bytes);
            vocab.kinds.push(kind);
            if text.is_empty() {
                continue;
            }
            let slot = vocab.by_text.slot(&vocab.texts, text.as_bytes());
            match vocab.by_text.slots[slot] {
                Index::FREE => vocab.by_text.slots[slot] = id,
                first => return Err(Error::DuplicateToken { first, second: id, text: text.to_owned() }),
            }
        }
        match vocab.texts.bytes.is_empty() {
            true => Err(Error::EmptyVocab),
            false => Ok(vocab),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(crate) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Absent)
    }

    pub(crate) fn text(&self, id: u32) -> Option<&str> {
        let present = self.kind(id) != Kind::Absent;
        // They were pushed as text.
        self.texts.get(id as usize).filter(|_| present).and_then(|text| std::str::from_utf8(text).ok())
    }

    pub(crate) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let present = self.kind(id) != Kind::Absent;
        self.bytes.get(id as usize).filter(|_| present)
    }

    pub(crate) fn id(&self, text: &str) -> Option<u32> {
        self.by_text.get(&self.texts, text.as_bytes())
    }

    /// The token that text may become: control tokens are never made of text.
    pub(crate) fn text_id(&self, text: &str) -> Option<u32> {
        self.id(text).filter(|&id| !self.kind(id).is_special())
    }

    /// Tokens that have a text: id, text, kind.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str, Kind)> {
        let text = |id: u32| std::str::from_utf8(self.texts.get(id as usize)?).ok();
        let all = (0..self.kinds.len() as u32).filter_map(move |id| Some((id, text(id)?, self.kind(id))));
        all.filter(|(_, text, _)| !text.is_empty())
    }
}

/// Adds what a token stands for.
fn push_bytes(text: &str, kind: Kind, encoding: Encoding, out: &mut Pieces) {
    match (kind, encoding) {
        (Kind::Control | Kind::Unknown | Kind::UserDefined, _) => out.push(text.bytes()),
        (Kind::Byte, _) if byte_token(text).is_some() => out.push(byte_token(text)),
        (_, Encoding::Metaspace) => out.push(text.replace(METASPACE, " ").into_bytes()),
        // A token with a character outside the alphabet stands for itself, as in Hugging Face's decoder.
        (_, Encoding::ByteLevel) => match text.chars().all(|c| letter_byte(c).is_some()) {
            true => out.push(text.chars().filter_map(letter_byte)),
            false => out.push(text.bytes()),
        },
    }
}

/// The byte of a token that is written `<0xNN>`.
pub(crate) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if hex { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte-level alphabet of GPT-2: printable bytes of Latin-1 stand for themselves, the others are
/// numbered from U+0100. By character: the byte, if it is one of the 256.
static ALPHABET: LazyLock<[Option<u8>; 0x144]> = LazyLock::new(|| {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut alphabet = [None; 0x144];
    let mut others = 0x100..;
    for byte in 0..=u8::MAX {
        let place = if printable(byte) { Some(usize::from(byte)) } else { others.next() };
        if let Some(letter) = place.and_then(|place| alphabet.get_mut(place)) {
            *letter = Some(byte);
        }
    }
    alphabet
});

/// The byte that a character of the alphabet stands for.
fn letter_byte(c: char) -> Option<u8> {
    ALPHABET.get(c as usize).copied().flatten()
}

/// The alphabet.
pub(crate) fn letters() -> impl Iterator<Item = (char, u8)> {
    (0..ALPHABET.len() as u32).filter_map(|c| char::from_u32(c).and_then(|c| Some((c, letter_byte(c)?))))
}

/// The characters of the byte-level alphabet that these tokens lack, each with its byte.
pub(crate) fn missing_letters(has: impl Fn(&str) -> bool) -> Vec<(char, u8)> {
    let mut buffer = [0; 4];
    let mut missing: Vec<(char, u8)> = letters().collect();
    missing.retain(|(c, _)| !has(c.encode_utf8(&mut buffer)));
    missing.sort_unstable();
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_the_crates() {
        let ours: std::collections::BTreeSet<char> = letters().map(|(c, _)| c).collect();
        let theirs = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        assert_eq!(ours, theirs);
        assert_eq!(letter_byte('Ġ'), Some(b' '));
        assert_eq!(letter_byte('Ċ'), Some(b'\n'));
    }

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0x+A>"), None);
        assert_eq!(byte_token("<0x0AB>"), None);
    }

    #[test]
    fn tokens_stand_for_bytes() {
        let bytes = |text, kind, encoding| {
            let mut pieces = Pieces::default();
            push_bytes(text, kind, encoding, &mut pieces);
            pieces.get(0).unwrap().to_vec()
        };
        assert_eq!(bytes("Ġhi", Kind::Normal, Encoding::ByteLevel), b" hi");
        assert_eq!(bytes("Ã©", Kind::Normal, Encoding::ByteLevel), "é".as_bytes());
        assert_eq!(bytes("▁hi", Kind::Normal, Encoding::ByteLevel), "▁hi".as_bytes());
        assert_eq!(bytes("▁hi", Kind::Normal, Encoding::Metaspace), b" hi");
        assert_eq!(bytes("<｜a▁b｜>", Kind::Control, Encoding::Metaspace), "<｜a▁b｜>".as_bytes());
        assert_eq!(bytes("<0xF0>", Kind::Byte, Encoding::Metaspace), b"\xF0");
    }

    #[test]
    fn equal_texts_and_nothing_at_all_are_refused() {
        let vocab = |texts: &[&'static str]| {
            Vocab::new(texts.iter().copied().map(|text| (text, Kind::Normal)), Encoding::ByteLevel)
        };
        assert!(matches!(vocab(&["a", "b", "a"]), Err(Error::DuplicateToken { first: 0, second: 2, .. })));
        assert!(matches!(vocab(&[""]), Err(Error::EmptyVocab)));
        assert!(matches!(vocab(&[]), Err(Error::EmptyVocab)));
        let some = vocab(&["a", "", "b", ""]).unwrap();
        assert_eq!(["a", "b", "", "c"].map(|text| some.id(text)), [Some(0), Some(2), None, None]);
        assert_eq!((some.text(2), some.bytes(1), some.bytes(4)), (Some("b"), Some(&b""[..]), None));
    }
}

//! The table of tokens: text as written, bytes stood for, kind; and the two ways to undo an encoding.

use std::collections::HashMap;
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
    texts: Vec<Box<str>>,
    bytes: Vec<Box<[u8]>>,
    kinds: Vec<Kind>,
    /// Ids of the tokens that have a text, sorted by it.
    by_text: Vec<u32>,
}

impl Vocab {
    /// Two tokens with the same text are refused; tokens without a text are never matched.
    pub(crate) fn new(tokens: Vec<(Box<str>, Kind)>, encoding: Encoding) -> Result<Vocab, Error> {
        let bytes = tokens.iter().map(|(text, kind)| stands_for(text, *kind, encoding)).collect();
        let (texts, kinds): (Vec<Box<str>>, Vec<Kind>) = tokens.into_iter().unzip();
        let mut by_text: Vec<u32> =
            (0..texts.len() as u32).filter(|&id| !texts[id as usize].is_empty()).collect();
        if by_text.is_empty() {
            return Err(Error::EmptyVocab);
        }
        by_text.sort_by_key(|&id| (&texts[id as usize], id));
        if let Some(pair) = by_text.windows(2).find(|p| texts[p[0] as usize] == texts[p[1] as usize]) {
            let text = texts[pair[0] as usize].to_string();
            return Err(Error::DuplicateToken { first: pair[0], second: pair[1], text });
        }
        Ok(Vocab { texts, bytes, kinds, by_text })
    }

    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(crate) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Absent)
    }

    pub(crate) fn text(&self, id: u32) -> Option<&str> {
        let present = self.kind(id) != Kind::Absent;
        self.texts.get(id as usize).filter(|_| present).map(|text| &**text)
    }

    pub(crate) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let present = self.kind(id) != Kind::Absent;
        self.bytes.get(id as usize).filter(|_| present).map(|bytes| &**bytes)
    }

    pub(crate) fn id(&self, text: &str) -> Option<u32> {
        let place = self.by_text.binary_search_by(|&id| (*self.texts[id as usize]).cmp(text)).ok()?;
        Some(self.by_text[place])
    }

    /// Tokens that have a text: id, text, kind.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str, Kind)> {
        let all = self.texts.iter().zip(&self.kinds).enumerate();
        all.map(|(id, (text, kind))| (id as u32, &**text, *kind)).filter(|(_, text, _)| !text.is_empty())
    }
}

fn stands_for(text: &str, kind: Kind, encoding: Encoding) -> Box<[u8]> {
    match (kind, encoding) {
        (Kind::Control | Kind::Unknown | Kind::UserDefined, _) => text.as_bytes().into(),
        (Kind::Byte, _) if byte_token(text).is_some() => byte_token(text).into_iter().collect(),
        (_, Encoding::Metaspace) => text.replace(METASPACE, " ").into_bytes().into(),
        // A token with a character outside the alphabet stands for itself, as in Hugging Face's decoder.
        (_, Encoding::ByteLevel) => {
            let bytes: Option<Box<[u8]>> = text.chars().map(|c| ALPHABET.get(&c).copied()).collect();
            bytes.unwrap_or_else(|| text.as_bytes().into())
        }
    }
}

/// The byte of a token that is written `<0xNN>`.
pub(crate) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if hex { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The byte-level alphabet of GPT-2: printable bytes of Latin-1 stand for themselves, the others are
/// numbered from U+0100.
static ALPHABET: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = '\u{100}'..;
    let letter = |b: u8| if printable(b) { Some(char::from(b)) } else { others.next() };
    (0..=u8::MAX).zip((0..=u8::MAX).map(letter)).filter_map(|(b, c)| Some((c?, b))).collect()
});

/// The characters of the byte-level alphabet that these tokens lack, each with its byte.
pub(crate) fn missing_letters(has: impl Fn(&str) -> bool) -> Vec<(char, u8)> {
    let mut buffer = [0; 4];
    let mut missing: Vec<(char, u8)> = ALPHABET.iter().map(|(&c, &b)| (c, b)).collect();
    missing.retain(|(c, _)| !has(c.encode_utf8(&mut buffer)));
    missing.sort_unstable();
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_the_crates() {
        let ours: std::collections::BTreeSet<char> = ALPHABET.keys().copied().collect();
        let theirs = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
        assert_eq!(ours, theirs);
        assert_eq!(ALPHABET[&'Ġ'], b' ');
        assert_eq!(ALPHABET[&'Ċ'], b'\n');
    }

    #[test]
    fn byte_tokens() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0x+A>"), None);
        assert_eq!(byte_token("<0x0AB>"), None);
    }

    #[test]
    fn tokens_stand_for_bytes() {
        let bytes = |text, kind, encoding| stands_for(text, kind, encoding).to_vec();
        assert_eq!(bytes("Ġhi", Kind::Normal, Encoding::ByteLevel), b" hi");
        assert_eq!(bytes("Ã©", Kind::Normal, Encoding::ByteLevel), "é".as_bytes());
        assert_eq!(bytes("▁hi", Kind::Normal, Encoding::ByteLevel), "▁hi".as_bytes());
        assert_eq!(bytes("▁hi", Kind::Normal, Encoding::Metaspace), b" hi");
        assert_eq!(bytes("<｜a▁b｜>", Kind::Control, Encoding::Metaspace), "<｜a▁b｜>".as_bytes());
        assert_eq!(bytes("<0xF0>", Kind::Byte, Encoding::Metaspace), b"\xF0");
    }

    #[test]
    fn equal_texts_and_nothing_at_all_are_refused() {
        let token = |text: &str| (text.into(), Kind::Normal);
        let twice = Vocab::new(vec![token("a"), token("b"), token("a")], Encoding::ByteLevel);
        assert!(matches!(twice, Err(Error::DuplicateToken { first: 0, second: 2, .. })));
        assert!(matches!(Vocab::new(vec![token("")], Encoding::ByteLevel), Err(Error::EmptyVocab)));
    }
}

//! Tokenizers: text to token ids and back, for byte-level BPE and SentencePiece BPE.
//!
//! In: GGUF metadata ([`Tokenizer::from_gguf`]) or a Hugging Face `tokenizer.json`
//! ([`Tokenizer::from_hf`]). Out: one read-only [`Tokenizer`]. A text is cut at added tokens, normalised,
//! split into words by the expressions of its pre-tokenizer (`pre.rs` has the table for GGUF), and each
//! word becomes ids by merging. The work is done by the `tokenizers` crate, except for merging with what
//! GGUF files hold: scores, whose order it cannot express (`spm.rs`), and pairs (`pairs.rs`).
//!
//! Decoding never tidies spaces: what a token stands for is a fixed byte string.

mod gguf;
mod hf;
mod pairs;
mod pieces;
mod pre;
mod spm;
mod vocab;

use std::sync::Arc;

use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::tokenizer::{AddedVocabulary, Model, OffsetType, PreTokenizer};

use crate::stream::REPLACEMENT;
use crate::{Error, TokenStream};
use pieces::PieceModel;
use vocab::{Kind, Vocab};

/// Longest run of only whitespace, or only other characters, in a text to encode. The expression engine
/// gives up *silently* after a million backtracks, which a longer run could reach.
pub const MAX_RUN: usize = 400_000;

/// How a text is to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Control tokens that are written in the text become those tokens. Without it they are plain text,
    /// which is what text from outside must be.
    pub parse_special: bool,
    /// Put the BOS token in front, if the model wants one.
    pub add_bos: bool,
}

/// A vocabulary with everything that is needed to encode and decode.
pub struct Tokenizer {
    vocab: Arc<Vocab>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    model: PieceModel,
    /// Tokens that are matched in the text before anything else: all, and those that are not special.
    added: AddedVocabulary,
    added_plain: AddedVocabulary,
    bos: Option<u32>,
    eos: Option<u32>,
    end_tokens: Vec<u32>,
    /// What `add_bos` puts in front.
    prefix: Vec<u32>,
    /// Encoding puts a space in front of a text, so decoding takes one away.
    space_prefix: bool,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("Tokenizer");
        fields.field("vocab_size", &self.vocab_size()).field("bos", &self.bos).field("eos", &self.eos);
        fields.field("end_tokens", &self.end_tokens).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// The token ids of a text.
    pub fn encode(&self, text: &str, opts: EncodeOptions) -> Result<Vec<u32>, Error> {
        check_runs(text)?;
        let added = if opts.parse_special { &self.added } else { &self.added_plain };
        let mut words = added.extract_and_normalize(self.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut words).map_err(pieces::library)?;
        }
        words.tokenize(|word| self.model.tokenize(word.get())).map_err(pieces::library)?;
        let encoding = words.into_encoding(None, 0, OffsetType::None).map_err(pieces::library)?;
        let prefix: &[u32] = if opts.add_bos { &self.prefix } else { &[] };
        Ok([prefix, encoding.get_ids()].concat())
    }

    /// The text of these tokens. Bytes that are no text, and ids that are no token, become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut at_start = true;
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.visible(id, skip_special, &mut at_start));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A detokeniser for one stream of tokens.
    pub fn stream(self: &Arc<Self>, skip_special: bool) -> TokenStream {
        TokenStream::new(Arc::clone(self), skip_special)
    }

    /// One more than the highest token id.
    pub fn vocab_size(&self) -> usize {
        self.vocab.len()
    }

    /// The token that starts a document.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a document (or a turn, for some chat models).
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Every token that ends a turn or a document, ascending.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// Adds end tokens that another file names (`eos_token_id` of `generation_config.json`).
    pub fn add_end_tokens(&mut self, ids: &[u32]) -> Result<(), Error> {
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= self.vocab_size()) {
            let key = "eos_token_id".to_owned();
            return Err(Error::TokenId { key, id: id.into(), len: self.vocab_size() });
        }
        self.end_tokens.extend_from_slice(ids);
        self.end_tokens.sort_unstable();
        self.end_tokens.dedup();
        Ok(())
    }

    /// The same tokenizer without Unicode normalisation. llama.cpp has none, so this is for comparisons
    /// with it; a model sees texts that are not in normal form as it was never trained to.
    pub fn without_normalizer(mut self) -> Tokenizer {
        self.normalizer = None;
        self
    }

    /// Whether a prompt should start with the BOS token.
    pub fn wants_bos(&self) -> bool {
        !self.prefix.is_empty()
    }

    /// The raw bytes that a token stands for.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocab.bytes(id)
    }

    /// A token as it is written in the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.vocab.text(id)
    }

    /// Whether a token is control or unknown: not part of the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocab.kind(id).is_special()
    }

    /// The token that is written like this in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocab.id(text)
    }

    /// The bytes that a token adds to a text; `at_start` becomes false with the first of them.
    pub(crate) fn visible(&self, id: u32, skip_special: bool, at_start: &mut bool) -> &[u8] {
        let bytes = match self.vocab.bytes(id) {
            Some(_) if skip_special && self.is_special(id) => &[],
            Some(bytes) => bytes,
            None => REPLACEMENT.as_bytes(),
        };
        let first = !bytes.is_empty() && std::mem::replace(at_start, false);
        match bytes {
            [b' ', rest @ ..] if first && self.space_prefix && self.vocab.kind(id) == Kind::Normal => rest,
            _ => bytes,
        }
    }
}

/// Refuses texts on which the expression engine might give up.
fn check_runs(text: &str) -> Result<(), Error> {
    if text.len() <= MAX_RUN {
        return Ok(());
    }
    let mut run = 0;
    let mut was_space = false;
    for c in text.chars() {
        run = if c.is_whitespace() == was_space { run + 1 } else { 1 };
        was_space = c.is_whitespace();
        if run > MAX_RUN {
            return Err(Error::LongRun { limit: MAX_RUN });
        }
    }
    Ok(())
}

/// Texts of tokens that end a turn or a document in the models of the field. They count only when the
/// vocabulary marks them as control tokens.
const END_TEXTS: [&str; 16] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<eos>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "</s>",
    "<｜end▁of▁sentence｜>",
];

/// The named end tokens and the well-known ones, ascending.
fn end_tokens(vocab: &Vocab, named: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let control = |text: &&str| vocab.id(text).filter(|&id| vocab.kind(id) == Kind::Control);
    // In the harmony format (gpt-oss) `<|end|>` separates messages of one turn.
    let harmony = control(&"<|return|>").is_some() && control(&"<|call|>").is_some();
    let known = END_TEXTS.iter().filter(|text| !(harmony && **text == "<|end|>")).filter_map(control);
    let mut ids: Vec<u32> = named.into_iter().chain(known).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

//! Tokenizers from GGUF metadata (`tokenizer.ggml.*`).

use std::collections::HashMap;
use std::sync::Arc;

use minfer_format::gguf::Metadata;
use tokenizers::normalizers::{NFC, NormalizerWrapper};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::{AddedToken, SplitDelimiterBehavior};

use super::pairs::{Merge, Pairs};
use super::pieces::{Merger, PieceModel, library};
use super::pre::{self, Pre};
use super::spm::Spm;
use super::vocab::{Encoding, Kind, Vocab, byte_token, letters, missing_letters};
use super::{Tokenizer, end_tokens};
use crate::Error;

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
/// Other tokens that end something: a turn, a message.
const ENDS: [&str; 2] = ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// What differs between the two tokenizer models.
struct Parts {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    merger: Merger,
    /// BOS and EOS when the file names none.
    default_ids: [Option<u32>; 2],
    add_bos: bool,
    space_prefix: bool,
}

impl Tokenizer {
    /// The tokenizer that a GGUF file describes.
    pub fn from_gguf(meta: &Metadata) -> Result<Tokenizer, Error> {
        let model = meta.string("tokenizer.ggml.model")?;
        let encoding = match model {
            "gpt2" => Encoding::ByteLevel,
            "llama" => Encoding::Metaspace,
            _ => {
                let known = "gpt2 (byte-level BPE), llama (SentencePiece BPE)".to_owned();
                return Err(Error::UnknownModel { model: model.to_owned(), known });
            }
        };
        // The name is looked up first: it is cheap, and the reason that users see most.
        let pre = if encoding == Encoding::ByteLevel { Some(named_pre(meta)?) } else { None };
        let vocab = Arc::new(vocabulary(meta, encoding)?);
        let parts = match pre {
            Some(pre) => byte_level(meta, &vocab, pre)?,
            None => sentence_piece(meta, &vocab)?,
        };
        assemble(meta, vocab, parts)
    }
}

fn named_pre(meta: &Metadata) -> Result<&'static Pre, Error> {
    let known = pre::known();
    let Some(name) = meta.opt_string("tokenizer.ggml.pre")? else { return Err(Error::NoPre { known }) };
    pre::find(name).ok_or_else(|| Error::UnknownPre { pre: name.to_owned(), known })
}

fn vocabulary(meta: &Metadata, encoding: Encoding) -> Result<Vocab, Error> {
    let texts = meta.strings(TOKENS)?;
    let types = meta.opt_i32s(TYPES)?;
    if let Some(types) = &types {
        same_length(TYPES, types.len(), texts.len())?;
    }
    let kind = |id: usize| types.as_ref().map_or(Kind::Normal, |types| Kind::from_ggml(types[id]));
    Vocab::new(texts.iter().enumerate().map(|(id, text)| (text.as_str(), kind(id))), encoding)
}

fn same_length(key: &'static str, len: usize, expected: usize) -> Result<(), Error> {
    if len == expected { Ok(()) } else { Err(Error::Length { key, len, expected }) }
}

fn byte_level(meta: &Metadata, vocab: &Arc<Vocab>, pre: &Pre) -> Result<Parts, Error> {
    let missing = missing_letters(|letter| vocab.text_id(letter).is_some());
    let merges = merges(meta.strings(MERGES)?, vocab)?;
    let letters =
        letters().filter_map(|(c, _)| Some((c, vocab.text_id(c.encode_utf8(&mut [0; 4]))?))).collect();
    let pairs = Pairs { vocab: vocab.clone(), letters, merges, whole_words: pre.ignore_merges };
    Ok(Parts {
        normalizer: pre.nfc.then_some(NormalizerWrapper::NFC(NFC)),
        pre_tokenizer: Some(splitter(pre)?),
        merger: Merger::Pairs { pairs, missing },
        default_ids: [None, None],
        add_bos: pre.add_bos,
        space_prefix: false,
    })
}

/// The pairs of "left right" strings; of equal pairs the first counts.
fn merges(merges: &[String], vocab: &Vocab) -> Result<HashMap<(u32, u32), Merge>, Error> {
    let mut pairs = HashMap::with_capacity(merges.len());
    let (mut both, mut next) = (String::new(), 0);
    for (index, merge) in merges.iter().enumerate() {
        let refused = |reason| Error::Merge { index, merge: merge.clone(), reason };
        // A left side may be a space itself, so the separator is not the first character.
        let separator = merge.char_indices().skip(1).find(|(_, c)| *c == ' ');
        let Some((at, _)) = separator else { return Err(refused("is not two tokens with a space between")) };
        let (left, right) = (&merge[..at], &merge[at + 1..]);
        let (Some(left_id), Some(right_id)) = (vocab.text_id(left), vocab.text_id(right)) else {
            return Err(refused("names a token that is not in the vocabulary"));
        };
        both.clear();
        both.extend([left, right]);
        // Most vocabularies are in the order of their merges, and looking at the next token is faster than searching.
        let guess = Some(next).filter(|&id| vocab.text(id) == Some(&both) && !vocab.kind(id).is_special());
        let Some(result) = guess.or_else(|| vocab.text_id(&both)) else {
            return Err(refused("makes a token that is not in the vocabulary"));
        };
        next = result + 1;
        pairs.entry((left_id, right_id)).or_insert(Merge { rank: index as u32, result });
    }
    Ok(pairs)
}

fn splitter(pre: &Pre) -> Result<PreTokenizerWrapper, Error> {
    let mut steps = Vec::with_capacity(pre.splits.len() + 1);
    for split in pre.splits {
        let pattern = SplitPattern::Regex((*split).to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(library)?;
        steps.push(PreTokenizerWrapper::Split(split));
    }
    steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)));
    Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
}

fn sentence_piece(meta: &Metadata, vocab: &Vocab) -> Result<Parts, Error> {
    let scores = meta.f32s(SCORES)?.to_vec();
    same_length(SCORES, scores.len(), vocab.len())?;
    let text_token = |kind| matches!(kind, Kind::Normal | Kind::UserDefined | Kind::Unused);
    let ids = vocab.iter().filter(|t| text_token(t.2)).map(|(id, text, _)| (text.to_owned(), id)).collect();
    let mut bytes = Box::new([None; 256]);
    for (id, text, _) in vocab.iter().filter(|t| t.2 == Kind::Byte) {
        if let Some(byte) = byte_token(text) {
            bytes[usize::from(byte)] = Some(id);
        }
    }
    let space_prefix = meta.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    // SentencePiece's own numbering, used by files that name no ids.
    let default = |id: u32, kind: Kind| Some(id).filter(|&id| vocab.kind(id) == kind);
    let unknown = token_id(meta, UNKNOWN, vocab)?.or(default(0, Kind::Unknown));
    Ok(Parts {
        normalizer: None,
        pre_tokenizer: None,
        merger: Merger::Spm(Spm { ids, scores, bytes, unknown, space_prefix }),
        default_ids: [default(1, Kind::Control), default(2, Kind::Control)],
        add_bos: true,
        space_prefix,
    })
}

/// A token that a key names.
fn token_id(meta: &Metadata, key: &str, vocab: &Vocab) -> Result<Option<u32>, Error> {
    let Some(id) = meta.opt_u64(key)? else { return Ok(None) };
    let known = u32::try_from(id).ok().filter(|&id| (id as usize) < vocab.len());
    known.map(Some).ok_or_else(|| Error::TokenId { key: key.to_owned(), id, len: vocab.len() })
}

fn assemble(meta: &Metadata, vocab: Arc<Vocab>, parts: Parts) -> Result<Tokenizer, Error> {
    let [default_bos, default_eos] = parts.default_ids;
    let bos = token_id(meta, BOS, &vocab)?.or(default_bos);
    let eos = token_id(meta, EOS, &vocab)?.or(default_eos);
    let mut ends: Vec<u32> = eos.into_iter().collect();
    for key in ENDS {
        ends.extend(token_id(meta, key, &vocab)?);
    }
    let prefix = match meta.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(parts.add_bos) {
        true => vec![bos.ok_or(Error::NoBos)?],
        false => Vec::new(),
    };
    let added: Vec<(u32, AddedToken)> = vocab
        .iter()
        .filter(|t| t.2.is_added())
        .map(|(id, text, kind)| (id, AddedToken::from(text, kind.is_special()).normalized(false)))
        .collect();
    let model = PieceModel::new(parts.merger, &added);
    let normalizer = parts.normalizer;
    Ok(Tokenizer {
        added: model.matcher(&added, normalizer.as_ref(), |_| true)?,
        added_plain: model.matcher(&added, normalizer.as_ref(), |token| !token.special)?,
        end_tokens: end_tokens(&vocab, ends),
        pre_tokenizer: parts.pre_tokenizer,
        space_prefix: parts.space_prefix,
        vocab,
        normalizer,
        model,
        bos,
        eos,
        prefix,
    })
}

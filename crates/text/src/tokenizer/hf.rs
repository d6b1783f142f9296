//! Tokenizers from a Hugging Face `tokenizer.json`, with the ids and flags of `tokenizer_config.json`.
//!
//! The file's own normaliser, pre-tokenizer and BPE model are used as they are. What this module adds are
//! the checks that the `tokenizers` crate leaves to luck (it panics on a merge without a result), the
//! bytes that each token stands for, and which tokens start and end a text.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::tokenizer::{AddedToken, Encoding as Encoded, PostProcessor, Token};

use super::pieces::{Merger, PieceModel};
use super::vocab::{Encoding, Kind, Vocab, byte_token, missing_letters};
use super::{Tokenizer, end_tokens};
use crate::Error;

/// Most ids without a token that a vocabulary may have: a single high id must not make a huge table.
const MAX_HOLES: usize = 1 << 20;

#[derive(Deserialize)]
struct File {
    model: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// The fields of a BPE model that are checked here.
#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    unk_token: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

impl Merge {
    fn sides(&self) -> Option<(&str, &str)> {
        match self {
            Merge::Pair(left, right) => Some((left, right)),
            Merge::Joined(both) => both.split_once(' '),
        }
    }
}

impl Tokenizer {
    /// The tokenizer of a `tokenizer.json`; `config` is the content of `tokenizer_config.json`.
    pub fn from_hf(tokenizer_json: &Path, config: Option<&Value>) -> Result<Tokenizer, Error> {
        let path = tokenizer_json;
        let bytes = std::fs::read(path).map_err(|source| Error::Io { path: path.to_owned(), source })?;
        let file: File = serde_json::from_slice(&bytes).map_err(|e| json(path, e))?;
        // The library has panics that data can reach; all known ones are checked for before, and this
        // turns an unknown one into an error.
        catch_unwind(AssertUnwindSafe(|| build(path, file, config.unwrap_or(&Value::Null))))
            .unwrap_or_else(|_| Err(json(path, "the tokenizer library panicked on this file")))
    }
}

fn json(path: &Path, reason: impl ToString) -> Error {
    Error::Json { path: path.to_owned(), reason: reason.to_string() }
}

fn part<T: DeserializeOwned>(path: &Path, name: &str, value: Value) -> Result<Option<T>, Error> {
    let value: Option<T> =
        serde_json::from_value(value).map_err(|e| json(path, format!("{name} cannot be used: {e}")))?;
    Ok(value)
}

fn build(path: &Path, file: File, config: &Value) -> Result<Tokenizer, Error> {
    let (bpe, model) = read_model(path, file.model)?;
    let (encoding, space_prefix) = decoding(path, &file.decoder)?;
    let vocab = table(path, &model, &file.added_tokens, encoding)?;
    let added: Vec<(u32, AddedToken)> = file.added_tokens.into_iter().map(|a| (a.id, a.token)).collect();
    let normalizer: Option<NormalizerWrapper> = part(path, "normalizer", file.normalizer)?;
    let pre_tokenizer: Option<PreTokenizerWrapper> = part(path, "pre_tokenizer", file.pre_tokenizer)?;
    let missing = match encoding {
        Encoding::ByteLevel if model.unk_token.is_none() => missing_letters(|c| model.vocab.contains_key(c)),
        _ => Vec::new(),
    };
    let template = template_prefix(part(path, "post_processor", file.post_processor)?)?;
    let eos = named(config, "eos_token", &vocab)?;
    let bos = named(config, "bos_token", &vocab)?.or(template.first().copied());
    let prefix = match config["add_bos_token"].as_bool() {
        Some(false) => Vec::new(),
        Some(true) => vec![bos.ok_or(Error::NoBos)?],
        None => template,
    };
    if let Some(&id) = prefix.iter().find(|&&id| id as usize >= vocab.len()) {
        return Err(Error::TokenId { key: "post_processor".to_owned(), id: id.into(), len: vocab.len() });
    }
    let model = PieceModel::new(Merger::Bpe { bpe: Box::new(bpe), missing }, &added);
    Ok(Tokenizer {
        added: model.matcher(&added, normalizer.as_ref(), |_| true)?,
        added_plain: model.matcher(&added, normalizer.as_ref(), |token| !token.special)?,
        end_tokens: end_tokens(&vocab, eos),
        vocab: Arc::new(vocab),
        normalizer,
        pre_tokenizer,
        model,
        bos,
        eos,
        prefix,
        space_prefix,
    })
}

fn read_model(path: &Path, mut value: Value) -> Result<(BPE, Model), Error> {
    let unsupported = |what: String| Error::Unsupported {
        path: path.to_owned(),
        what,
        supported: "BPE models without dropout, subword prefix and word suffix",
    };
    let kind = value["type"].as_str().unwrap_or("BPE").to_owned();
    if kind != "BPE" {
        return Err(unsupported(format!("the tokenizer model '{kind}'")));
    }
    value["type"] = "BPE".into();
    let model = Model::deserialize(&value).map_err(|e| json(path, format!("model: {e}")))?;
    let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if given(&model.continuing_subword_prefix) || given(&model.end_of_word_suffix) {
        return Err(unsupported("a subword prefix or word suffix".to_owned()));
    }
    if model.dropout.is_some_and(|dropout| dropout != 0.0) {
        return Err(unsupported("merge dropout".to_owned()));
    }
    check_merges(&model)?;
    match part::<ModelWrapper>(path, "model", value)? {
        Some(ModelWrapper::BPE(bpe)) => Ok((bpe, model)),
        _ => Err(unsupported("a model that is not BPE".to_owned())),
    }
}

fn check_merges(model: &Model) -> Result<(), Error> {
    for (index, merge) in model.merges.iter().enumerate() {
        let (left, right) = merge.sides().unwrap_or_default();
        let refused = |reason| Error::Merge { index, merge: format!("{left} {right}"), reason };
        if left.is_empty() || right.is_empty() {
            return Err(refused("is not two tokens with a space between"));
        }
        if ![left, right].iter().all(|side| model.vocab.contains_key(*side)) {
            return Err(refused("names a token that is not in the vocabulary"));
        }
        if !model.vocab.contains_key(&[left, right].concat()) {
            return Err(refused("makes a token that is not in the vocabulary"));
        }
    }
    Ok(())
}

/// How the file's decoder undoes tokens, and whether it takes away a space at the start.
fn decoding(path: &Path, decoder: &Value) -> Result<(Encoding, bool), Error> {
    let steps = match decoder["decoders"].as_array() {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(decoder),
    };
    let step = |kind: &str| steps.iter().find(|step| step["type"] == kind);
    if step("ByteLevel").is_some() {
        return Ok((Encoding::ByteLevel, false));
    }
    if let Some(metaspace) = step("Metaspace") {
        let never = metaspace["prepend_scheme"] == "never" || metaspace["add_prefix_space"] == false;
        return Ok((Encoding::Metaspace, !never));
    }
    let replaces =
        step("Replace").is_some_and(|s| s["pattern"]["String"] == "\u{2581}" && s["content"] == " ");
    if replaces {
        let strips = step("Strip").is_some_and(|s| s["content"] == " " && s["start"] == 1);
        return Ok((Encoding::Metaspace, strips));
    }
    let what = format!("the decoder {}", decoder["type"].as_str().unwrap_or("(none)"));
    Err(Error::Unsupported {
        path: path.to_owned(),
        what,
        supported: "ByteLevel, Metaspace, and Replace of U+2581",
    })
}

/// All tokens by id; ids that neither the model nor an added token uses are holes.
fn table(path: &Path, model: &Model, added: &[Added], encoding: Encoding) -> Result<Vocab, Error> {
    let highest = model.vocab.values().copied().chain(added.iter().map(|a| a.id)).max();
    let len = highest.ok_or(Error::EmptyVocab)? as usize + 1;
    if len > model.vocab.len() + added.len() + MAX_HOLES {
        return Err(json(path, format!("the token id {} is far beyond the number of tokens", len - 1)));
    }
    let mut tokens: Vec<(&str, Kind)> = vec![("", Kind::Absent); len];
    for (text, &id) in &model.vocab {
        let byte = model.byte_fallback && byte_token(text).is_some();
        let kind = if byte { Kind::Byte } else { Kind::Normal };
        let old = std::mem::replace(&mut tokens[id as usize], (text.as_str(), kind));
        if old.1 != Kind::Absent {
            return Err(json(path, format!("the tokens {:?} and {text:?} have the same id {id}", old.0)));
        }
    }
    for Added { id, token } in added {
        let kind = if token.special { Kind::Control } else { Kind::UserDefined };
        let text = token.content.as_str();
        let (old_text, old_kind) = &tokens[*id as usize];
        let elsewhere = model.vocab.get(text).is_some_and(|other| other != id);
        if elsewhere || (*old_kind != Kind::Absent && *old_text != text) {
            return Err(json(
                path,
                format!("the added token {text:?} with the id {id} contradicts the vocabulary"),
            ));
        }
        tokens[*id as usize] = (text, kind);
    }
    Vocab::new(tokens.into_iter(), encoding)
}

/// What the post-processor puts in front of a text.
fn template_prefix(processor: Option<PostProcessorWrapper>) -> Result<Vec<u32>, Error> {
    let Some(processor) = processor else { return Ok(Vec::new()) };
    // A stand-in for the text, with an id that no vocabulary reaches.
    let text = Encoded::from_tokens(vec![Token::new(u32::MAX, String::new(), (0, 0))], 0);
    let processed = processor.process(text, None, true).map_err(super::pieces::library)?;
    Ok(processed.get_ids().iter().copied().take_while(|&id| id != u32::MAX).collect())
}

/// A token that the configuration names by its text, or by an object with it.
fn named(config: &Value, key: &'static str, vocab: &Vocab) -> Result<Option<u32>, Error> {
    let Some(text) = config[key].as_str().or(config[key]["content"].as_str()) else { return Ok(None) };
    vocab.id(text).map(Some).ok_or_else(|| Error::TokenText { key, text: text.to_owned() })
}

//! The innermost step: one word in, its ids out; as a model for the `tokenizers` crate.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::tokenizer::{AddedToken, AddedVocabulary, Model, Normalizer, Token};

use super::pairs::Pairs;
use super::spm::Spm;
use crate::Error;

/// How words become tokens.
pub(crate) enum Merger {
    /// Merges with ranks; the characters of the byte-level alphabet that the vocabulary lacks.
    Bpe { bpe: Box<BPE>, missing: Vec<(char, u8)> },
    /// The same, from a GGUF file.
    Pairs { pairs: Pairs, missing: Vec<(char, u8)> },
    /// Scores.
    Spm(Spm),
}

/// A merger, and the ids of the added tokens, which it never makes.
pub(crate) struct PieceModel {
    merger: Merger,
    added: HashMap<String, u32>,
}

impl PieceModel {
    pub(crate) fn new(merger: Merger, added: &[(u32, AddedToken)]) -> PieceModel {
        let added = added.iter().map(|(id, token)| (token.content.clone(), *id)).collect();
        PieceModel { merger, added }
    }

    /// The added tokens that `wanted` accepts, ready to be found in a text.
    pub(crate) fn matcher<N: Normalizer>(
        &self,
        added: &[(u32, AddedToken)],
        normalizer: Option<&N>,
        wanted: impl Fn(&AddedToken) -> bool,
    ) -> Result<AddedVocabulary, Error> {
        let mut matcher = AddedVocabulary::new();
        let tokens = added.iter().map(|(_, token)| token.clone()).filter(wanted);
        matcher.add_tokens(tokens, self, normalizer).map_err(library)?;
        Ok(matcher)
    }
}

type LibraryError = Box<dyn std::error::Error + Send + Sync>;

/// Our own errors come back out of the library as they went in.
pub(crate) fn library(error: LibraryError) -> Error {
    match error.downcast::<Error>() {
        Ok(ours) => *ours,
        Err(theirs) => Error::Library(theirs.to_string()),
    }
}

/// Refuses a word with a character that no token stands for.
fn check_letters(word: &str, missing: &[(char, u8)]) -> Result<(), Error> {
    match missing.iter().find(|(c, _)| word.contains(*c)) {
        Some(&(_, byte)) => Err(Error::Unencodable { byte }),
        None => Ok(()),
    }
}

/// As the library wants them; their texts and places are not asked for.
fn tokens(ids: Vec<u32>) -> Vec<Token> {
    ids.into_iter().map(|id| Token::new(id, String::new(), (0, 0))).collect()
}

impl Model for PieceModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> Result<Vec<Token>, LibraryError> {
        match &self.merger {
            Merger::Bpe { bpe, missing } => {
                check_letters(word, missing)?;
                bpe.tokenize(word)
            }
            Merger::Pairs { pairs, missing } => {
                check_letters(word, missing)?;
                Ok(tokens(pairs.encode(word)))
            }
            Merger::Spm(spm) => Ok(tokens(spm.encode(word)?)),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.added.get(token).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.added.iter().find(|(_, added)| **added == id).map(|(text, _)| text.clone())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.added.clone()
    }

    fn get_vocab_size(&self) -> usize {
        self.added.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>, LibraryError> {
        Err("this model is read-only".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        TrainerWrapper::BpeTrainer(BpeTrainer::default())
    }
}

//! The text side of a model: its tokenizer and its chat template.

use std::sync::Arc;

use minfer_model::Checkpoint;
use minfer_text::tokenizer::EncodeOptions;
use minfer_text::{ChatTemplate, Message, RenderOptions, Tokenizer};
use serde_json::Value as Json;

use crate::error::EngineError;

/// Tokenizer and template of a model.
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template, if the model has one.
    pub template: Option<ChatTemplate>,
}

impl Text {
    /// Reads both from a model file or directory.
    ///
    /// # Errors
    /// An unknown or damaged tokenizer, or a template that does not parse. A shape has no text.
    pub fn open(model: &Checkpoint) -> Result<Text, EngineError> {
        let (mut tokenizer, template) = match model {
            Checkpoint::Gguf(g) => {
                let template = g
                    .metadata()
                    .opt_string("tokenizer.chat_template")
                    .map_err(minfer_model::ModelError::from)?;
                (Tokenizer::from_gguf(g.metadata())?, template)
            }
            Checkpoint::Hf(d) => {
                let missing = || minfer_model::ModelError::BadSetting {
                    source_name: model.name(),
                    key: "tokenizer.json".to_string(),
                    why: "is missing; prompts cannot be tokenised without it".to_string(),
                };
                let path = d.tokenizer_json_path().ok_or_else(missing)?;
                (Tokenizer::from_hf(&path, d.tokenizer_config())?, d.chat_template())
            }
            Checkpoint::Shape(_) => {
                return Err(EngineError::BadOption {
                    what: "the model",
                    value: model.name(),
                    allowed: "a file or directory: a shape has no tokenizer",
                });
            }
        };
        if let Checkpoint::Hf(d) = model {
            tokenizer.add_end_tokens(&generation_end_tokens(d.generation_config()))?;
        }
        let special =
            |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default().to_string();
        let (bos, eos) = (special(tokenizer.bos()), special(tokenizer.eos()));
        let template = template.map(|t| ChatTemplate::new(t, &bos, &eos)).transpose()?;
        Ok(Text { tokenizer: Arc::new(tokenizer), template })
    }

    /// Tokens of a prompt as it stands, special tokens in it recognised.
    ///
    /// # Errors
    /// Text that the tokenizer cannot take.
    pub fn encode_raw(&self, prompt: &str) -> Result<Vec<u32>, EngineError> {
        Ok(self.tokenizer.encode(prompt, EncodeOptions { parse_special: true, add_bos: true })?)
    }

    /// Tokens of a conversation, rendered by the model's template up to where the assistant answers.
    ///
    /// # Errors
    /// [`EngineError::NoTemplate`], or a template that refuses the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, EngineError> {
        let template = self.template.as_ref().ok_or(EngineError::NoTemplate)?;
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let rendered = template.render(messages, &options)?;
        // Templates write the beginning-of-sequence token themselves where the model wants one.
        let bos = self.tokenizer.bos().and_then(|id| self.tokenizer.token_text(id));
        let add_bos = !bos.is_some_and(|bos| rendered.starts_with(bos));
        Ok(self.tokenizer.encode(&rendered, EncodeOptions { parse_special: true, add_bos })?)
    }
}

/// `eos_token_id` of `generation_config.json`: a number or a list.
fn generation_end_tokens(config: Option<&Json>) -> Vec<u32> {
    let value = config.and_then(|c| c.get("eos_token_id"));
    let number = |v: &Json| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Some(Json::Array(list)) => list.iter().filter_map(number).collect(),
        Some(v) => number(v).into_iter().collect(),
        None => Vec::new(),
    }
}

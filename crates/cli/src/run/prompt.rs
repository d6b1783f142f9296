//! Finding the prompt and turning it into tokens.

use std::io::{IsTerminal, Read, stdin};

use minfer_engine::{EngineError, Message, Text};

use crate::error::Failure;

/// More than any context holds; a stream without end stops here.
const MOST_BYTES: u64 = 64 << 20;

/// A prompt as asked for.
pub(crate) struct Prompt {
    /// `None`: on stdin.
    pub(crate) text: Option<String>,
    /// Without the model's template.
    pub(crate) raw: bool,
    pub(crate) system: Option<String>,
}

/// The prompt's tokens; reads stdin if it has to.
pub(crate) fn tokens(prompt: &Prompt, text: &Text) -> Result<Vec<u32>, Failure> {
    if !prompt.raw && text.template.is_none() {
        return Err(EngineError::NoTemplate.into());
    }
    let said = match &prompt.text {
        Some(said) => said.clone(),
        None => from_stdin()?,
    };
    // White space is a text to continue, but nothing to answer.
    if said.is_empty() || (!prompt.raw && said.trim().is_empty()) {
        return Err(Failure::Usage("the prompt is empty; give it as an argument or on stdin".to_string()));
    }
    if prompt.raw {
        return Ok(text.encode_raw(&said)?);
    }
    let system = prompt.system.iter().map(|s| Message::new("system", s));
    let messages: Vec<Message> = system.chain([Message::new("user", said)]).collect();
    Ok(text.encode_chat(&messages)?)
}

fn from_stdin() -> Result<String, Failure> {
    if stdin().is_terminal() {
        let end = if cfg!(windows) { "Ctrl-Z and Enter" } else { "Ctrl-D" };
        crate::note(format_args!("type the prompt; end it with {end} on a line of its own"));
    }
    let mut bytes = Vec::new();
    stdin().lock().take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(Failure::Stdin)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(Failure::StdinTooLong { limit: MOST_BYTES });
    }
    decode(bytes)
}

/// The newline that ends a line of a terminal or of `echo` is not part of the prompt.
fn decode(bytes: Vec<u8>) -> Result<String, Failure> {
    let mut said =
        String::from_utf8(bytes).map_err(|e| Failure::StdinNotUtf8 { at: e.utf8_error().valid_up_to() })?;
    if said.ends_with('\n') {
        said.pop();
        if said.ends_with('\r') {
            said.pop();
        }
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_newline_is_dropped() {
        let decode = |bytes: &[u8]| decode(bytes.to_vec()).map_err(|e| e.to_string());
        assert_eq!(decode(b"a\n\n"), Ok("a\n".to_string()));
        assert_eq!(decode(b"a\r\n"), Ok("a".to_string()));
        assert_eq!(decode(b"a"), Ok("a".to_string()));
        let error = "the prompt on stdin is not valid UTF-8 (first wrong byte at 2); convert it first";
        assert_eq!(decode(b"ab\xff"), Err(error.to_string()));
    }
}

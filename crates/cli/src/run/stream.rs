//! Generating: text to stdout piece by piece, then how it ended, how drafts fared and how fast it was on stderr.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use minfer_engine::{Engine, Finish, Generate, Generation, Text, Timings};

use crate::error::Failure;
use crate::{Outcome, speculation, units};

/// Generates to stdout until the model, a limit or Ctrl-C ends it.
pub(crate) fn generate(
    engine: &mut Engine,
    text: &Text,
    tokens: &[u32],
    options: &Generate,
) -> Result<Outcome, Failure> {
    let options = Generate { cancel: cancelled_by_interrupt()?, ..options.clone() };
    let (limit, model_limit) = (engine.context(), engine.hyper().context);
    let mut session = engine.session();
    let mut generation = session.generate(text, tokens, &options)?;
    let copied = copy(&mut generation, &mut io::stdout().lock());
    if let (Ok(()), Some(line)) = (&copied, generation.finish().and_then(|f| ending(f, limit, model_limit))) {
        crate::note(format_args!("{line}"));
    }
    if !matches!(copied, Err(Failure::ClosedPipe)) {
        if let Some(acceptance) = generation.acceptance() {
            crate::note(format_args!("drafts kept: {}", speculation::kept(acceptance)));
        }
        let cancelled = generation.finish() == Some(Finish::Cancelled);
        crate::note(format_args!("{}", speed(&generation.timings(), cancelled)));
    }
    copied?;
    match generation.finish() {
        Some(Finish::Cancelled) => Ok(Outcome::Interrupted),
        _ => Ok(Outcome::Done),
    }
}

/// A flag that the first Ctrl-C sets, to be seen between steps; the second ends the process at once.
fn cancelled_by_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    let seen = flag.clone();
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })?;
    Ok(flag)
}

/// Writes pieces as they come, and a newline at the end unless the text has one. An error ends the text
/// with a newline too, so that its message starts a line.
fn copy(generation: &mut Generation<'_, '_>, out: &mut impl Write) -> Result<(), Failure> {
    let mut ends_line = false;
    let mut result = Ok(());
    loop {
        match generation.next_piece() {
            Ok(Some(piece)) if piece.text.is_empty() => {}
            Ok(Some(piece)) => {
                ends_line = piece.text.ends_with('\n');
                out.write_all(piece.text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::stdout)?;
            }
            Ok(None) => break,
            Err(error) => {
                result = Err(error.into());
                break;
            }
        }
    }
    if !ends_line {
        out.write_all(b"\n").and_then(|()| out.flush()).map_err(Failure::stdout)?;
    }
    result
}

/// A line about an end that the user may not have wanted, and what to do about it.
fn ending(finish: Finish, limit: usize, model_limit: usize) -> Option<String> {
    match finish {
        Finish::MaxTokens => Some("stopped at the most tokens asked for; raise -n for more".to_string()),
        Finish::ContextFull if limit < model_limit => Some(format!(
            "stopped because the context of {limit} tokens is full; raise --ctx (up to {model_limit} for this model)"
        )),
        Finish::ContextFull => Some(format!(
            "stopped because the context of {limit} tokens is full, the longest that this model has; a shorter \
             prompt leaves more room"
        )),
        Finish::EndToken | Finish::StopString | Finish::Cancelled => None,
    }
}

fn speed(t: &Timings, cancelled: bool) -> String {
    if cancelled && t.generated_tokens == 0 {
        // How much of the prompt was processed is not known, so there is no speed to tell.
        return format!("stopped before the first token, {:.1} s into the prompt", t.prompt.as_secs_f64());
    }
    let prompt = format!("prompt {}, {:.1} tok/s", units::plural(t.prompt_tokens, "token"), t.prompt_speed());
    let generated = format!("generated {}", units::plural(t.generated_tokens, "token"));
    match t.generated_tokens {
        // The first token comes out of the prompt's last step: one has no speed of its own.
        0 | 1 => format!("{prompt}; {generated}"),
        _ => format!("{prompt}; {generated}, {:.1} tok/s", t.generation_speed()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn lines() {
        let t = Timings {
            prompt_tokens: 24,
            prompt: Duration::from_millis(48),
            generated_tokens: 41,
            generation: Duration::from_millis(200),
        };
        assert_eq!(speed(&t, false), "prompt 24 tokens, 500.0 tok/s; generated 41 tokens, 200.0 tok/s");
        let one = Timings { generated_tokens: 1, ..t };
        assert_eq!(speed(&one, true), "prompt 24 tokens, 500.0 tok/s; generated 1 token");
        let none = Timings { generated_tokens: 0, ..t };
        assert_eq!(speed(&none, true), "stopped before the first token, 0.0 s into the prompt");
        assert!(ending(Finish::MaxTokens, 1, 1).unwrap().contains("raise -n"));
        assert!(ending(Finish::ContextFull, 100, 2048).unwrap().contains("raise --ctx (up to 2048"));
        assert!(ending(Finish::ContextFull, 2048, 2048).unwrap().contains("longest"));
        assert_eq!(ending(Finish::EndToken, 1, 1), None);
    }
}

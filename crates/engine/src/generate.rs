//! Generating text: sample, step, detokenise, stop.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use minfer_text::{StopStrings, TokenStream};

use crate::error::EngineError;
use crate::sampler::{Sampler, SamplerOptions};
use crate::session::Session;
use crate::text::Text;

/// What to generate.
#[derive(Clone, Debug)]
pub struct Generate {
    /// Most tokens to generate; `None`: until the model ends or the context is full.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Generation ends before any of these strings.
    pub stop: Vec<String>,
    /// Go on past tokens that end a turn or a document.
    pub ignore_end: bool,
    /// Leave special tokens out of the text.
    pub skip_special: bool,
    /// Set from outside to stop; looked at between steps.
    pub cancel: Arc<AtomicBool>,
}

impl Default for Generate {
    fn default() -> Generate {
        Generate {
            max_tokens: None,
            sampler: SamplerOptions::default(),
            stop: Vec::new(),
            ignore_end: false,
            skip_special: true,
            cancel: Arc::default(),
        }
    }
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Finish {
    /// The model ended its turn.
    EndToken,
    /// A stop string would have come next.
    StopString,
    MaxTokens,
    ContextFull,
    Cancelled,
}

/// A step of generation: the token and the text that became certain with it (often empty or several
/// characters, since characters and stop strings cross token borders).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Piece {
    /// `None` for the text that was held back until the end.
    pub token: Option<u32>,
    pub text: String,
}

/// How long the two phases took.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Timings {
    pub prompt_tokens: usize,
    pub prompt: Duration,
    /// Tokens generated, and the time of the steps that made them after the first.
    pub generated_tokens: usize,
    pub generation: Duration,
}

impl Timings {
    /// Prompt tokens per second.
    pub fn prompt_speed(&self) -> f64 {
        self.prompt_tokens as f64 / self.prompt.as_secs_f64().max(1e-9)
    }

    /// Generated tokens per second; the first comes out of the prompt's last step and does not count.
    pub fn generation_speed(&self) -> f64 {
        self.generated_tokens.saturating_sub(1) as f64 / self.generation.as_secs_f64().max(1e-9)
    }
}

/// A generation in progress.
pub struct Generation<'s, 'e> {
    session: &'s mut Session<'e>,
    sampler: Sampler,
    stream: TokenStream,
    stops: StopStrings,
    end_tokens: Vec<u32>,
    max_tokens: usize,
    ignore_end: bool,
    cancel: Arc<AtomicBool>,
    /// Logits for the next token; `None` when the last token has not been stepped yet.
    logits: Option<Vec<f32>>,
    /// Sampled, but not yet in the cache.
    pending: Option<u32>,
    /// Pieces made when generation ended.
    tail: VecDeque<Piece>,
    finish: Option<Finish>,
    timings: Timings,
}

impl<'s, 'e> Generation<'s, 'e> {
    pub(crate) fn start(
        session: &'s mut Session<'e>,
        text: &Text,
        prompt: &[u32],
        options: &Generate,
    ) -> Result<Generation<'s, 'e>, EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let sampler = Sampler::new(&options.sampler)?;
        let stops = StopStrings::new(options.stop.iter().cloned())?;
        let (started, before) = (Instant::now(), session.tokens().len());
        let logits = session.append(prompt, &mut || !options.cancel.load(Ordering::Relaxed))?;
        // A cancelled prompt has been processed in part.
        let prompt_tokens = session.tokens().len() - before;
        let timings = Timings { prompt_tokens, prompt: started.elapsed(), ..Timings::default() };
        Ok(Generation {
            session,
            sampler,
            stream: text.tokenizer.stream(options.skip_special),
            stops,
            end_tokens: text.tokenizer.end_tokens().to_vec(),
            max_tokens: options.max_tokens.unwrap_or(usize::MAX),
            ignore_end: options.ignore_end,
            cancel: options.cancel.clone(),
            finish: logits.is_none().then_some(Finish::Cancelled),
            logits,
            pending: None,
            tail: VecDeque::new(),
            timings,
        })
    }

    /// The next piece, or `None` when generation has ended.
    ///
    /// # Errors
    /// A step that fails, or logits that are not numbers.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, EngineError> {
        if self.finish.is_none()
            && let Some(piece) = self.advance()?
        {
            return Ok(Some(piece));
        }
        Ok(self.tail.pop_front())
    }

    /// Why generation ended; `None` while it goes on.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Times so far.
    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// One token further; `None` when that ended the generation.
    fn advance(&mut self) -> Result<Option<Piece>, EngineError> {
        if self.cancel.load(Ordering::Relaxed) {
            return Ok(self.end(Finish::Cancelled));
        }
        if self.timings.generated_tokens >= self.max_tokens {
            return Ok(self.end(Finish::MaxTokens));
        }
        let started = Instant::now();
        if !self.step_pending()? {
            return Ok(self.end(Finish::ContextFull));
        }
        let Some(logits) = self.logits.take() else { return Ok(self.end(Finish::Cancelled)) };
        let position = self.session.tokens().len();
        let token = self.sampler.sample(logits, self.session.tokens());
        let token = token.ok_or(EngineError::NotANumber { position })?;
        self.timings.generated_tokens += 1;
        if self.timings.generated_tokens > 1 {
            self.timings.generation += started.elapsed();
        }
        self.pending = Some(token);
        if self.end_tokens.contains(&token) && !self.ignore_end {
            // The end token joins the sequence, so that a continued conversation has it; a full context
            // cannot take it, and then nothing can follow either.
            let _ = self.step_pending()?;
            return Ok(self.end(Finish::EndToken));
        }
        let text = self.stream.push(token);
        let outcome = self.stops.push(&text);
        if outcome.stopped.is_some() {
            self.finish = Some(Finish::StopString);
        }
        Ok(Some(Piece { token: Some(token), text: outcome.emit }))
    }

    /// Puts the last sampled token into the cache; false when the context is full.
    fn step_pending(&mut self) -> Result<bool, EngineError> {
        let Some(token) = self.pending else { return Ok(true) };
        if self.session.tokens().len() >= self.session.engine.context() {
            return Ok(false);
        }
        self.logits = self.session.append(&[token], &mut || true)?;
        self.pending = None;
        Ok(true)
    }

    /// Ends, releasing the text that was held back.
    fn end(&mut self, finish: Finish) -> Option<Piece> {
        self.finish = Some(finish);
        let text = self.stream.finish();
        let outcome = self.stops.push(&text);
        let mut text = outcome.emit;
        if outcome.stopped.is_none() {
            text.push_str(&self.stops.finish());
        }
        if !text.is_empty() {
            self.tail.push_back(Piece { token: None, text });
        }
        None
    }
}

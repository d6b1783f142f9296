//! Generating text: sample, step, detokenise, stop.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use minfer_text::{StopStrings, TokenStream};

use crate::error::EngineError;
use crate::sampler::{Sampler, SamplerOptions};
use crate::session::Session;
use crate::speculate::{Acceptance, Speculate, Speculator};
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
    /// Whether to draft and verify several tokens per step; the text is the same. Needs greedy decoding, an
    /// engine opened with [`crate::EngineOptions::draft`], and a session that is empty.
    pub speculate: Speculate,
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
            speculate: Speculate::Off,
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

/// The speculator that the options ask for.
fn speculator(session: &Session<'_>, options: &Generate) -> Result<Option<Speculator>, EngineError> {
    let Speculate::Head { depth } = options.speculate else { return Ok(None) };
    if options.sampler.temperature != 0.0 {
        return Err(EngineError::SpeculationNeedsGreedy);
    }
    if !session.engine.has_draft() {
        return Err(EngineError::NoDraftHead);
    }
    if !(1..=Speculate::MAX_DEPTH).contains(&depth) {
        let value = depth.to_string();
        return Err(EngineError::BadOption { what: "the depth of speculation", value, allowed: "1 to 7" });
    }
    if !session.tokens().is_empty() {
        let value = format!("a session of {} tokens", session.tokens().len());
        return Err(EngineError::BadOption {
            what: "the start of speculation",
            value,
            allowed: "an empty session",
        });
    }
    Ok(Some(Speculator::new(depth)))
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
    speculator: Option<Speculator>,
    /// Tokens that a round of speculation has brought, and whether each is in the cache.
    ready: VecDeque<(u32, bool)>,
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
        let mut speculator = speculator(session, options)?;
        let (started, before) = (Instant::now(), session.tokens().len());
        let keep_going = &mut || !options.cancel.load(Ordering::Relaxed);
        let logits = session.append_with(prompt, keep_going, speculator.as_mut())?;
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
            speculator,
            ready: VecDeque::new(),
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
        if self.ready.is_empty() && !self.step_pending()? {
            return Ok(self.end(Finish::ContextFull));
        }
        let Some((token, in_cache)) = self.next_token()? else { return Ok(self.end(Finish::Cancelled)) };
        self.timings.generated_tokens += 1;
        if self.timings.generated_tokens > 1 {
            self.timings.generation += started.elapsed();
        }
        self.pending = (!in_cache).then_some(token);
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

    /// The token that comes next: from the last round of speculation, or sampled from the logits. `None`
    /// when there are none, because the prompt was cancelled.
    fn next_token(&mut self) -> Result<Option<(u32, bool)>, EngineError> {
        if let Some(ready) = self.ready.pop_front() {
            return Ok(Some(ready));
        }
        let Some(logits) = self.logits.take() else { return Ok(None) };
        let position = self.session.tokens().len();
        let token = self.sampler.sample(logits, self.session.tokens());
        Ok(Some((token.ok_or(EngineError::NotANumber { position })?, false)))
    }

    /// How drafts fared so far.
    pub fn acceptance(&self) -> Option<&Acceptance> {
        self.speculator.as_ref().map(|s| &s.acceptance)
    }

    /// A round of speculation behind `token`.
    fn speculate(&mut self, token: u32) -> Result<(), EngineError> {
        let Some(speculator) = &mut self.speculator else { return Ok(()) };
        let (sampler, end_tokens) = (&mut self.sampler, &self.end_tokens);
        let ignore_end = self.ignore_end;
        let limit = self.max_tokens.saturating_sub(self.timings.generated_tokens + 1);
        let round = speculator.round(
            self.session.engine,
            self.session.id,
            token,
            limit,
            &mut |logits, history| sampler.sample(logits.to_vec(), history),
            &|t| !ignore_end && end_tokens.contains(&t),
        )?;
        self.ready = round.accepted.into_iter().map(|t| (t, true)).collect();
        self.ready.extend(round.next.map(|t| (t, false)));
        Ok(())
    }

    /// Puts the last sampled token into the cache; false when the context is full.
    fn step_pending(&mut self) -> Result<bool, EngineError> {
        let Some(token) = self.pending else { return Ok(true) };
        if self.session.tokens().len() >= self.session.engine.context() {
            return Ok(false);
        }
        let ended = self.end_tokens.contains(&token) && !self.ignore_end;
        if self.speculator.is_some() && !ended {
            self.speculate(token)?;
            self.pending = None;
            return Ok(true);
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

//! Chat templates: a model's own Jinja template turns messages into its prompt.
//!
//! In: the template's source, messages, tools and free variables. Out: the prompt. The environment is the
//! one that Hugging Face `transformers` gives a template (`python.rs` has what differs from minijinja's
//! own): the same variables, whitespace rules, `tojson`, `raise_exception` and `strftime_now`. A template
//! sees no files and no other templates, and the limits below bound it. One gap is known: the engine joins
//! lists (`a + a`) without charging for it, so a template written for that purpose can still exhaust memory.
//!
//! A template that needs something unknown is refused with the construct and its line; no other template
//! takes its place.

mod clock;
mod errors;
mod python;
mod source;

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error as JinjaError, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::Map;

use crate::Error;
use errors::{Raised, TooLong};

/// Work that one rendering may do, in minijinja's fuel: about one unit per instruction and per 64 bytes
/// produced or processed. It also bounds what a template can allocate (256 MiB).
pub const MAX_FUEL: u64 = 4_000_000;
/// Nesting of blocks, macros and calls.
pub const MAX_RECURSION: usize = 200;
/// Bytes of a rendered prompt.
pub const MAX_OUTPUT: usize = 32 << 20;

/// Bytes of a template's source; the longest known ones have a tenth of it.
pub const MAX_SOURCE: usize = 128 << 10;

/// Bytes of one `{{ }}` or `{% %}`; the longest known ones have a quarter of it. The engine evaluates long
/// constant expressions in more than quadratic time when it parses them.
pub const MAX_TAG: usize = 8 << 10;

/// Bytes of stack, reserved and hardly used by ordinary templates. The engine parses some expressions by
/// unbounded recursion, and drops by recursion what a template nested as deep as its fuel allows.
const STACK: usize = 512 << 20;

const NAME: &str = "chat_template";

/// One message of a conversation, in the form of the OpenAI API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// Normally a string; `null` for an assistant that only calls tools.
    #[serde(default)]
    pub content: serde_json::Value,
    /// `tool_calls`, `reasoning_content`, `name`, `tool_call_id` and whatever else a template reads.
    #[serde(flatten)]
    pub extra: Map<String, serde_json::Value>,
}

impl Message {
    /// A message with text and nothing else.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Message {
        Message { role: role.into(), content: serde_json::Value::String(text.into()), extra: Map::new() }
    }
}

/// What a template is told besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// End with the start of an assistant message.
    pub add_generation_prompt: bool,
    /// Tool definitions (a list of JSON schemas).
    pub tools: Option<serde_json::Value>,
    /// Further variables, such as `enable_thinking`.
    pub extra: Map<String, serde_json::Value>,
    /// The time that `strftime_now` shows, in UTC; the system's clock if absent.
    pub now: Option<SystemTime>,
}

/// A parsed template with the texts of its special tokens.
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.source).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Parses a template; `bos` and `eos` are the texts of the model's tokens (empty if it has none).
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate, Error> {
        if source.len() > MAX_SOURCE {
            return Err(Error::TemplateLimit { what: format!("{MAX_SOURCE} bytes of source"), line: 0 });
        }
        if let Some(line) = source::line_of_longer_tag(source, MAX_TAG) {
            return Err(Error::TemplateLimit { what: format!("{MAX_TAG} bytes for one tag"), line });
        }
        let env = on_large_stack(|| {
            let mut env = environment().map_err(errors::convert)?;
            env.add_template_owned(NAME, source::without_generation_tags(source)).map_err(errors::convert)?;
            Ok(env)
        })?;
        Ok(ChatTemplate { env, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for a conversation.
    pub fn render(&self, messages: &[Message], opts: &RenderOptions) -> Result<String, Error> {
        on_large_stack(|| self.render_here(messages, opts))
    }

    fn render_here(&self, messages: &[Message], opts: &RenderOptions) -> Result<String, Error> {
        let mut out = Capped(Vec::new());
        let template = self.env.get_template(NAME).map_err(errors::convert)?;
        template.render_captured_to(self.variables(messages, opts), &mut out).map_err(errors::convert)?;
        Ok(String::from_utf8_lossy(&out.0).into_owned())
    }

    /// The variables of `transformers`; absent tools and documents are `none`, not undefined.
    fn variables(&self, messages: &[Message], opts: &RenderOptions) -> Value {
        let none = || Value::from(());
        let now = opts.now.unwrap_or_else(SystemTime::now);
        let ours = [
            ("messages", Value::from(Serde(messages))),
            ("tools", opts.tools.as_ref().map_or_else(none, |tools| Value::from(Serde(tools)))),
            ("add_generation_prompt", Value::from(opts.add_generation_prompt)),
            ("bos_token", Value::from(self.bos.as_str())),
            ("eos_token", Value::from(self.eos.as_str())),
            ("strftime_now", Value::from_function(move |format: &str| clock::strftime(now, format))),
        ];
        let extra = opts.extra.iter().map(|(key, value)| (key.as_str(), Value::from(Serde(value))));
        Value::from_pairs([("documents", none())].into_iter().chain(extra).chain(ours))
    }
}

/// Runs `work` on a thread of its own with [`STACK`]; a panic of the engine becomes an error.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |detail: &str| Error::TemplateFailed { line: 0, detail: detail.to_owned() };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK);
        let working = thread.spawn_scoped(scope, work);
        let working = working.map_err(|e| failed(&format!("there is no thread to run it on: {e}")))?;
        working.join().unwrap_or_else(|_| Err(failed("the template engine panicked")))
    })
}

fn environment() -> Result<Environment<'static>, JinjaError> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    let mut env = Environment::new();
    env.set_syntax(syntax);
    env.set_fuel(Some(MAX_FUEL));
    env.set_recursion_limit(MAX_RECURSION);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(python::format);
    env.add_filter("tojson", python::tojson);
    env.add_filter("string", python::string);
    env.add_test("iterable", python::is_iterable);
    env.add_function("raise_exception", raise_exception);
    Ok(env)
}

fn raise_exception(message: Option<Value>, kwargs: Kwargs) -> Result<Value, JinjaError> {
    kwargs.assert_all_used()?;
    let message = message.map(|message| message.to_string()).unwrap_or_default();
    Err(JinjaError::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// A buffer that refuses to grow beyond [`MAX_OUTPUT`].
struct Capped(Vec<u8>);

impl std::io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > MAX_OUTPUT - self.0.len() {
            return Err(std::io::Error::other(TooLong));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

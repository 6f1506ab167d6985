//! Chat templates: the Jinja program in a model's files that turns messages into a prompt.
//!
//! Templates are written for Hugging Face's environment (`utils/chat_template_utils.py` in transformers).
//! This module builds that environment in minijinja: trimmed blocks, Python's string methods,
//! `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, and `{% generation %}` (a mark
//! for training) without effect.
//!
//! A template is a program by the model's author that runs on untrusted messages, so its steps (fuel), depth
//! and output bytes are bounded. A template can reach only its variables. The memory of a string that the
//! template builds by doubling is not bounded here, so templates of tenants run in a
//! [`TemplateSandbox`](crate::sandbox::TemplateSandbox).

mod json;
mod time;

use std::{
    fmt, io,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{Environment, ErrorKind, Value, context, syntax::SyntaxConfig, value::Serde};
use serde::{Deserialize, Serialize};

/// Name of the compiled template in error messages.
const NAME: &str = "chat_template";

/// Maximum length of an error message from a template or about it.
const MAX_MESSAGE_CHARS: usize = 1000;

/// Bounds on one rendering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of executed template instructions.
    pub fuel: u64,
    /// Maximum nesting depth of macros and blocks; a macro counts as four.
    pub depth: usize,
    /// Maximum size of the rendered prompt in bytes.
    pub output_bytes: usize,
}

impl Default for Limits {
    /// Exceeds by far the needs of most templates for a full context: about 100 instructions a message, and
    /// four bytes for each of a million tokens. Some templates search all messages for each message, or
    /// walk tool schemas by recursive macros, which takes about 200 instructions a property.
    fn default() -> Self {
        Self { fuel: 4_000_000, depth: 256, output_bytes: 4 << 20 }
    }
}

/// Why a template could not be used or rendered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum TemplateError {
    /// The template is not Jinja that this environment understands.
    #[error("the model's chat template cannot be compiled: {0}; use the completions API or another model")]
    Syntax(String),
    /// The template refuses these messages by `raise_exception`.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The rendering exceeds one of the [`Limits`].
    #[error("rendering the chat template needs more than {limit}; send fewer or shorter messages")]
    Limit {
        /// The exceeded limit, with its value.
        limit: String,
    },
    /// The last message has no text, or the template does not show it as it is.
    #[error(
        "the model's chat template omits the text of the last message, so it cannot be continued; remove \
         'continue_final_message'"
    )]
    NotContinued,
    /// Any other error, for instance a message without a field that the template needs.
    #[error("the model's chat template cannot render these messages: {0}; check their roles and fields")]
    Render(String),
    /// No process could render the template.
    #[error("the chat template could not be rendered: {0}; send the request again")]
    Unavailable(String),
}

/// Whether the prompt ends with the header of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GenerationPrompt {
    /// The prompt ends with the header of the assistant's answer.
    Add,
    /// The prompt ends with the last message.
    Omit,
    /// The prompt ends with the last message's text, which the model continues.
    Continue,
}

/// Marks the end of the text to be continued while it is rendered, as in transformers. The space at its end
/// shows whether the template trims texts.
const END: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The texts of special tokens that templates use as variables; `None` leaves the variable undefined.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateTokens {
    /// Value of the variable `bos_token`.
    pub bos: Option<String>,
    /// Value of the variable `eos_token`.
    pub eos: Option<String>,
    /// Value of the variable `pad_token`.
    pub pad: Option<String>,
}

/// A chat template that can be rendered, in this process or in another.
pub trait RenderTemplate: fmt::Debug + Send + Sync {
    /// Renders the prompt for `messages` at a given time, which `strftime_now` shows in UTC. `extra` holds
    /// further variables (`tools`, `documents`, `enable_thinking`, ...), which do not replace those of the
    /// environment.
    ///
    /// # Errors
    /// If the template refuses the messages, fails on them or exceeds a limit.
    fn render_at(
        &self,
        messages: &[serde_json::Value],
        prompt: GenerationPrompt,
        extra: &serde_json::Map<String, serde_json::Value>,
        now: SystemTime,
    ) -> Result<String, TemplateError>;

    /// Renders like [`RenderTemplate::render_at`], now.
    ///
    /// # Errors
    /// If the template refuses the messages, fails on them or exceeds a limit.
    fn render(
        &self,
        messages: &[serde_json::Value],
        prompt: GenerationPrompt,
        extra: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TemplateError> {
        self.render_at(messages, prompt, extra, SystemTime::now())
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: TemplateTokens,
    limits: Limits,
}

impl ChatTemplate {
    /// Compiles the template in `source`.
    ///
    /// # Errors
    /// If `source` is not valid Jinja.
    pub fn new(source: &str, tokens: TemplateTokens, limits: Limits) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| syntax_error(&error))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", json::tojson);
        // Jinja2 would treat `none` as not iterable, and templates rely on that before they count the tools.
        environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        // Without this, debug builds quote the whole conversation in errors.
        environment.set_debug(false);
        environment.set_fuel(Some(limits.fuel));
        environment.set_recursion_limit(limits.depth);
        let source = without_generation_tags(source);
        environment.add_template_owned(NAME, source).map_err(|error| syntax_error(&error))?;
        Ok(Self { environment, tokens, limits })
    }

    fn render_whole(
        &self,
        messages: &[serde_json::Value],
        prompt: GenerationPrompt,
        extra: &serde_json::Map<String, serde_json::Value>,
        now: SystemTime,
    ) -> Result<String, TemplateError> {
        let now_s = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let own = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => prompt == GenerationPrompt::Add,
            strftime_now => Value::from_function(move |format: &str| time::strftime(now_s, format)),
            ..self.token_variables()
        };
        // Templates test `tools is not none`, so both variables are always defined, as in transformers.
        let absent = context! { tools => Value::from(()), documents => Value::from(()) };
        let variables = context! { ..own, ..Value::from(Serde(extra)), ..absent };
        let mut output = Bounded { bytes: Vec::new(), limit: self.limits.output_bytes, exceeded: false };
        let template = self.environment.get_template(NAME).map_err(|error| self.classify(&error))?;
        let rendered = template.render_captured_to(variables, &mut output).map(|_| ());
        if output.exceeded {
            return Err(TemplateError::Limit { limit: format!("{} bytes of output", output.limit) });
        }
        rendered.map_err(|error| self.classify(&error))?;
        // The template engine writes only valid UTF-8.
        Ok(String::from_utf8_lossy(&output.bytes).into_owned())
    }

    fn token_variables(&self) -> Value {
        let TemplateTokens { bos, eos, pad } = &self.tokens;
        let named = [("bos_token", bos), ("eos_token", eos), ("pad_token", pad)];
        Value::from_pairs(named.into_iter().filter_map(|(name, token)| Some((name, token.clone()?))))
    }

    fn classify(&self, error: &minijinja::Error) -> TemplateError {
        if let Some(refusal) = refusal(error) {
            return TemplateError::Refused(shortened(&refusal.0));
        }
        if error.kind() == ErrorKind::OutOfFuel {
            return TemplateError::Limit { limit: format!("{} steps", self.limits.fuel) };
        }
        TemplateError::Render(shortened(&error.to_string()))
    }
}

impl RenderTemplate for ChatTemplate {
    fn render_at(
        &self,
        messages: &[serde_json::Value],
        prompt: GenerationPrompt,
        extra: &serde_json::Map<String, serde_json::Value>,
        now: SystemTime,
    ) -> Result<String, TemplateError> {
        if prompt == GenerationPrompt::Continue {
            let rendered = self.render_whole(&marked(messages)?, prompt, extra, now)?;
            return up_to_mark(rendered);
        }
        self.render_whole(messages, prompt, extra, now)
    }
}

fn syntax_error(error: &minijinja::Error) -> TemplateError {
    TemplateError::Syntax(shortened(&error.to_string()))
}

/// Bounds a message, since a template may raise one of any length.
fn shortened(message: &str) -> String {
    message.chars().take(MAX_MESSAGE_CHARS).collect()
}

/// Returns the messages with [`END`] appended to the last one's text.
fn marked(messages: &[serde_json::Value]) -> Result<Vec<serde_json::Value>, TemplateError> {
    let mut messages = messages.to_vec();
    let last = messages.last_mut().and_then(|message| message.get_mut("content"));
    let Some(serde_json::Value::String(text)) = last else { return Err(TemplateError::NotContinued) };
    text.push_str(END);
    Ok(messages)
}

/// Cuts the rendered text at [`END`].
fn up_to_mark(mut rendered: String) -> Result<String, TemplateError> {
    let at = rendered.rfind(END.trim_end()).ok_or(TemplateError::NotContinued)?;
    let is_trimmed = !rendered[at..].starts_with(END);
    rendered.truncate(at);
    if is_trimmed {
        rendered.truncate(rendered.trim_end().len());
    }
    Ok(rendered)
}

/// Message that a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    let error = minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception");
    Err(error.with_source(Refusal(message)))
}

/// Returns the template's refusal among the sources of `error`, if any.
fn refusal(error: &minijinja::Error) -> Option<&Refusal> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(refusal) = cause.downcast_ref() {
            return Some(refusal);
        }
        source = cause.source();
    }
    None
}

/// A writer that fails at its limit.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
    exceeded: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            self.exceeded = true;
            return Err(io::Error::other("the output limit is reached"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces `{% generation %}` and `{% endgeneration %}` by a condition that is always true, because
/// whitespace is trimmed around it as around the tags.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        let inside = tag.trim_start_matches(['-', '+']);
        let (control, inside) = tag.split_at(tag.len() - inside.len());
        out.push_str(control);
        rest = inside;
        let word = inside.trim_start();
        for (name, condition) in [("generation", " if true "), ("endgeneration", " endif ")] {
            let Some(end) = word.strip_prefix(name).map(str::trim_start) else {
                continue;
            };
            if end.starts_with("%}") || end.starts_with("-%}") || end.starts_with("+%}") {
                out.push_str(condition);
                rest = end;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn template(source: &str, limits: Limits) -> ChatTemplate {
        ChatTemplate::new(source, TemplateTokens::default(), limits).unwrap()
    }

    fn render(source: &str) -> Result<String, TemplateError> {
        template(source, Limits::default()).render(&[], GenerationPrompt::Omit, &Map::new())
    }

    #[test]
    fn a_template_can_refuse_messages_in_its_own_words() {
        let error =
            render("{% if not messages %}{{ raise_exception('No <messages>!') }}{% endif %}").unwrap_err();
        assert!(matches!(&error, TemplateError::Refused(text) if text == "No <messages>!"), "{error:?}");
        let in_macro = "{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}";
        assert!(matches!(render(in_macro).unwrap_err(), TemplateError::Refused(text) if text == "deep"));
    }

    #[test]
    fn endless_work_runs_out_of_fuel() {
        let error =
            render("{% for a in range(90000) %}{% for b in range(90000) %}{{ b }}{% endfor %}{% endfor %}");
        assert!(matches!(error.unwrap_err(), TemplateError::Limit { limit } if limit == "4000000 steps"));
    }

    #[test]
    fn endless_output_is_cut_off() {
        let limits = Limits { output_bytes: 1000, ..Limits::default() };
        let long = template("{% for a in range(200) %}{{ 'abcdef' }}{% endfor %}", limits);
        let error = long.render(&[], GenerationPrompt::Omit, &Map::new()).unwrap_err();
        assert!(matches!(error, TemplateError::Limit { limit } if limit == "1000 bytes of output"));
        let short = template("{% for a in range(100) %}{{ 'abcdef' }}{% endfor %}", limits);
        assert_eq!(short.render(&[], GenerationPrompt::Omit, &Map::new()).unwrap().len(), 600);
    }

    #[test]
    fn endless_recursion_is_an_error() {
        // The stack is half of a thread's default; no recursion may overflow it.
        let small = std::thread::Builder::new().stack_size(1 << 20);
        let recursion = || render("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}").unwrap_err();
        let error = small.spawn(recursion).unwrap().join().unwrap();
        assert!(matches!(error, TemplateError::Render(_)), "{error:?}");
    }

    #[test]
    fn a_template_that_is_no_jinja_is_refused() {
        let error = ChatTemplate::new("{% if %}", TemplateTokens::default(), Limits::default()).unwrap_err();
        assert!(matches!(error, TemplateError::Syntax(_)));
    }

    #[test]
    fn extra_variables_do_not_replace_the_messages() {
        let Ok(serde_json::Value::Object(extra)) =
            serde_json::from_value(json!({"messages": "forged", "strftime_now": 1, "colour": "red"}))
        else {
            panic!("an object")
        };
        let colour = template("{{ messages | length }} {{ colour }} {{ tools }}", Limits::default());
        let text = colour.render(&[json!({"role": "user"})], GenerationPrompt::Omit, &extra).unwrap();
        assert_eq!(text, "1 red None");
    }

    #[test]
    fn tools_that_are_not_there_are_not_iterable() {
        let source =
            "{{ tools is iterable and tools | length > 0 }} {{ '' is iterable }} {{ 1 is iterable }}";
        assert_eq!(render(source).unwrap(), "False True False");
    }

    #[test]
    fn only_generation_tags_are_rewritten() {
        let source = "{%- generation -%}a{%endgeneration%}{% generations %}{{ generation }}";
        let expected = "{%- if true -%}a{% endif %}{% generations %}{{ generation }}";
        assert_eq!(without_generation_tags(source), expected);
    }
}

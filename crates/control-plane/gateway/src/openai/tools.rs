//! Tools: functions of a caller's that a model may ask it to call.
//!
//! # Layout
//!
//! - [`tool_params`]: the tools of a request, and whether the model has to call one.
//! - [`format`]: how models write calls, and which way a chat template shows its model.
//! - [`grammar`]: the grammar of an answer whose calls have to keep to their schemas.
//! - [`scan`] finds calls in an answer's text as it comes; [`scan_result`] is what it found. Four readers do it by format: `object`
//!   reads a JSON object, `bare` a whole answer that is one, `pythonic` a Python list (with literals by `python`), and `tagged`
//!   a call in tags, whose values have the [`parameter_kinds`] that the function takes.

mod bare;
pub mod format;
pub mod grammar;
mod object;
pub mod parameter_kinds;
mod python;
mod pythonic;
pub mod scan;
pub mod scan_result;
mod tagged;
pub mod tool_params;

use std::sync::Arc;

use serde_json::Value;
use settings::ToolCallParser;
use text::grammar::{Enforcement, GrammarError, Thought};

use self::{
    format::{ToolCallFormat, shows_tools},
    grammar::CallsError,
    parameter_kinds::Function,
    scan::Scanner,
    scan_result::{CallKind, ScanResult},
    tool_params::{CustomInput, Tool, Tools},
};
use super::structured::{self, GrammarSource, Structure};
use crate::{
    errors::ApiError,
    random::random_u64,
    text::{ChatMessage, Text},
};

/// How calls of tools are told from the text of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCallReader {
    /// How the model writes them.
    pub format: ToolCallFormat,
    /// Those there are.
    pub functions: Arc<[Function]>,
    /// The reading of text outside of tags.
    pub untagged: UntaggedCalls,
}

/// The reading of an answer that names a function without the tags that announce calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UntaggedCalls {
    /// A call, where models are known to forget the tags.
    MayCall,
    /// Text: calls keep to a grammar, which has the tags in it.
    Text,
}

impl ToolCallReader {
    /// For one answer.
    #[must_use]
    pub fn scanner(&self) -> Scanner {
        let scanner = Scanner::new(self.format, Arc::clone(&self.functions));
        if self.untagged == UntaggedCalls::Text { scanner.of_grammar() } else { scanner }
    }

    /// A number for a call that nobody else has. Templates of Mistral's take nine letters and digits alone.
    #[must_use]
    pub fn new_id(&self) -> String {
        match self.format {
            ToolCallFormat::Mistral => format!("{:09x}", random_u64() >> 28),
            _ => format!("call_{:016x}{:08x}", random_u64(), random_u64() >> 32),
        }
    }
}

/// Tools of a request, ready to be shown and read.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestTools {
    tools: Tools,
    /// How its calls are read.
    pub answering: ToolCallReader,
}

impl RequestTools {
    /// What `tools` mean to a model whose calls are written as `parser` says.
    ///
    /// # Errors
    /// The model can be shown no tools.
    pub fn new(tools: Tools, parser: ToolCallParser, text: &dyn Text) -> Result<Self, ApiError> {
        let template = text.facts().chat_template.as_deref();
        let shows = template.is_some_and(shows_tools);
        let format =
            ToolCallFormat::of(parser, template).filter(|_| shows).ok_or_else(|| no_tools(parser, shows))?;
        let function = |tool: &Tool| match tool.input {
            Some(_) => Function::custom(&tool.name),
            None => Function::new(&tool.name, &tool.parameters),
        };
        let functions = tools.list.iter().map(function).collect();
        Ok(Self { tools, answering: ToolCallReader { format, functions, untagged: UntaggedCalls::MayCall } })
    }

    /// What the chat template is to show.
    #[must_use]
    pub fn shown(&self) -> Vec<Value> {
        self.tools.list.iter().map(|tool| tool.definition.clone()).collect()
    }

    /// What the answer has to look like, if it has to, with `thought` before it; where it calls nothing, `answer` says that.
    ///
    /// # Errors
    /// Calls cannot be made to look like what they have to.
    pub fn grammar(
        &mut self,
        text: &dyn Text,
        answer: Option<&Structure>,
        thought: Option<Thought>,
    ) -> Result<Option<GrammarSource>, ApiError> {
        let format = self.answering.format;
        let announcement = format.announcement().and_then(|name| text.special_token(name));
        let field = if answer.is_some() { "tools' or 'response_format" } else { "tools" };
        let source = grammar::of(&self.tools, format, announcement, answer).and_then(|built| {
            let Some((grammar, warnings)) = built else { return Ok(None) };
            let source = grammar.source_behind(thought, Enforcement::Strict)?.text;
            let source = GrammarSource::new(source, field).with_warnings(warnings);
            Ok(Some(GrammarSource { param: "tools".to_owned(), parts: self.inputs()?, ..source }))
        });
        if !matches!(source, Ok(None)) {
            self.answering.untagged = UntaggedCalls::Text;
        }
        source.map_err(|error| match (error, answer) {
            (CallsError::Grammar(error), _) => structured::refused(field, &error).of("tools"),
            (CallsError::Beside, Some(answer)) => {
                ApiError::invalid(&answer.field, CallsError::Beside.to_string())
            }
            (error, _) => ApiError::invalid("tools", format!("'tools' cannot be used: {error}")),
        })
    }

    /// The grammars of custom tools' inputs, each with the field that asks for it.
    fn inputs(&self) -> Result<Vec<GrammarSource>, GrammarError> {
        let input = |tool: &Tool| match &tool.input {
            Some(CustomInput::Grammar { field, grammar }) => {
                Some(grammar.source().map(|source| GrammarSource::new(source, field)))
            }
            _ => None,
        };
        self.tools.callable().filter_map(input).collect()
    }
}

/// Whether a model whose calls are written as `parser` says can be shown tools.
#[must_use]
pub fn are_called(parser: ToolCallParser, text: &dyn Text) -> bool {
    let template = text.facts().chat_template.as_deref();
    template.is_some_and(shows_tools) && ToolCallFormat::of(parser, template).is_some()
}

fn no_tools(parser: ToolCallParser, shows: bool) -> ApiError {
    let why = match (parser, shows) {
        (ToolCallParser::None, _) => "this server is set to read no calls of tools (--tool-call-parser none)",
        (_, false) => "this model's chat template shows it no tools",
        (_, true) => {
            "this model's chat template shows tools in a way that is not known; its operator can say which with --tool-call-parser"
        }
    };
    let message = format!("'tools' is not supported here: {why}; leave it out of the request");
    ApiError::bad_request("unsupported_parameter", message).of("tools")
}

/// Refuses calls in a conversation that the model would not be shown.
///
/// # Errors
/// There are some, and its template has no place for them.
pub fn check_history(messages: &[ChatMessage], text: &dyn Text) -> Result<(), ApiError> {
    let is_about_tools = |message: &ChatMessage| !message.calls.is_empty() || message.answers.is_some();
    if !messages.iter().any(is_about_tools) {
        return Ok(());
    }
    if text.facts().chat_template.as_deref().is_some_and(shows_tools) {
        return Ok(());
    }
    let message = "this model's chat template shows no calls of tools; leave such messages out";
    Err(ApiError::bad_request("unsupported_parameter", message))
}

/// A part of a call as it goes out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCallDelta {
    /// Which call of the answer, counted from 0.
    pub index: usize,
    /// Bytes of its piece's text that stand before it.
    pub at: usize,
    /// The kind of tool that is called.
    pub kind: CallKind,
    /// Its number and its function, in its first part.
    pub begun: Option<(String, String)>,
    /// New text of its arguments, or of its input.
    pub arguments: String,
    /// New text of it as the model wrote it, tags included.
    pub written: String,
}

impl ToolCallDelta {
    /// Whether there is nothing in it for those who are told of calls.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.begun.is_none() && self.arguments.is_empty()
    }
}

/// Appends `found` to what goes out.
pub fn append(
    found: ScanResult,
    answering: &ToolCallReader,
    content: &mut String,
    calls: &mut Vec<ToolCallDelta>,
) {
    let before = content.len();
    content.push_str(&found.content);
    calls.extend(found.calls.into_iter().map(|piece| ToolCallDelta {
        index: piece.index,
        at: before + piece.at,
        kind: piece.kind,
        begun: piece.name.map(|name| (answering.new_id(), name)),
        arguments: piece.arguments,
        written: piece.written,
    }));
}

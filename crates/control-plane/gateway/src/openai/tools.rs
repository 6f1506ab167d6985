//! Tools: functions of the caller that a model may ask it to call.
//!
//! # Layout
//!
//! - [`tool_params`]: the tools of a request, and whether the model must call one.
//! - [`format`]: the formats in which models write calls, and how a chat template reveals its model's format.
//! - [`grammar`]: the grammar of an answer whose calls must match their schemas.
//! - [`scan`]: finds calls in a stream of text; [`scan_result`]: the calls found; [`call_collector`]: whole
//!   calls.
//! - `object`, `bare`, `pythonic`, `tagged`: readers of a JSON object, an answer that is only an object, a
//!   Python list, a call in tags; `python`: Python literals; [`parameter_kinds`]: the JSON types of
//!   parameters.

mod bare;
pub(crate) mod call_collector;
pub mod format;
pub(crate) mod grammar;
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
use text::grammar::{Enforcement, GrammarError, ReasoningPrefix};

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

/// Settings for separating tool calls from the text of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCallReader {
    pub format: ToolCallFormat,
    pub functions: Arc<[Function]>,
    pub untagged: UntaggedCalls,
}

/// Treatment of text that names a function without the tags that announce calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UntaggedCalls {
    /// The text may be a call, because some models forget the tags.
    MayCall,
    /// The text is no call, because a grammar forces the tags.
    Text,
}

impl ToolCallReader {
    #[must_use]
    pub fn scanner(&self) -> Scanner {
        let scanner = Scanner::new(self.format, Arc::clone(&self.functions));
        if self.untagged == UntaggedCalls::Text { scanner.of_grammar() } else { scanner }
    }

    /// Returns a random call id; Mistral's templates accept only nine letters and digits.
    #[must_use]
    pub(crate) fn new_id(&self) -> String {
        match self.format {
            ToolCallFormat::Mistral => format!("{:09x}", random_u64() >> 28),
            _ => format!("call_{:016x}{:08x}", random_u64(), random_u64() >> 32),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RequestTools {
    tools: Tools,
    pub answering: ToolCallReader,
}

impl RequestTools {
    /// Prepares `tools` for a model whose call format `parser` or the chat template determines.
    ///
    /// # Errors
    /// The chat template shows no tools, or its call format is unknown or disabled.
    pub(crate) fn new(tools: Tools, parser: ToolCallParser, text: &dyn Text) -> Result<Self, ApiError> {
        let template = text.info().chat_template.as_deref();
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

    #[must_use]
    pub(crate) fn shown(&self) -> Vec<Value> {
        self.tools.list.iter().map(|tool| tool.definition.clone()).collect()
    }

    /// Returns the grammar of the answer, if calls or the answer are constrained. `thought` comes before the
    /// answer; `answer` constrains answers without calls.
    ///
    /// # Errors
    /// The format or the schemas cannot be expressed as a grammar.
    pub(crate) fn grammar(
        &mut self,
        text: &dyn Text,
        answer: Option<&Structure>,
        thought: Option<ReasoningPrefix>,
    ) -> Result<Option<GrammarSource>, ApiError> {
        let format = self.answering.format;
        let field = if answer.is_some() { "tools' or 'response_format" } else { "tools" };
        let source =
            grammar::of(&self.tools, format, &|name| text.special_token(name), answer).and_then(|built| {
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
            (error, _) => ApiError::invalid("tools", format!("'tools' is not usable: {error}")),
        })
    }

    /// Returns the grammars of custom tools' inputs, each with the field that requests it.
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

/// True if the model can be shown tools and `parser` can read its calls.
#[must_use]
pub(crate) fn are_called(parser: ToolCallParser, text: &dyn Text) -> bool {
    let template = text.info().chat_template.as_deref();
    template.is_some_and(shows_tools) && ToolCallFormat::of(parser, template).is_some()
}

fn no_tools(parser: ToolCallParser, shows: bool) -> ApiError {
    let why = match (parser, shows) {
        (ToolCallParser::None, _) => "tool calls are off on this server (--tool-call-parser none)",
        (_, false) => "this model's chat template does not support tools",
        (_, true) => {
            "this model's tool-call format is unknown; the operator can set it with --tool-call-parser"
        }
    };
    let message = format!("'tools' is not supported here: {why}; remove it from the request");
    ApiError::bad_request("unsupported_parameter", message).of("tools")
}

/// Refuses tool calls in a conversation whose model would not be shown them.
///
/// # Errors
/// There are tool calls, and the chat template does not show tools.
pub(crate) fn check_history(messages: &[ChatMessage], text: &dyn Text) -> Result<(), ApiError> {
    let is_about_tools = |message: &ChatMessage| !message.calls.is_empty() || message.answers.is_some();
    if !messages.iter().any(is_about_tools) {
        return Ok(());
    }
    if text.info().chat_template.as_deref().is_some_and(shows_tools) {
        return Ok(());
    }
    let message = "this model's chat template does not support tool calls in messages; remove such messages";
    Err(ApiError::bad_request("unsupported_parameter", message))
}

/// A part of a tool call in a delta.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolCallDelta {
    pub index: usize,
    /// Byte offset of the part in the delta's text.
    pub at: usize,
    pub kind: CallKind,
    /// Id and function of the call, in the call's first part.
    pub begun: Option<(String, String)>,
    /// New text of the arguments, or of a custom tool's input.
    pub arguments: String,
    /// New text of the call as the model wrote it, tags included.
    pub written: String,
}

impl ToolCallDelta {
    /// True if the part has nothing for readers of tool calls.
    #[must_use]
    pub(crate) fn is_silent(&self) -> bool {
        self.begun.is_none() && self.arguments.is_empty()
    }
}

pub(crate) fn append(
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

//! Reads the tools of a request, and whether the model must call one.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use text::grammar::Grammar;

use super::super::strict_fields::{StrictFields, wrong};
use crate::errors::ApiError;

const MAX_TOOLS: usize = 128;
/// Limit of Anthropic's API; OpenAI's limit is 64.
const MAX_NAME_CHARS: usize = 128;
/// Maximum number of custom tools with a grammar; each compiles separately, so errors name its field.
const MAX_GRAMMARS: usize = 8;
/// Parameter of the function that chat templates show in place of a custom tool.
pub(crate) const INPUT: &str = "input";

/// Whether a grammar enforces the function's schema on optional calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// Calls always match the schema.
    Strict,
    /// Calls match the schema as well as the model can.
    Free,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    /// JSON schema of the arguments.
    pub parameters: Value,
    pub strictness: Strictness,
    /// Input format of a custom tool, which takes text in place of arguments.
    pub input: Option<CustomInput>,
    /// Definition that the chat template shows.
    pub definition: Value,
}

#[derive(Debug, Clone, PartialEq)]
pub enum CustomInput {
    Text,
    /// Text of a grammar or of a regular expression.
    Grammar {
        /// Field of the request that has the grammar.
        field: String,
        grammar: Grammar,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides whether to call.
    Auto,
    /// The model calls at least one tool.
    Required,
    /// The model calls the named tool.
    Named(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallLimit {
    One,
    Many,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Tools {
    /// At least one tool.
    pub list: Vec<Tool>,
    pub choice: ToolChoice,
    pub calls: CallLimit,
}

impl Tools {
    /// True if the grammar constrains optional calls.
    #[must_use]
    pub(crate) fn are_formed(&self) -> bool {
        self.list.iter().any(|tool| tool.strictness == Strictness::Strict || tool.input.is_some())
    }

    pub(crate) fn callable(&self) -> impl Iterator<Item = &Tool> {
        let is_meant = |tool: &&Tool| match &self.choice {
            ToolChoice::Named(name) => tool.name == *name,
            ToolChoice::Auto | ToolChoice::Required => true,
        };
        self.list.iter().filter(is_meant)
    }
}

/// The JSON layout of tools and of `tool_choice` on a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Chat completions: the tool is nested in a field named after its type.
    Nested,
    /// Ollama: nested, and functions only.
    Functions,
    /// Responses API: type and tool in one object.
    Flat,
}

/// Reads the tool fields of a chat; `None` if no tool may be called.
pub(crate) fn read(fields: &mut StrictFields) -> Result<Option<Tools>, ApiError> {
    read_as(Dialect::Nested, fields)
}

/// Reads the tool fields; `None` if no tool may be called.
pub(crate) fn read_as(dialect: Dialect, fields: &mut StrictFields) -> Result<Option<Tools>, ApiError> {
    let list = list(fields, |index, item| tool(dialect, index, item))?;
    let choice = fields.take("tool_choice").map(|value| choice(dialect, &value)).transpose()?;
    let calls = if fields.flag("parallel_tool_calls", true)? { CallLimit::Many } else { CallLimit::One };
    choose(list, choice.unwrap_or(Some(ToolChoice::Auto)), calls)
}

/// Reads the array `tools` with `read`, which gets the index and the value of each tool.
pub(crate) fn list(
    fields: &mut StrictFields,
    read: impl Fn(usize, Value) -> Result<Tool, ApiError>,
) -> Result<Vec<Tool>, ApiError> {
    let items = fields.array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(ApiError::invalid("tools", format!("'tools' may hold at most {MAX_TOOLS} tools")));
    }
    let list: Vec<Tool> =
        items.into_iter().enumerate().map(|(index, item)| read(index, item)).collect::<Result<_, _>>()?;
    let mut names = BTreeSet::new();
    if let Some(twice) = list.iter().find(|tool| !names.insert(tool.name.as_str())) {
        let message = format!("two tools are called '{}'; give each tool its own name", twice.name);
        return Err(ApiError::invalid("tools", message));
    }
    let grammars = list.iter().filter(|tool| matches!(tool.input, Some(CustomInput::Grammar { .. }))).count();
    if grammars > MAX_GRAMMARS {
        let message = format!("'tools' may hold at most {MAX_GRAMMARS} custom tools with a grammar");
        return Err(ApiError::invalid("tools", message));
    }
    Ok(list)
}

/// Returns the tools with a choice among them; `None` if no tool may be called.
pub(crate) fn choose(
    list: Vec<Tool>,
    choice: Option<ToolChoice>,
    calls: CallLimit,
) -> Result<Option<Tools>, ApiError> {
    let Some(choice) = choice else { return Ok(None) };
    let is_there = match &choice {
        ToolChoice::Auto => true,
        ToolChoice::Required => !list.is_empty(),
        ToolChoice::Named(name) => list.iter().any(|tool| tool.name == *name),
    };
    if !is_there {
        let message = "'tool_choice' names a function that is not in 'tools'; add the function";
        return Err(ApiError::invalid("tool_choice", message));
    }
    Ok(Some(Tools { list, choice, calls }).filter(|tools| !tools.list.is_empty()))
}

/// Reads `tool_choice`; `None` if no tool may be called.
fn choice(dialect: Dialect, value: &Value) -> Result<Option<ToolChoice>, ApiError> {
    Ok(Some(match value {
        Value::String(word) if word == "none" => return Ok(None),
        Value::String(word) if word == "auto" => ToolChoice::Auto,
        Value::String(word) if word == "required" => ToolChoice::Required,
        Value::Object(_) => {
            let fields = StrictFields::of(value.clone(), "tool_choice")?;
            let name = in_dialect(dialect, fields, |_, fields| only_name(fields));
            ToolChoice::Named(name.map_err(|error| error.within("tool_choice"))?)
        }
        other => {
            return Err(wrong("tool_choice", "\"none\", \"auto\", \"required\" or a tool", other));
        }
    }))
}

fn only_name(mut fields: StrictFields) -> Result<String, ApiError> {
    let name = fields.required_text("name")?;
    fields.finish()?;
    Ok(name)
}

#[derive(Debug, Clone, Copy)]
enum ToolKind {
    Function,
    Custom,
}

/// Applies `read` to the fields of a tool or of a `tool_choice`, wherever `dialect` nests them.
fn in_dialect<T>(
    dialect: Dialect,
    mut fields: StrictFields,
    read: impl Fn(ToolKind, StrictFields) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let name = fields.required_text("type")?;
    let kind = match name.as_str() {
        "function" => ToolKind::Function,
        "custom" if dialect != Dialect::Functions => ToolKind::Custom,
        _ => return Err(unknown_kind(dialect, &name, &fields)),
    };
    // `cache_control` marks where other servers begin to cache; this server caches every prefix.
    fields.inert(&["cache_control"]);
    if dialect == Dialect::Flat {
        return read(kind, fields);
    }
    let inside = fields.take(&name);
    fields.finish()?;
    let inside = inside
        .ok_or_else(|| ApiError::missing(&name, format!("a tool of the type '{name}' needs '{name}'")))?;
    let inside = StrictFields::of(inside, &name)?;
    read(kind, inside).map_err(|error| error.within(&name))
}

fn unknown_kind(dialect: Dialect, kind: &str, fields: &StrictFields) -> ApiError {
    let name =
        fields.peek("name").and_then(Value::as_str).map_or_else(String::new, |name| format!(" '{name}'"));
    let known = if dialect == Dialect::Functions { "'function'" } else { "'function' and 'custom'" };
    let message =
        format!("the type '{kind}' of the tool{name} is not supported; use {known}, and remove other tools");
    ApiError::bad_request("unsupported_parameter", message).of("type")
}

fn tool(dialect: Dialect, index: usize, item: Value) -> Result<Tool, ApiError> {
    let at = format!("tools[{index}]");
    let fields = StrictFields::of(item, &at)?;
    let read = |kind, fields| match kind {
        ToolKind::Function => function(fields),
        ToolKind::Custom => custom(fields),
    };
    let mut tool = in_dialect(dialect, fields, read).map_err(|error| error.within(&at))?;
    if let Some(CustomInput::Grammar { field, .. }) = &mut tool.input {
        let inside = if dialect == Dialect::Flat { "" } else { "custom." };
        *field = format!("{at}.{inside}{field}");
    }
    Ok(tool)
}

/// Reads the name of a tool.
pub(crate) fn name(fields: &mut StrictFields) -> Result<String, ApiError> {
    let name = fields.required_text("name")?;
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.len() > MAX_NAME_CHARS || !name.chars().all(is_good) {
        let expected = format!("1 to {MAX_NAME_CHARS} of the characters A-Z a-z 0-9 _ - .");
        return Err(wrong("name", &expected, &Value::from(name)));
    }
    Ok(name)
}

fn function(mut fields: StrictFields) -> Result<Tool, ApiError> {
    let (name, description) = (name(&mut fields)?, fields.text("description")?);
    let parameters = match fields.take("parameters") {
        // As in OpenAI's API, a function without `parameters` takes none.
        None => json!({ "type": "object", "properties": {}, "additionalProperties": false }),
        Some(schema @ Value::Object(_)) => schema,
        Some(other) => return Err(wrong("parameters", "a JSON schema: an object", &other)),
    };
    let strictness = strictness(&mut fields)?;
    // Transformers derives `return` from a Python function's type; calls do not depend on it.
    fields.inert(&["return"]);
    fields.finish()?;
    let definition = definition(&name, description.as_deref(), &parameters);
    Ok(Tool { name, parameters, strictness, input: None, definition })
}

/// Reads `strict`, which is false by default.
pub(crate) fn strictness(fields: &mut StrictFields) -> Result<Strictness, ApiError> {
    Ok(if fields.flag("strict", false)? { Strictness::Strict } else { Strictness::Free })
}

/// Returns a function as chat templates show it.
pub(crate) fn definition(name: &str, description: Option<&str>, parameters: &Value) -> Value {
    let mut shown = json!({ "name": name });
    if let Some(description) = description {
        shown["description"] = description.into();
    }
    shown["parameters"] = parameters.clone();
    json!({ "type": "function", "function": shown })
}

/// Reads a custom tool. Chat templates know only functions, so they are shown a function whose only parameter
/// is the input.
fn custom(mut fields: StrictFields) -> Result<Tool, ApiError> {
    let (name, description) = (name(&mut fields)?, fields.text("description")?);
    let format = fields.take("format");
    fields.finish()?;
    let input = format
        .map_or(Ok(CustomInput::Text), |format| input(format).map_err(|error| error.within("format")))?;
    let mut text = json!({ "type": "string" });
    match &input {
        CustomInput::Grammar { grammar: Grammar::Lark(source), .. } => {
            text["description"] = format!("A text of this grammar, in Lark:\n{source}").into();
        }
        CustomInput::Grammar { grammar: Grammar::Regex(source), .. } => {
            text["description"] = format!("A text that this expression matches: {source}").into();
        }
        _ => {}
    }
    let parameters = json!({ "type": "object", "properties": { INPUT: text }, "required": [INPUT] });
    let definition = definition(&name, description.as_deref(), &parameters);
    Ok(Tool { name, parameters, strictness: Strictness::Free, input: Some(input), definition })
}

/// Reads the format of a custom tool; the grammar stands beside the type, or nested as in chat completions.
fn input(format: Value) -> Result<CustomInput, ApiError> {
    let mut fields = StrictFields::of(format, "format")?;
    match fields.required_text("type")?.as_str() {
        "text" => fields.finish().map(|()| CustomInput::Text),
        "grammar" => match fields.take("grammar") {
            None => grammar(fields, "format"),
            Some(inside) => {
                fields.finish()?;
                grammar(StrictFields::of(inside, "grammar")?, "format.grammar")
                    .map_err(|error| error.within("grammar"))
            }
        },
        other => {
            let message = format!("the format '{other}' is not supported; use text or grammar");
            Err(ApiError::bad_request("unsupported_parameter", message).of("type"))
        }
    }
}

fn grammar(mut fields: StrictFields, at: &str) -> Result<CustomInput, ApiError> {
    let (syntax, definition) = (fields.required_text("syntax")?, fields.required_text("definition")?);
    fields.finish()?;
    let grammar = match syntax.as_str() {
        "lark" => Grammar::Lark(definition),
        "regex" => Grammar::Regex(definition),
        other => {
            let message = format!("'syntax' must be lark or regex, not '{other}'");
            return Err(ApiError::invalid("syntax", message));
        }
    };
    Ok(CustomInput::Grammar { field: format!("{at}.definition"), grammar })
}

#[cfg(test)]
mod tests;

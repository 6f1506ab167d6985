//! Which tools a request brings, and whether they are to be called.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::super::fields::{Fields, wrong};
use crate::errors::ApiError;

/// Most tools of a request.
const MAX_TOOLS: usize = 128;
/// Longest name of a function.
const MAX_NAME_CHARS: usize = 64;

/// Whether calls keep to their function's schema where nothing else makes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// They do.
    Strict,
    /// As well as the model can.
    Free,
}

/// A function that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What its arguments look like.
    pub parameters: Value,
    /// Whether they always do.
    pub strictness: Strictness,
    /// All of it, as the chat template is to show it.
    pub definition: Value,
}

/// Whether tools are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// As the model likes.
    Auto,
    /// At least one is.
    Required,
    /// This one is.
    Named(String),
}

/// How many calls an answer may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// One.
    One,
    /// Any number.
    Many,
}

/// What a request says of tools.
#[derive(Debug, Clone, PartialEq)]
pub struct Tools {
    /// At least one.
    pub list: Vec<Tool>,
    /// Whether they are called.
    pub choice: Choice,
    /// How many calls there may be.
    pub calls: Calls,
}

impl Tools {
    /// Those that may be called.
    pub fn callable(&self) -> impl Iterator<Item = &Tool> {
        let is_meant = |tool: &&Tool| match &self.choice {
            Choice::Named(name) => tool.name == *name,
            Choice::Auto | Choice::Required => true,
        };
        self.list.iter().filter(is_meant)
    }
}

/// How a route writes a tool, and the choice of one.
#[derive(Debug, Clone, Copy)]
pub struct Dialect {
    tool: fn(Fields) -> Result<Tool, ApiError>,
    chosen: fn(Fields) -> Result<String, ApiError>,
}

/// As chat has it: a function in a field of its own.
const NESTED: Dialect = Dialect { tool: nested_tool, chosen: nested_choice };
/// As the Responses API has it: all in one.
pub const FLAT: Dialect = Dialect { tool: flat_tool, chosen: flat_choice };

/// Reads the fields about tools, as chat has them; `None` if none are to be called.
pub fn read(fields: &mut Fields) -> Result<Option<Tools>, ApiError> {
    read_as(NESTED, fields)
}

/// Reads the fields about tools; `None` if none are to be called.
pub fn read_as(dialect: Dialect, fields: &mut Fields) -> Result<Option<Tools>, ApiError> {
    let items = fields.array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(ApiError::invalid("tools", format!("'tools' may hold at most {MAX_TOOLS} tools")));
    }
    let list: Vec<Tool> = items
        .into_iter()
        .enumerate()
        .map(|(index, item)| tool(dialect, index, item))
        .collect::<Result<_, _>>()?;
    let mut names = BTreeSet::new();
    if let Some(twice) = list.iter().find(|tool| !names.insert(tool.name.as_str())) {
        let message = format!("two functions are called '{}'; give each a name of its own", twice.name);
        return Err(ApiError::invalid("tools", message));
    }
    let choice = fields.take("tool_choice").map(|value| choice(dialect, &value, &list)).transpose()?;
    let calls = if fields.flag("parallel_tool_calls", true)? { Calls::Many } else { Calls::One };
    Ok(match choice.unwrap_or(Some(Choice::Auto)) {
        Some(choice) if !list.is_empty() => Some(Tools { list, choice, calls }),
        _ => None,
    })
}

/// `None`: no tool is to be called.
fn choice(dialect: Dialect, value: &Value, list: &[Tool]) -> Result<Option<Choice>, ApiError> {
    let choice = match value {
        Value::String(word) if word == "none" => return Ok(None),
        Value::String(word) if word == "auto" => Choice::Auto,
        Value::String(word) if word == "required" => Choice::Required,
        Value::Object(_) => {
            let fields = Fields::of(value.clone(), "tool_choice")?;
            Choice::Named((dialect.chosen)(fields).map_err(|error| error.within("tool_choice"))?)
        }
        other => {
            return Err(wrong("tool_choice", "\"none\", \"auto\", \"required\" or a function", other));
        }
    };
    let is_there = match &choice {
        Choice::Auto => true,
        Choice::Required => !list.is_empty(),
        Choice::Named(name) => list.iter().any(|tool| tool.name == *name),
    };
    if !is_there {
        let message = "'tool_choice' wants a call of what is not among 'tools'; add the function there";
        return Err(ApiError::invalid("tool_choice", message));
    }
    Ok(Some(choice))
}

fn nested_choice(mut fields: Fields) -> Result<String, ApiError> {
    is_function(&mut fields)?;
    let function = fields.take("function");
    fields.finish()?;
    let function =
        function.ok_or_else(|| ApiError::missing("function", "a choice of a function needs 'function'"))?;
    let within = |error: ApiError| error.within("function");
    let fields = Fields::of(function, "function")?;
    only_name(fields).map_err(within)
}

fn flat_choice(mut fields: Fields) -> Result<String, ApiError> {
    is_function(&mut fields)?;
    only_name(fields)
}

fn only_name(mut fields: Fields) -> Result<String, ApiError> {
    let name = fields.required_text("name")?;
    fields.finish()?;
    Ok(name)
}

fn is_function(fields: &mut Fields) -> Result<(), ApiError> {
    let kind = fields.required_text("type")?;
    if kind == "function" {
        return Ok(());
    }
    let message = format!("the type '{kind}' is not supported; only 'function' is");
    Err(ApiError::bad_request("unsupported_parameter", message).of("type"))
}

fn tool(dialect: Dialect, index: usize, item: Value) -> Result<Tool, ApiError> {
    let at = format!("tools[{index}]");
    let fields = Fields::of(item, &at)?;
    (dialect.tool)(fields).map_err(|error| error.within(&at))
}

fn nested_tool(mut fields: Fields) -> Result<Tool, ApiError> {
    is_function(&mut fields)?;
    let function = fields.take("function");
    fields.finish()?;
    let function = function.ok_or_else(|| ApiError::missing("function", "a tool needs 'function'"))?;
    let fields = Fields::of(function, "function")?;
    self::function(fields).map_err(|error| error.within("function"))
}

fn flat_tool(mut fields: Fields) -> Result<Tool, ApiError> {
    is_function(&mut fields)?;
    function(fields)
}

fn function(mut fields: Fields) -> Result<Tool, ApiError> {
    let name = fields.required_text("name")?;
    let is_good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.len() > MAX_NAME_CHARS || !name.chars().all(is_good) {
        let expected = format!("1 to {MAX_NAME_CHARS} of the characters A-Z a-z 0-9 _ - .");
        return Err(wrong("name", &expected, &Value::from(name)));
    }
    let description = fields.text("description")?;
    let parameters = match fields.take("parameters") {
        // OpenAI: a function without parameters has none.
        None => json!({ "type": "object", "properties": {}, "additionalProperties": false }),
        Some(schema @ Value::Object(_)) => schema,
        Some(other) => return Err(wrong("parameters", "a JSON schema: an object", &other)),
    };
    let strictness = if fields.flag("strict", false)? { Strictness::Strict } else { Strictness::Free };
    fields.finish()?;
    let mut shown = json!({ "name": name });
    if let Some(description) = description {
        shown["description"] = description.into();
    }
    shown["parameters"] = parameters.clone();
    let definition = json!({ "type": "function", "function": shown });
    Ok(Tool { name, parameters, strictness, definition })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_of(body: &Value) -> Result<Option<Tools>, ApiError> {
        let mut fields = Fields::parse(body.to_string().as_bytes())?;
        let tools = read(&mut fields)?;
        fields.finish()?;
        Ok(tools)
    }

    fn weather() -> Value {
        json!({ "type": "function", "function": { "name": "weather", "parameters": { "type": "object" }, "strict": true } })
    }

    #[test]
    fn tools_are_read_with_how_they_are_to_be_called() {
        assert_eq!(read_of(&json!({})).unwrap(), None);
        assert_eq!(read_of(&json!({ "tools": [weather()], "tool_choice": "none" })).unwrap(), None);
        let tools = read_of(&json!({ "tools": [weather()], "parallel_tool_calls": false })).unwrap().unwrap();
        assert_eq!((tools.choice, tools.calls), (Choice::Auto, Calls::One));
        assert_eq!((tools.list[0].name.as_str(), tools.list[0].strictness), ("weather", Strictness::Strict));
        assert_eq!(tools.list[0].definition["function"].get("strict"), None, "no template knows of it");
        let named = json!({ "type": "function", "function": { "name": "weather" } });
        let tools = read_of(&json!({ "tools": [weather()], "tool_choice": named })).unwrap().unwrap();
        assert_eq!(tools.choice, Choice::Named("weather".to_owned()));
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_name() {
        for (body, name) in [
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "tools": [{ "type": "function" }] }), "tools[0].function"),
            (
                json!({ "tools": [{ "type": "function", "function": { "name": "a b" } }] }),
                "tools[0].function.name",
            ),
            (
                json!({ "tools": [{ "type": "function", "function": { "name": "a", "x": 1 } }] }),
                "tools[0].function.x",
            ),
            (json!({ "tools": [weather(), weather()] }), "tools"),
            (json!({ "tool_choice": "required" }), "tool_choice"),
            (json!({ "tools": [weather()], "tool_choice": "always" }), "tool_choice"),
            (json!({ "tools": [weather()], "tool_choice": { "type": "allowed_tools" } }), "tool_choice.type"),
            (
                json!({ "tools": [weather()], "tool_choice": { "type": "function", "function": { "name": "w" } } }),
                "tool_choice",
            ),
        ] {
            let error = format!("{:?}", read_of(&body).unwrap_err());
            assert!(error.contains(&format!("param: Some(\"{name}\")")), "{body}: {error}");
        }
    }
}

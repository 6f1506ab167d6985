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

/// Reads the fields about tools; `None` if none are to be called.
pub fn read(fields: &mut Fields) -> Result<Option<Tools>, ApiError> {
    let items = fields.array("tools")?.unwrap_or_default();
    if items.len() > MAX_TOOLS {
        return Err(ApiError::invalid("tools", format!("'tools' may hold at most {MAX_TOOLS} tools")));
    }
    let list: Vec<Tool> =
        items.into_iter().enumerate().map(|(index, item)| tool(index, item)).collect::<Result<_, _>>()?;
    let mut names = BTreeSet::new();
    if let Some(twice) = list.iter().find(|tool| !names.insert(tool.name.as_str())) {
        let message = format!("two functions are called '{}'; give each a name of its own", twice.name);
        return Err(ApiError::invalid("tools", message));
    }
    let choice = fields.take("tool_choice").map(|value| choice(&value, &list)).transpose()?;
    let calls = if fields.flag("parallel_tool_calls", true)? { Calls::Many } else { Calls::One };
    Ok(match choice.unwrap_or(Some(Choice::Auto)) {
        Some(choice) if !list.is_empty() => Some(Tools { list, choice, calls }),
        _ => None,
    })
}

/// `None`: no tool is to be called.
fn choice(value: &Value, list: &[Tool]) -> Result<Option<Choice>, ApiError> {
    let choice = match value {
        Value::String(word) if word == "none" => return Ok(None),
        Value::String(word) if word == "auto" => Choice::Auto,
        Value::String(word) if word == "required" => Choice::Required,
        Value::Object(_) => Choice::Named(chosen(value.clone())?),
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

fn chosen(value: Value) -> Result<String, ApiError> {
    let within = |error: ApiError| error.within("tool_choice");
    let mut fields = Fields::of(value, "tool_choice")?;
    is_function(&mut fields).map_err(within)?;
    let function = fields.take("function");
    fields.finish().map_err(within)?;
    let function = function.ok_or_else(|| {
        ApiError::missing("tool_choice.function", "a choice of a function needs 'function'")
    })?;
    let within = |error: ApiError| error.within("tool_choice.function");
    let mut fields = Fields::of(function, "tool_choice.function")?;
    let name = fields.required_text("name").map_err(within)?;
    fields.finish().map_err(within)?;
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

fn tool(index: usize, item: Value) -> Result<Tool, ApiError> {
    let at = format!("tools[{index}]");
    let mut fields = Fields::of(item, &at)?;
    is_function(&mut fields).map_err(|error| error.within(&at))?;
    let function = fields.take("function");
    fields.finish().map_err(|error| error.within(&at))?;
    let function = function.ok_or_else(|| ApiError::missing(&at, "a tool needs 'function'"))?;
    let at = format!("{at}.function");
    self::function(function, &at).map_err(|error| error.within(&at))
}

fn function(value: Value, at: &str) -> Result<Tool, ApiError> {
    let mut fields = Fields::of(value, at)?;
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
            (json!({ "tools": [{ "type": "function" }] }), "tools[0]"),
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

//! Tools, tool calls and the answers of tools, in the forms of OpenAI, TRL and LLaMA-Factory.

use std::collections::BTreeMap;

use model_files::strict_json;
use serde_json::{Value, json};

use super::{
    fault::LineFault,
    fields::{LineFields, wrong},
};

/// Maximum number of tools of a line and of calls in a message, as in the gateway.
const MAX_TOOLS: usize = 128;

/// Reads the tools that a line offers the model: OpenAI's `tools`, or its older `functions`. LLaMA-Factory
/// writes the list as text.
pub(super) fn read_tools(line: &mut LineFields) -> Result<Option<Value>, LineFault> {
    let named = ["tools", "functions"].into_iter().find_map(|name| Some((name, line.take(name)?)));
    let Some((name, value)) = named else { return Ok(None) };
    let path = line.path(name);
    let list = match parsed(&path, value, "an array of tools")? {
        Value::Array(list) => list,
        Value::String(text) if text.is_empty() => return Ok(None),
        other => return Err(wrong(path, "an array of tools", &other)),
    };
    if list.len() > MAX_TOOLS {
        return Err(LineFault::TooManyTools { field: path, limit: MAX_TOOLS });
    }
    let tool = |(index, tool): (usize, Value)| definition(&format!("{path}[{index}]"), tool);
    let list: Vec<Value> = list.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?;
    Ok((!list.is_empty()).then_some(list.into()))
}

/// Returns the definition of a tool in the form that templates take; a bare function is wrapped in it.
fn definition(path: &str, tool: Value) -> Result<Value, LineFault> {
    let function = tool.get("function").unwrap_or(&tool);
    if !function["name"].is_string() {
        return Err(LineFault::Missing { field: format!("{path}.function.name") });
    }
    Ok(if tool.get("function").is_some() { tool } else { json!({ "type": "function", "function": tool }) })
}

/// A field that the template may show: its value, and its path in the line.
pub(super) type ShownField = (Value, String);

/// Reads the tool calls of an assistant's message, and adds them to `called`.
pub(super) fn read_calls(
    fields: &mut LineFields,
    called: &mut BTreeMap<String, String>,
) -> Result<Option<ShownField>, LineFault> {
    let path = fields.path("tool_calls");
    let calls = match fields.take("tool_calls") {
        Some(Value::Array(calls)) => calls,
        Some(other) => return Err(wrong(path, "an array of tool calls", &other)),
        None => Vec::new(),
    };
    if calls.len() > MAX_TOOLS {
        return Err(LineFault::TooManyTools { field: path, limit: MAX_TOOLS });
    }
    let mut read = Vec::new();
    for (index, call) in calls.into_iter().enumerate() {
        let mut call = fields.at(format!("{path}[{index}]"), call)?;
        read.push(read_call(&mut call, called)?);
    }
    if !read.is_empty() {
        return Ok(Some((read.into(), path)));
    }
    // OpenAI's older form, which has one call and no id.
    let Some(call) = fields.take("function_call") else { return Ok(None) };
    let path = fields.path("function_call");
    let call = function(&mut fields.at(path.clone(), call)?)?;
    Ok(Some((json!([{ "type": "function", "function": call }]), path)))
}

fn read_call(call: &mut LineFields, called: &mut BTreeMap<String, String>) -> Result<Value, LineFault> {
    let id = call.text("id")?;
    if call.text("type")?.is_some_and(|kind| kind != "function") {
        return Err(LineFault::Unsupported { field: call.path("type") });
    }
    let inner = call.required("function")?;
    let function = function(&mut call.at(call.path("function"), inner)?)?;
    let mut value = json!({ "type": "function", "function": function });
    if let Some(id) = id {
        value["id"] = id.as_str().into();
        called.insert(id, value["function"]["name"].as_str().unwrap_or_default().to_owned());
    }
    Ok(value)
}

/// Reads the name and the arguments of a call; arguments are an object, or its JSON text.
fn function(fields: &mut LineFields) -> Result<Value, LineFault> {
    let name = fields.required_text("name")?;
    let arguments = fields.take("arguments").unwrap_or_else(|| json!({}));
    let arguments = parsed(&fields.path("arguments"), arguments, "an object")?;
    if !arguments.is_object() {
        return Err(wrong(fields.path("arguments"), "an object", &arguments));
    }
    Ok(json!({ "name": name, "arguments": arguments }))
}

/// Reads the call that the message of a tool answers: its id and the function's name, if known.
pub(super) fn read_answered_call(
    fields: &mut LineFields,
    called: &BTreeMap<String, String>,
) -> Result<[Option<ShownField>; 2], LineFault> {
    let (id, name) = (fields.text("tool_call_id")?, fields.text("name")?);
    let name = name.or_else(|| called.get(id.as_deref()?).cloned());
    let (id_path, name_path) = (fields.path("tool_call_id"), fields.path("name"));
    Ok([id.map(|id| (id.into(), id_path)), name.map(|name| (name.into(), name_path))])
}

/// Reads the text of a ShareGPT message `function_call`: one call, or a list of calls, as JSON.
pub(super) fn read_call_text(fields: &LineFields, written: String) -> Result<ShownField, LineFault> {
    let path = fields.path("value");
    let calls = match parsed(&path, Value::String(written), "JSON of a call")? {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    if calls.is_empty() {
        return Err(LineFault::Empty { field: path });
    }
    let mut read = Vec::new();
    for call in calls {
        let call = function(&mut fields.at(path.clone(), call)?)?;
        read.push(json!({ "type": "function", "function": call }));
    }
    Ok((read.into(), path))
}

/// Parses a value that data may hold as JSON text; an empty text stays.
fn parsed(path: &str, value: Value, expected: &'static str) -> Result<Value, LineFault> {
    let Value::String(written) = value else { return Ok(value) };
    if written.trim().is_empty() {
        return Ok(Value::String(String::new()));
    }
    strict_json::parse(written.as_bytes()).map_err(|error| LineFault::InnerJson {
        field: path.to_owned(),
        expected,
        error: error.to_string(),
    })
}

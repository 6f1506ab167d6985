//! Reads the tools of a request in Anthropic's format.

use serde_json::{Value, json};

use crate::{
    errors::ApiError,
    openai::{
        strict_fields::{StrictFields, wrong},
        tools::tool_params::{self, CallLimit, Tool, ToolChoice, Tools},
    },
};

/// Reads `tools` and `tool_choice`; returns the tools, if any may be called, and the names of eager tools.
pub(super) fn read(fields: &mut StrictFields) -> Result<(Option<Tools>, Vec<String>), ApiError> {
    let eager = eager_tools(fields);
    let list = tool_params::list(fields, |index, item| {
        let at = format!("tools[{index}]");
        tool(StrictFields::of(item, &at)?).map_err(|error| error.within(&at))
    })?;
    let choice = fields.take("tool_choice").map(choice).transpose()?;
    let (choice, calls) = choice.unwrap_or((Some(ToolChoice::Auto), CallLimit::Many));
    Ok((tool_params::choose(list, choice, calls)?, eager))
}

/// Returns the names of the tools whose input is streamed as the model writes it.
fn eager_tools(fields: &StrictFields) -> Vec<String> {
    let tools = fields.peek("tools").and_then(Value::as_array).into_iter().flatten();
    let eager = tools.filter(|tool| tool["eager_input_streaming"] == true);
    eager.filter_map(|tool| tool["name"].as_str().map(str::to_owned)).collect()
}

fn tool(mut fields: StrictFields) -> Result<Tool, ApiError> {
    let kind = fields.text("type")?;
    if let Some(other) = kind.filter(|kind| kind != "custom") {
        let name = fields.text("name")?.map_or_else(String::new, |name| format!(" '{name}'"));
        let message = format!(
            "the type '{other}' of the tool{name} is not supported: this server runs no tools and knows no \
             schemas of Anthropic's; send a tool with 'input_schema', or remove the tool"
        );
        return Err(ApiError::bad_request("unsupported_parameter", message).of("type"));
    }
    let (name, description) = (tool_params::name(&mut fields)?, fields.text("description")?);
    let parameters = match fields.take("input_schema") {
        Some(schema @ Value::Object(_)) => schema,
        None => return Err(ApiError::missing("input_schema", "'input_schema' is required: a JSON schema")),
        Some(other) => return Err(wrong("input_schema", "a JSON schema: an object", &other)),
    };
    let strictness = tool_params::strictness(&mut fields)?;
    let shown = shown_schema(&parameters, fields.array("input_examples")?);
    check_callers(&mut fields)?;
    // `eager_tools` has read the value.
    fields.optional_flag("eager_input_streaming")?;
    if fields.flag("defer_loading", false)? {
        return Err(ApiError::unsupported("defer_loading"));
    }
    fields.inert(&["cache_control"]);
    fields.finish()?;
    let definition = tool_params::definition(&name, description.as_deref(), &shown);
    Ok(Tool { name, parameters, strictness, input: None, definition })
}

/// Returns the schema that the model sees, with the examples under JSON Schema's keyword for them.
fn shown_schema(parameters: &Value, examples: Option<Vec<Value>>) -> Value {
    let mut shown = parameters.clone();
    if let Some(examples) = examples.filter(|examples| !examples.is_empty()) {
        shown["examples"] = examples.into();
    }
    shown
}

/// Refuses callers other than the model itself.
fn check_callers(fields: &mut StrictFields) -> Result<(), ApiError> {
    let callers = fields.array("allowed_callers")?.unwrap_or_default();
    if callers.iter().all(|caller| *caller == "direct") {
        return Ok(());
    }
    let message = "'allowed_callers' may only hold 'direct', because this server runs no code; remove others";
    Err(ApiError::bad_request("unsupported_parameter", message).of("allowed_callers"))
}

/// Reads `tool_choice`: the choice, `None` if no tool may be called, and how many calls an answer may have.
fn choice(value: Value) -> Result<(Option<ToolChoice>, CallLimit), ApiError> {
    const NAME: &str = "tool_choice";
    let within = |error: ApiError| error.within(NAME);
    let mut fields = match value {
        value @ Value::Object(_) => StrictFields::of(value, NAME)?,
        other => {
            return Err(wrong(NAME, &format!("an object, such as {}", json!({ "type": "auto" })), &other));
        }
    };
    let choice = match fields.required_text("type").map_err(within)?.as_str() {
        "none" => None,
        "auto" => Some(ToolChoice::Auto),
        "any" => Some(ToolChoice::Required),
        "tool" => Some(ToolChoice::Named(fields.required_text("name").map_err(within)?)),
        other => {
            let message = format!("the type '{other}' is not supported; use auto, any, tool or none");
            return Err(within(ApiError::bad_request("unsupported_parameter", message).of("type")));
        }
    };
    let is_single = fields.flag("disable_parallel_tool_use", false).map_err(within)?;
    fields.finish().map_err(within)?;
    Ok((choice, if is_single { CallLimit::One } else { CallLimit::Many }))
}

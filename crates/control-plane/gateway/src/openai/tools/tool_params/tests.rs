//! Tests that tools are read from requests in every dialect.

use super::*;

fn read_of(body: &Value) -> Result<Option<Tools>, ApiError> {
    let mut fields = StrictFields::parse(body.to_string().as_bytes())?;
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
    assert_eq!((tools.choice, tools.calls), (ToolChoice::Auto, CallLimit::One));
    assert_eq!((tools.list[0].name.as_str(), tools.list[0].strictness), ("weather", Strictness::Strict));
    assert_eq!(tools.list[0].definition["function"].get("strict"), None, "no template knows of it");
    let named = json!({ "type": "function", "function": { "name": "weather" } });
    let tools = read_of(&json!({ "tools": [weather()], "tool_choice": named })).unwrap().unwrap();
    assert_eq!(tools.choice, ToolChoice::Named("weather".to_owned()));
}

#[test]
fn what_is_not_honoured_is_refused_by_name() {
    for (body, name) in [
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "tools": [{ "type": "custom" }] }), "tools[0].custom"),
        (
            json!({ "tools": [{ "type": "custom", "custom": { "name": "a", "format": { "type": "yaml" } } }] }),
            "tools[0].custom.format.type",
        ),
        (json!({ "tools": (0..9).map(patch).collect::<Vec<_>>() }), "tools"),
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

fn patch(number: usize) -> Value {
    let grammar = json!({ "syntax": "lark", "definition": "start: \"a\"" });
    let format = json!({ "type": "grammar", "grammar": grammar });
    json!({ "type": "custom", "custom": { "name": format!("patch{number}"), "format": format } })
}

#[test]
fn a_custom_tool_is_shown_as_a_function_of_one_text() {
    let choice = json!({ "type": "custom", "custom": { "name": "patch0" } });
    let tools = read_of(&json!({ "tools": [patch(0)], "tool_choice": choice })).unwrap().unwrap();
    assert_eq!(tools.choice, ToolChoice::Named("patch0".to_owned()));
    let tool = &tools.list[0];
    let field = "tools[0].custom.format.grammar.definition".to_owned();
    assert_eq!(
        tool.input,
        Some(CustomInput::Grammar { field, grammar: Grammar::Lark("start: \"a\"".to_owned()) })
    );
    assert_eq!(tool.definition["type"], "function");
    assert_eq!(tool.definition["function"]["parameters"]["required"], json!(["input"]));
    let flat = |format: Value| {
        let tool = json!({ "type": "custom", "name": "p", "format": format });
        let mut fields = StrictFields::of(json!({ "tools": [tool] }), "the body").unwrap();
        read_as(Dialect::Flat, &mut fields).unwrap().unwrap().list[0].input.clone()
    };
    assert_eq!(flat(Value::Null), Some(CustomInput::Text));
    let field = "tools[0].format.definition".to_owned();
    let grammar = Grammar::Regex("a+".to_owned());
    let format = json!({ "type": "grammar", "syntax": "regex", "definition": "a+" });
    assert_eq!(flat(format), Some(CustomInput::Grammar { field, grammar }));
}

#[test]
fn keys_that_change_nothing_are_taken_and_a_tool_of_another_type_is_named() {
    let mut tool = weather();
    tool["cache_control"] = json!({ "type": "ephemeral" });
    tool["function"]["return"] = json!({ "type": "string" });
    assert_eq!(read_of(&json!({ "tools": [tool] })).unwrap().unwrap().list[0].name, "weather");
    let mut fields =
        StrictFields::of(json!({ "tools": [{ "type": "namespace", "name": "mine" }] }), "the body").unwrap();
    let error = read_as(Dialect::Flat, &mut fields).unwrap_err().to_string();
    assert!(error.contains("'mine'") && error.contains("'namespace'"), "{error}");
    let mut fields = StrictFields::of(json!({ "tools": [patch(0)] }), "the body").unwrap();
    assert!(read_as(Dialect::Functions, &mut fields).is_err(), "Ollama's API has no custom tools");
}

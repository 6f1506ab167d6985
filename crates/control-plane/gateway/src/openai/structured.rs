//! Structured output, requested with OpenAI's `response_format` or vLLM's `structured_outputs`.

mod source;

use serde_json::Value;
use text::grammar::{Enforcement, Grammar};

pub(crate) use self::source::refused;
pub use self::source::{GrammarSource, SchemaWarning, Structure};
use super::strict_fields::{StrictFields, wrong};
use crate::errors::ApiError;

const MAX_CHOICES: usize = 4096;

/// Reads both fields, of which at most one may request structured output.
pub(crate) fn read(fields: &mut StrictFields) -> Result<Option<Structure>, ApiError> {
    check_names(fields)?;
    let openai = fields.take("response_format").map(response_format).transpose()?.flatten();
    let vllm = fields.take("structured_outputs").map(structured_outputs).transpose()?.flatten();
    match (openai, vllm) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "structured_outputs",
            "'response_format' and 'structured_outputs' both define the form of the answer; send one of them",
        )),
        (openai, vllm) => Ok(openai.or(vllm)),
    }
}

/// Refuses other servers' fields for structured output, and names the field to use instead.
fn check_names(fields: &StrictFields) -> Result<(), ApiError> {
    const ELSEWHERE: [(&str, &str); 7] = [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
        ("json_schema", "json"),
        ("regex", "regex"),
        ("grammar", "grammar"),
    ];
    for (name, instead) in ELSEWHERE {
        if fields.peek(name).is_some() {
            let message =
                format!("'{name}' is not supported here; write 'structured_outputs': {{\"{instead}\": ...}}");
            return Err(ApiError::bad_request("unsupported_parameter", message).of(name));
        }
    }
    Ok(())
}

/// Returns the error for an unsupported type of a response format.
fn unknown_type(kind: &str) -> ApiError {
    let message = match kind {
        "regex" | "grammar" => format!(
            "the type '{kind}' is not supported here; write 'structured_outputs': {{\"{kind}\": ...}} beside or instead of it"
        ),
        _ => format!(
            "the type '{kind}' is not supported; use text, json_object or json_schema, or write 'structured_outputs'"
        ),
    };
    ApiError::bad_request("unsupported_parameter", message).of("type")
}

fn response_format(value: Value) -> Result<Option<Structure>, ApiError> {
    const NAME: &str = "response_format";
    let within = |error: ApiError| error.within(NAME);
    let mut fields = StrictFields::of(value, NAME)?;
    let kind = fields.required_text("type").map_err(within)?;
    match kind.as_str() {
        "text" => fields.finish().map(|()| None).map_err(within),
        "json_object" => named_schema(fields, "response_format.schema").map(Some).map_err(within),
        "json_schema" => json_schema(fields).map(Some).map_err(within),
        other => Err(within(unknown_type(other))),
    }
}

/// Reads the schema in `json_schema`, or, as in llama.cpp, in `schema` beside the type.
fn json_schema(mut fields: StrictFields) -> Result<Structure, ApiError> {
    let Some(value) = fields.take("json_schema") else {
        if fields.peek("schema").is_some() {
            return named_schema(fields, "response_format.schema");
        }
        let message =
            "a response format of type json_schema needs 'json_schema': {\"name\": ..., \"schema\": ...}";
        return Err(ApiError::missing("json_schema", message));
    };
    fields.finish()?;
    let fields = StrictFields::of(value, "json_schema")?;
    named_schema(fields, "response_format.json_schema.schema").map_err(|error| error.within("json_schema"))
}

/// Reads a schema with its name; `field` is the schema's field for errors.
fn named_schema(mut fields: StrictFields, field: &str) -> Result<Structure, ApiError> {
    // Labels, which change nothing.
    for label in ["name", "description"] {
        fields.text(label)?;
    }
    let is_strict = fields.flag("strict", false)?;
    let schema = fields.take("schema");
    fields.finish()?;
    let grammar = match schema {
        None => Grammar::json_object(),
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Grammar::Json(schema),
        Some(other) => return Err(wrong("schema", "a JSON schema: an object", &other)),
    };
    let enforcement = if is_strict { Enforcement::Strict } else { Enforcement::BestEffort };
    Ok(Structure { field: field.to_owned(), grammar, enforcement })
}

/// Reads `text.format` of the Responses API, which has the schema beside the type.
pub(crate) fn text_format(value: Value) -> Result<Option<Structure>, ApiError> {
    const NAME: &str = "text.format";
    let within = |error: ApiError| error.within(NAME);
    let mut fields = StrictFields::of(value, NAME)?;
    let kind = fields.required_text("type").map_err(within)?;
    match kind.as_str() {
        "text" => fields.finish().map(|()| None).map_err(within),
        "json_object" | "json_schema" => named_schema(fields, "text.format.schema").map(Some).map_err(within),
        other => Err(within(unknown_type(other))),
    }
}

/// Reads `format` of Ollama's routes: `json` or a schema.
pub(crate) fn ollama_format(value: Value) -> Result<Option<Structure>, ApiError> {
    let grammar = match value {
        Value::String(word) if word.is_empty() => return Ok(None),
        Value::String(word) if word == "json" => Grammar::json_object(),
        schema @ Value::Object(_) => Grammar::Json(schema),
        other => return Err(wrong("format", "\"json\" or a JSON schema: an object", &other)),
    };
    Ok(Some(Structure { field: "format".to_owned(), grammar, enforcement: Enforcement::BestEffort }))
}

fn structured_outputs(value: Value) -> Result<Option<Structure>, ApiError> {
    const NAME: &str = "structured_outputs";
    let mut fields = StrictFields::of(value, NAME)?;
    let within = |error: ApiError| error.within(NAME);
    let mut asked = Vec::new();
    let mut ask = |name: &str, grammar| asked.push(Structure::strict(format!("{NAME}.{name}"), grammar));
    if let Some(schema) = fields.take("json") {
        ask("json", Grammar::Json(schema_of(schema).map_err(within)?));
    }
    if let Some(expression) = fields.text("regex").map_err(within)? {
        ask("regex", Grammar::Regex(expression));
    }
    if let Some(choices) = fields.array("choice").map_err(within)? {
        ask("choice", Grammar::Choice(choices_of(choices).map_err(within)?));
    }
    if let Some(source) = fields.text("grammar").map_err(within)? {
        ask("grammar", grammar_of(source));
    }
    if fields.flag("json_object", false).map_err(within)? {
        ask("json_object", Grammar::json_object());
    }
    fields.finish().map_err(within)?;
    if asked.len() > 1 {
        let names: Vec<&str> = asked.iter().map(|structure| structure.field.as_str()).collect();
        let message = format!("{} each define the form of the answer; send one of them", names.join(" and "));
        return Err(ApiError::invalid(NAME, message));
    }
    Ok(asked.pop())
}

/// Reads a schema, or the text of one.
fn schema_of(value: Value) -> Result<Value, ApiError> {
    match value {
        Value::String(text) => model_files::strict_json::parse(text.as_bytes()).map_err(|error| {
            ApiError::invalid("json", format!("'json' is a string that is not JSON: {error}"))
        }),
        schema @ (Value::Object(_) | Value::Bool(_)) => Ok(schema),
        other => Err(wrong("json", "a JSON schema: an object, or its text", &other)),
    }
}

fn choices_of(items: Vec<Value>) -> Result<Vec<String>, ApiError> {
    if items.len() > MAX_CHOICES {
        return Err(ApiError::invalid("choice", format!("'choice' may hold at most {MAX_CHOICES} texts")));
    }
    let text = |item| match item {
        Value::String(text) => Ok(text),
        other => Err(wrong("choice", "an array of texts", &other)),
    };
    items.into_iter().map(text).collect()
}

/// Guesses the grammar's syntax as vLLM does: rules with `::=` are GBNF, anything else is Lark.
fn grammar_of(source: String) -> Grammar {
    if source.contains("::=") { Grammar::Gbnf(source) } else { Grammar::Lark(source) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_of(body: &Value) -> Result<Option<Structure>, ApiError> {
        let mut fields = StrictFields::parse(body.to_string().as_bytes())?;
        let structure = read(&mut fields)?;
        fields.finish()?;
        Ok(structure)
    }

    #[test]
    fn every_way_to_ask_is_understood() {
        let schema = json!({ "type": "integer" });
        for (body, grammar) in [
            (json!({ "response_format": { "type": "json_object" } }), Grammar::json_object()),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "strict": true, "schema": schema } } }),
                Grammar::Json(schema.clone()),
            ),
            (
                json!({ "response_format": { "type": "json_object", "schema": schema } }),
                Grammar::Json(schema.clone()),
            ),
            (
                json!({ "response_format": { "type": "json_schema", "schema": schema } }),
                Grammar::Json(schema.clone()),
            ),
            (json!({ "structured_outputs": { "json": schema } }), Grammar::Json(schema.clone())),
            (json!({ "structured_outputs": { "json": schema.to_string() } }), Grammar::Json(schema.clone())),
            (json!({ "structured_outputs": { "regex": "[ab]+" } }), Grammar::Regex("[ab]+".into())),
            (
                json!({ "structured_outputs": { "choice": ["a", "b"] } }),
                Grammar::Choice(vec!["a".into(), "b".into()]),
            ),
            (
                json!({ "structured_outputs": { "grammar": "start: \"a\"" } }),
                Grammar::Lark("start: \"a\"".into()),
            ),
            (
                json!({ "structured_outputs": { "grammar": "root ::= \"a\"" } }),
                Grammar::Gbnf("root ::= \"a\"".into()),
            ),
            (json!({ "structured_outputs": { "json_object": true } }), Grammar::json_object()),
        ] {
            assert_eq!(read_of(&body).unwrap().unwrap().grammar, grammar, "{body}");
        }
        assert_eq!(read_of(&json!({ "response_format": { "type": "text" } })).unwrap(), None);
        assert_eq!(read_of(&json!({ "structured_outputs": {} })).unwrap(), None);
    }

    #[test]
    fn strict_schemas_are_held_in_full_and_others_as_far_as_can_be() {
        let schema = json!({ "type": "integer" });
        let openai = |strict: bool| json!({ "response_format": { "type": "json_schema", "json_schema": { "strict": strict, "schema": schema } } });
        for (body, enforcement) in [
            (openai(true), Enforcement::Strict),
            (openai(false), Enforcement::BestEffort),
            (
                json!({ "response_format": { "type": "json_object", "schema": schema } }),
                Enforcement::BestEffort,
            ),
            (json!({ "structured_outputs": { "json": schema } }), Enforcement::Strict),
        ] {
            assert_eq!(read_of(&body).unwrap().unwrap().enforcement, enforcement, "{body}");
        }
        assert_eq!(ollama_format(schema).unwrap().unwrap().enforcement, Enforcement::BestEffort);
    }

    #[test]
    fn other_servers_ways_to_ask_for_a_form_are_refused_with_the_way_that_is_taken() {
        for (body, shown) in [
            (json!({ "guided_json": {"type": "object"} }), r#"'structured_outputs': {"json": ...}"#),
            (json!({ "json_schema": {"type": "object"} }), r#"'structured_outputs': {"json": ...}"#),
            (json!({ "grammar": "root ::= \"a\"" }), r#"'structured_outputs': {"grammar": ...}"#),
            (
                json!({ "response_format": { "type": "regex", "pattern": "a" } }),
                r#"'structured_outputs': {"regex": ...}"#,
            ),
            (
                json!({ "response_format": { "type": "json_schema" } }),
                r#"json_schema': {"name": ..., "schema": ...}"#,
            ),
        ] {
            let error = read_of(&body).unwrap_err().to_string();
            assert!(error.contains(shown), "{body}: {error}");
        }
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_name() {
        for (body, name) in [
            (json!({ "response_format": { "type": "structural_tag" } }), "response_format.type"),
            (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema"),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": 1 } } }),
                "response_format.json_schema.schema",
            ),
            (
                json!({ "structured_outputs": { "regex": "a", "whitespace_pattern": " " } }),
                "structured_outputs.whitespace_pattern",
            ),
            (json!({ "structured_outputs": { "regex": "a", "choice": ["a"] } }), "structured_outputs"),
            (
                json!({ "structured_outputs": { "regex": "a" }, "response_format": { "type": "json_object" } }),
                "structured_outputs",
            ),
        ] {
            let error = format!("{:?}", read_of(&body).unwrap_err());
            assert!(error.contains(&format!("param: Some(\"{name}\")")), "{body}: {error}");
        }
    }
}

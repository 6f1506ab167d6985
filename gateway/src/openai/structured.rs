//! What an answer has to look like, as OpenAI (`response_format`) and vLLM (`structured_outputs`) let it be said.

use std::sync::Arc;

use serde_json::Value;
use text::grammar::{Grammar, Thought};

use super::fields::{Fields, wrong};
use crate::errors::ApiError;

/// Most texts to choose from.
const MAX_CHOICES: usize = 4096;

/// What is asked for, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct Structure {
    /// The field that asks for it.
    pub field: String,
    /// What it asks for.
    pub grammar: Grammar,
}

impl Structure {
    /// The grammar as an executor takes it, with `thought` before the answer. Nobody has compiled it yet.
    ///
    /// # Errors
    /// It cannot be honoured.
    pub fn source(&self, thought: Option<Thought>) -> Result<GrammarSource, ApiError> {
        let source = self.grammar.source_behind(thought);
        let source = source.map_err(|error| refused(&self.field, &error))?;
        let (field, param) = (self.field.clone(), self.field.clone());
        Ok(GrammarSource { source: source.into(), field, param, parts: Vec::new() })
    }
}

/// A grammar as an executor takes it, and what asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrammarSource {
    /// The form in which it travels.
    pub source: Arc<str>,
    /// The field that asks for it, as a message names it.
    pub field: String,
    /// The field that is to blame if it cannot be honoured.
    pub param: String,
    /// Grammars of callers that it is made of. They are compiled before it, so that a refusal names their field.
    pub parts: Vec<GrammarSource>,
}

/// What is wrong with the grammar in `field`.
pub fn refused(field: &str, error: &impl std::fmt::Display) -> ApiError {
    ApiError::bad_request("invalid_grammar", format!("'{field}' cannot be used: {error}")).of(field)
}

/// Reads both fields, of which one may ask for something.
pub fn read(fields: &mut Fields) -> Result<Option<Structure>, ApiError> {
    let openai = fields.take("response_format").map(response_format).transpose()?.flatten();
    let vllm = fields.take("structured_outputs").map(structured_outputs).transpose()?.flatten();
    match (openai, vllm) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            "structured_outputs",
            "'response_format' and 'structured_outputs' both say what the answer has to look like; send one of them",
        )),
        (openai, vllm) => Ok(openai.or(vllm)),
    }
}

fn response_format(value: Value) -> Result<Option<Structure>, ApiError> {
    let within = |error: ApiError| error.within("response_format");
    let mut fields = Fields::of(value, "response_format")?;
    let kind = fields.required_text("type").map_err(within)?;
    let structure = match kind.as_str() {
        "text" => None,
        "json_object" => {
            Some(Structure { field: "response_format".to_owned(), grammar: Grammar::json_object() })
        }
        "json_schema" => Some(json_schema(fields.take("json_schema")).map_err(within)?),
        _ => {
            let message = format!("the type '{kind}' is not supported; use text, json_object or json_schema");
            return Err(ApiError::bad_request("unsupported_parameter", message).of("response_format.type"));
        }
    };
    fields.finish().map_err(within)?;
    Ok(structure)
}

fn json_schema(value: Option<Value>) -> Result<Structure, ApiError> {
    let value = value.ok_or_else(|| {
        ApiError::missing("json_schema", "a response format of type json_schema needs 'json_schema'")
    })?;
    let fields = Fields::of(value, "json_schema")?;
    named_schema(fields, "response_format.json_schema.schema").map_err(|error| error.within("json_schema"))
}

/// A schema with its name; `field` is where it stands.
fn named_schema(mut fields: Fields, field: &str) -> Result<Structure, ApiError> {
    // Labels: what the answer has to look like is all in the schema, and always kept to.
    for label in ["name", "description"] {
        fields.text(label)?;
    }
    fields.flag("strict", false)?;
    let schema = fields.take("schema");
    fields.finish()?;
    let grammar = match schema {
        None => Grammar::json_object(),
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Grammar::Json(schema),
        Some(other) => return Err(wrong("schema", "a JSON schema: an object", &other)),
    };
    Ok(Structure { field: field.to_owned(), grammar })
}

/// Reads `text.format` of the Responses API, which is a response format in one piece.
pub fn text_format(value: Value) -> Result<Option<Structure>, ApiError> {
    const NAME: &str = "text.format";
    let within = |error: ApiError| error.within(NAME);
    let mut fields = Fields::of(value, NAME)?;
    let kind = fields.required_text("type").map_err(within)?;
    match kind.as_str() {
        "text" => fields.finish().map(|()| None).map_err(within),
        "json_object" => {
            fields.finish().map_err(within)?;
            Ok(Some(Structure { field: NAME.to_owned(), grammar: Grammar::json_object() }))
        }
        "json_schema" => named_schema(fields, "text.format.schema").map(Some).map_err(within),
        _ => {
            let message = format!("the type '{kind}' is not supported; use text, json_object or json_schema");
            Err(within(ApiError::bad_request("unsupported_parameter", message).of("type")))
        }
    }
}

/// Reads `format` of Ollama's routes: `json`, or a schema.
pub fn ollama_format(value: Value) -> Result<Option<Structure>, ApiError> {
    let grammar = match value {
        Value::String(word) if word.is_empty() => return Ok(None),
        Value::String(word) if word == "json" => Grammar::json_object(),
        schema @ Value::Object(_) => Grammar::Json(schema),
        other => return Err(wrong("format", "\"json\" or a JSON schema: an object", &other)),
    };
    Ok(Some(Structure { field: "format".to_owned(), grammar }))
}

fn structured_outputs(value: Value) -> Result<Option<Structure>, ApiError> {
    const NAME: &str = "structured_outputs";
    let mut fields = Fields::of(value, NAME)?;
    let within = |error: ApiError| error.within(NAME);
    let mut asked = Vec::new();
    let mut ask = |name: &str, grammar| asked.push(Structure { field: format!("{NAME}.{name}"), grammar });
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
        let message =
            format!("{} each say what the answer has to look like; send one of them", names.join(" and "));
        return Err(ApiError::invalid(NAME, message));
    }
    Ok(asked.pop())
}

/// A schema, or the text of one.
fn schema_of(value: Value) -> Result<Value, ApiError> {
    match value {
        Value::String(text) => files::strict_json::parse(text.as_bytes())
            .map_err(|error| ApiError::invalid("json", format!("'json' is a text that is no JSON: {error}"))),
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

/// As vLLM has it: what defines rules with `::=` is in Backus-Naur form, anything else in Lark.
fn grammar_of(source: String) -> Grammar {
    if source.contains("::=") { Grammar::Gbnf(source) } else { Grammar::Lark(source) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_of(body: &Value) -> Result<Option<Structure>, ApiError> {
        let mut fields = Fields::parse(body.to_string().as_bytes())?;
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

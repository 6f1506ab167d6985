//! The body of `POST /v1/responses`.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    super::{
        adapter_switches,
        chat_request::ChatRequest,
        params::{self, MAX_LOGPROBS, ParamLimits, Params},
        reasoning::effort::{self, ReasoningEffort},
        stops, stream_options,
        strict_fields::{StrictFields, wrong},
        structured::{self, Structure},
        target::ModelRef,
        tools::tool_params::{self, Dialect, Tools},
    },
    items::{self, Item},
};
use crate::{errors::ApiError, response_store::StoredResponse, text::TemplateOptions};

/// Maximum number of `metadata` entries, and maximum characters of a name and of a value.
const MAX_METADATA: (usize, usize, usize) = (16, 64, 512);
const LOGPROBS: &str = "message.output_text.logprobs";

/// Fields of the request that the response repeats.
#[derive(Debug, Serialize)]
pub struct ResponseEcho {
    /// System message before the conversation.
    pub instructions: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub reasoning: Value,
    pub store: bool,
    /// Temperature in effect, after defaults.
    pub temperature: f32,
    /// Nucleus size in effect, after defaults.
    pub top_p: f32,
    /// Alternatives to report for each token.
    pub top_logprobs: u32,
    /// Format of the text, as requested.
    pub text: Value,
    pub tool_choice: Value,
    pub tools: Value,
    /// Always `disabled`: a conversation that exceeds the context fails.
    pub truncation: &'static str,
    pub background: bool,
}

/// A request's body, checked without looking up the model.
#[derive(Debug)]
pub struct ResponsesBody {
    pub asked: ResponseEcho,
    wanted: ModelRef,
    params: Params,
    logprobs: Option<u32>,
    tools: Option<Tools>,
    effort: Option<ReasoningEffort>,
    items: Vec<Item>,
}

impl ResponsesBody {
    /// Reads `body`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read(body: &[u8], limits: &ParamLimits<'_>) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let wanted = ModelRef::read(&mut fields)?;
        let metadata = metadata(&mut fields)?;
        fields.labels()?;
        let (structure, text) = text(&mut fields)?;
        let (effort, reasoning) = reasoning(&mut fields)?;
        let max_tokens = fields.count("max_output_tokens", 1..=u32::MAX)?;
        let delivery = stream_options::read_response(&mut fields)?;
        let options =
            params::RouteOptions { max_tokens, delivery, structure, stop: stops::read(&mut fields)? };
        let params = params::read_beside(options, &mut fields, limits)?;
        let params = Params { switches: adapter_switches::read(&mut fields)?, ..params };
        let logprobs = logprobs(&mut fields)?;
        let tool_choice = fields.peek("tool_choice").cloned().unwrap_or_else(|| json!("auto"));
        let shown = fields.peek("tools").cloned().unwrap_or_else(|| json!([]));
        let parallel_tool_calls = fields.peek("parallel_tool_calls").and_then(Value::as_bool).unwrap_or(true);
        let tools = tool_params::read_as(Dialect::Flat, &mut fields)?;
        let items = items::read(fields.take("input"))?;
        let asked = ResponseEcho {
            instructions: fields.text("instructions")?,
            max_output_tokens: max_tokens,
            metadata,
            parallel_tool_calls,
            previous_response_id: fields.text("previous_response_id")?,
            reasoning,
            store: fields.flag("store", true)?,
            temperature: params.sampling.temperature,
            top_p: params.sampling.top_p,
            top_logprobs: logprobs.unwrap_or(0),
            text,
            tool_choice,
            tools: shown,
            truncation: "disabled",
            background: false,
        };
        fields.finish()?;
        Ok(Self { asked, wanted, params, logprobs, tools, effort, items })
    }

    /// Puts the input and the output of `entry` before this request's items.
    pub(super) fn go_on_from(&mut self, entry: &StoredResponse) -> Result<(), ApiError> {
        let mut values = items::parse(&entry.input)?;
        let response: Value = serde_json::from_str(&entry.response)
            .map_err(|error| ApiError::internal(format!("the stored response is damaged: {error}")))?;
        values.extend(response["output"].as_array().cloned().unwrap_or_default());
        let before = items::read(Some(values.into()))
            .map_err(|error| ApiError::invalid("previous_response_id", error.to_string()))?;
        self.items.splice(..0, before);
        Ok(())
    }

    /// Returns the chat request, the fields that the response repeats, and all input items.
    pub(super) fn conversation(self) -> Result<(ChatRequest, ResponseEcho, Vec<Value>), ApiError> {
        let Self { asked, wanted, params, logprobs, tools, effort, items } = self;
        let messages = items::messages(asked.instructions.as_deref(), &items);
        let showing = TemplateOptions::default();
        let conversation =
            ChatRequest { wanted, params, logprobs, messages, tools, showing, effort, field: "input" };
        Ok((conversation, asked, items.into_iter().map(|item| item.value).collect()))
    }
}

fn metadata(fields: &mut StrictFields) -> Result<Map<String, Value>, ApiError> {
    let (most, name_chars, value_chars) = MAX_METADATA;
    let map = match fields.take("metadata") {
        None => return Ok(Map::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong("metadata", "an object of texts", &other)),
    };
    let is_short = |(name, value): (&String, &Value)| {
        let text = value.as_str();
        name.chars().count() <= name_chars && text.is_some_and(|text| text.chars().count() <= value_chars)
    };
    if map.len() > most || !map.iter().all(is_short) {
        let message = format!(
            "'metadata' may hold at most {most} texts of {value_chars} characters, under names of {name_chars}"
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(map)
}

/// Reads `text`; returns the structured output and the field as the response repeats it.
fn text(fields: &mut StrictFields) -> Result<(Option<Structure>, Value), ApiError> {
    let plain = || json!({ "format": { "type": "text" } });
    let Some(value) = fields.take("text") else { return Ok((None, plain())) };
    let mut inside = StrictFields::of(value, "text")?;
    let format = inside.take("format");
    inside.finish().map_err(|error| error.within("text"))?;
    let Some(format) = format else { return Ok((None, plain())) };
    let structure = structured::text_format(format.clone())?;
    Ok((structure, json!({ "format": format })))
}

/// Reads `reasoning`; returns the effort and the field as the response repeats it. Summaries other than
/// `auto` fail, because responses contain the full reasoning content.
fn reasoning(fields: &mut StrictFields) -> Result<(Option<ReasoningEffort>, Value), ApiError> {
    const NAME: &str = "reasoning";
    let Some(value) = fields.take(NAME) else {
        return Ok((None, json!({ "effort": null, "summary": null })));
    };
    let mut inside = StrictFields::of(value, NAME)?;
    let within = |error: ApiError| error.within(NAME);
    let asked = inside.peek("effort").cloned();
    let effort = effort::read(&mut inside, "effort").map_err(within)?;
    let effort = effort.map(|effort| effort.at("reasoning.effort"));
    let summary = inside.text("summary").map_err(within)?;
    if summary.as_deref().is_some_and(|summary| summary != "auto") {
        let message = "summaries of reasoning are not available; send 'auto', or remove it";
        return Err(ApiError::bad_request("unsupported_parameter", message).of("reasoning.summary"));
    }
    inside.finish().map_err(within)?;
    Ok((effort, json!({ "effort": asked, "summary": summary })))
}

fn logprobs(fields: &mut StrictFields) -> Result<Option<u32>, ApiError> {
    let top = fields.count("top_logprobs", 0..=MAX_LOGPROBS)?;
    let mut wanted = false;
    for item in fields.array("include")?.unwrap_or_default() {
        match item.as_str() {
            Some(LOGPROBS) => wanted = true,
            // Accepted, because responses contain reasoning content unencrypted.
            Some("reasoning.encrypted_content") => {}
            _ => {
                let message = format!("'include' supports only '{LOGPROBS}'; remove other values");
                return Err(ApiError::bad_request("unsupported_parameter", message).of("include"));
            }
        }
    }
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = format!("'top_logprobs' is only allowed if 'include' has '{LOGPROBS}'");
            Err(ApiError::invalid("top_logprobs", message))
        }
    }
}

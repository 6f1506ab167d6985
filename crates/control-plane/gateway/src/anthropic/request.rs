//! Reads the body of `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use serde_json::Value;
use text::grammar::Grammar;

use super::{
    conversation,
    thinking::{self, ThinkingDisplay},
    tool_params,
};
use crate::{
    errors::ApiError,
    openai::{
        chat_request::{self, ChatRequest},
        params::{self, ParamLimits, RouteOptions},
        stops,
        stream_options::{ResponseMode, StreamOptions},
        strict_fields::StrictFields,
        structured::Structure,
        target::ModelRef,
    },
};

/// Body of a request, checked without looking up the model.
#[derive(Debug)]
pub struct MessagesBody {
    pub conversation: ChatRequest,
    pub(super) options: AnswerOptions,
}

/// Options that decide the form of the answer.
#[derive(Debug, Clone, Default)]
pub(super) struct AnswerOptions {
    pub display: ThinkingDisplay,
    /// Tools whose input is streamed as the model writes it, which may be no valid JSON.
    pub eager_tools: Vec<String>,
}

impl MessagesBody {
    /// Reads the body of `/v1/messages`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read(body: &[u8], limits: &ParamLimits<'_>) -> Result<Self, ApiError> {
        let read = Self::read_to_count(body, limits)?;
        if read.conversation.params.max_tokens.is_none() {
            let message = "'max_tokens' is required: the maximum number of tokens to generate";
            return Err(ApiError::missing("max_tokens", message));
        }
        Ok(read)
    }

    /// Reads the body of `/v1/messages/count_tokens`, where `max_tokens` is optional.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read_to_count(body: &[u8], limits: &ParamLimits<'_>) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        check_thread(&fields)?;
        check_edits(&mut fields)?;
        let wanted = ModelRef::read(&mut fields)?;
        fields.labels()?;
        // `cache_control` marks where other servers begin to cache; this server caches every prefix.
        fields.inert(&["cache_control"]);
        let output = OutputConfig::read(&mut fields)?;
        let thinking = thinking::read(&mut fields, output.effort)?;
        let asked = RouteOptions {
            max_tokens: fields.count("max_tokens", 0..=u32::MAX)?,
            delivery: delivery(&mut fields)?,
            structure: output.structure,
            stop: stops::stop_strings("stop_sequences", fields.array("stop_sequences")?.unwrap_or_default())?,
        };
        let params = params::read_beside(asked, &mut fields, limits)?;
        let (tools, eager_tools) = tool_params::read(&mut fields)?;
        let messages = conversation::read(fields.take("system"), fields.array("messages")?)?;
        fields.finish()?;
        let (showing, effort) = (chat_request::continuing(&messages), thinking.effort);
        let eager_tools = if params.delivery == ResponseMode::Whole { Vec::new() } else { eager_tools };
        let (logprobs, field) = (None, "messages");
        let conversation = ChatRequest { wanted, params, logprobs, messages, tools, showing, effort, field };
        Ok(Self { conversation, options: AnswerOptions { display: thinking.display, eager_tools } })
    }
}

/// Refuses conversations that the server shall hold, with the code upon which Anthropic's clients send whole
/// conversations instead.
fn check_thread(fields: &StrictFields) -> Result<(), ApiError> {
    const NAME: &str = "thread";
    if fields.peek(NAME).is_none() {
        return Ok(());
    }
    let message = "'thread' is not supported: this server holds no conversations; send the whole conversation without it";
    Err(ApiError::bad_request("thread_unsupported_request", message).of(NAME))
}

/// Checks `context_management`, whose only supported edit keeps all reasoning content.
fn check_edits(fields: &mut StrictFields) -> Result<(), ApiError> {
    const NAME: &str = "context_management";
    let Some(value) = fields.take(NAME) else { return Ok(()) };
    let within = |error: ApiError| error.within(NAME);
    let mut inside = StrictFields::of(value, NAME)?;
    for (index, edit) in inside.array("edits").map_err(within)?.unwrap_or_default().into_iter().enumerate() {
        let place = format!("{NAME}.edits[{index}]");
        let fields = StrictFields::of(edit, &place)?;
        check_edit(fields).map_err(|error| error.within(&place))?;
    }
    inside.finish().map_err(within)
}

fn check_edit(mut fields: StrictFields) -> Result<(), ApiError> {
    let kind = fields.required_text("type")?;
    if kind != "clear_thinking_20251015" {
        let message =
            format!("the edit '{kind}' is not supported: this server changes no conversation; remove it");
        return Err(ApiError::bad_request("unsupported_parameter", message).of("type"));
    }
    match fields.take("keep") {
        Some(Value::String(all)) if all == "all" => fields.finish(),
        _ => {
            let message = "'keep' must be 'all', because the chat template decides which reasoning content the \
                           model sees; send 'all', or remove the edit";
            Err(ApiError::bad_request("unsupported_parameter", message).of("keep"))
        }
    }
}

fn delivery(fields: &mut StrictFields) -> Result<ResponseMode, ApiError> {
    let streams = fields.flag("stream", false)?;
    Ok(if streams { ResponseMode::Stream(StreamOptions::PLAIN) } else { ResponseMode::Whole })
}

/// Content of `output_config`, and of the older field `output_format`.
struct OutputConfig {
    structure: Option<Structure>,
    /// The requested effort, not yet checked.
    effort: Option<String>,
}

impl OutputConfig {
    fn read(fields: &mut StrictFields) -> Result<Self, ApiError> {
        const NAME: &str = "output_config";
        let older =
            fields.take("output_format").map(|format| output_format(format, "output_format")).transpose()?;
        let Some(value) = fields.take(NAME) else { return Ok(Self { structure: older, effort: None }) };
        let mut inside = StrictFields::of(value, NAME)?;
        let within = |error: ApiError| error.within(NAME);
        let newer =
            inside.take("format").map(|format| output_format(format, "output_config.format")).transpose()?;
        let effort = inside.text("effort").map_err(within)?;
        inside.finish().map_err(within)?;
        if newer.is_some() && older.is_some() {
            let message =
                "'output_config.format' and 'output_format' both define the form of the answer; send one";
            return Err(ApiError::invalid("output_format", message));
        }
        Ok(Self { structure: newer.or(older), effort })
    }
}

/// Reads the format in the field `name`, whose schema is enforced in full, as by Anthropic.
fn output_format(value: Value, name: &str) -> Result<Structure, ApiError> {
    let within = |error: ApiError| error.within(name);
    let mut fields = StrictFields::of(value, name)?;
    let kind = fields.required_text("type").map_err(within)?;
    if kind != "json_schema" {
        let message = format!("the type '{kind}' is not supported; use json_schema");
        return Err(within(ApiError::bad_request("unsupported_parameter", message).of("type")));
    }
    let schema = fields.take("schema").filter(Value::is_object);
    let missing = || ApiError::missing("schema", "'schema' is required: a JSON schema");
    let schema = schema.ok_or_else(missing).map_err(within)?;
    fields.finish().map_err(within)?;
    Ok(Structure::strict(format!("{name}.schema"), Grammar::Json(schema)))
}

//! Reads the bodies of `/api/chat` and `/api/generate`.

use serde_json::{Value, json};
use text::tokenizer::AddSpecial;

use super::messages;
use crate::{
    errors::ApiError,
    openai::{
        chat::logprobs,
        chat_request::{self, ChatRequest},
        completions,
        generation_request::Echo,
        params::{self, ParamLimits, Params, RouteOptions},
        reasoning::effort,
        stops,
        stream_options::{ResponseMode, StreamOptions},
        strict_fields::{StrictFields, wrong},
        structured,
        target::ModelRef,
        tools::tool_params::{self, Dialect},
    },
    text::{ChatMessage, TemplateOptions},
};

/// Tag that Ollama's clients add to a model name without tag.
const TAG: &str = ":latest";

/// Field of the reasoning effort: a boolean or a level.
const THINK: &str = "think";

/// Options of the machine, which the operator decides; answers do not depend on them.
const OF_THE_MACHINE: [&str; 10] = [
    "f16_kv",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
];

/// A request, checked without looking up the model.
#[derive(Debug)]
pub enum OllamaRequestKind {
    /// Continues a conversation through the chat template.
    Chat(Box<ChatRequest>),
    /// Continues a text without template.
    Raw(Box<completions::CompletionBody>),
    /// Loads the model without generating text.
    Load(ModelRef),
}

struct CommonFields {
    wanted: ModelRef,
    params: Params,
    logprobs: Option<u32>,
}

#[derive(Debug)]
pub struct ChatBody;

impl ChatBody {
    /// Reads `body`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read(body: &[u8], limits: &ParamLimits<'_>) -> Result<OllamaRequestKind, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let common = common(&mut fields, limits)?;
        let messages = messages::read(fields.array("messages")?.unwrap_or_default())?;
        let tools = tool_params::read_as(Dialect::Functions, &mut fields)?;
        let effort = effort::read_switch(&mut fields, THINK)?;
        fields.finish()?;
        let CommonFields { wanted, params, logprobs } = common;
        if messages.is_empty() {
            return Ok(OllamaRequestKind::Load(wanted));
        }
        // Ollama's templates leave a final assistant message open, so the answer continues it.
        let (showing, field) = (chat_request::continuing(&messages), "messages");
        let conversation = ChatRequest { wanted, params, logprobs, messages, tools, showing, effort, field };
        Ok(OllamaRequestKind::Chat(Box::new(conversation)))
    }
}

#[derive(Debug)]
pub struct GenerateBody;

impl GenerateBody {
    /// Reads `body`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read(body: &[u8], limits: &ParamLimits<'_>) -> Result<OllamaRequestKind, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let common = common(&mut fields, limits)?;
        let (prompt, system) = (fields.text("prompt")?.unwrap_or_default(), fields.text("system")?);
        let raw = fields.flag("raw", false)?;
        // A raw prompt uses no template, which alone could set the reasoning effort.
        let effort = if raw { None } else { effort::read_switch(&mut fields, THINK)? };
        fields.finish()?;
        let CommonFields { wanted, params, logprobs } = common;
        let system = system.filter(|system| !system.is_empty());
        if raw && system.is_some() {
            let message =
                "a 'raw' prompt is sent to the model unchanged; put the text of 'system' into the prompt";
            return Err(ApiError::invalid("system", message));
        }
        Ok(if prompt.is_empty() {
            OllamaRequestKind::Load(wanted)
        } else if raw {
            let (echo, add, prompt) = (Echo::Nothing, AddSpecial::Yes, Some(Value::String(prompt)));
            OllamaRequestKind::Raw(Box::new(completions::CompletionBody {
                wanted,
                params,
                logprobs,
                echo,
                add,
                prompt,
            }))
        } else {
            let message = |role, content| ChatMessage { role, content, ..ChatMessage::default() };
            let system = system.map(|system| message("system", system));
            let messages = system.into_iter().chain([message("user", prompt)]).collect();
            let (tools, showing, field) = (None, TemplateOptions::default(), "prompt");
            OllamaRequestKind::Chat(Box::new(ChatRequest {
                wanted,
                params,
                logprobs,
                messages,
                tools,
                showing,
                effort,
                field,
            }))
        })
    }
}

/// Reads the model's name without Ollama's tag.
pub(super) fn wanted(fields: &mut StrictFields) -> Result<ModelRef, ApiError> {
    let mut wanted = ModelRef::read(fields)?;
    if let Some(name) = wanted.model.strip_suffix(TAG).filter(|name| !name.is_empty()) {
        wanted.model = name.to_owned();
    }
    Ok(wanted)
}

fn common(fields: &mut StrictFields, limits: &ParamLimits<'_>) -> Result<CommonFields, ApiError> {
    let wanted = wanted(fields)?;
    keep_alive(fields)?;
    let stream = fields.flag("stream", true)?;
    let structure = fields.take("format").map(structured::ollama_format).transpose()?.flatten();
    let logprobs = logprobs(fields)?;
    let options = fields.take("options").unwrap_or_else(|| json!({}));
    let mut options = StrictFields::of(options, "options")?;
    let within = |error: ApiError| error.within("options");
    let max_tokens = most(&mut options).map_err(within)?;
    let delivery = if stream { ResponseMode::Stream(StreamOptions::PLAIN) } else { ResponseMode::Whole };
    let stop = stops::read(&mut options).map_err(within)?;
    let asked = RouteOptions { max_tokens, delivery, structure, stop };
    let mut params = params::read_beside(asked, &mut options, limits).map_err(within)?;
    repetition(&mut options, &mut params).map_err(within)?;
    // The context length is fixed, and a prompt that exceeds it is refused, so `num_ctx` has no effect.
    options.count("num_ctx", 1..=u32::MAX).map_err(within)?;
    OF_THE_MACHINE.iter().for_each(|option| drop(options.take(option)));
    options.finish().map_err(within)?;
    Ok(CommonFields { wanted, params, logprobs })
}

/// Reads `num_predict`; -1 and -2 mean as many tokens as the context holds.
fn most(options: &mut StrictFields) -> Result<Option<u32>, ApiError> {
    let most = options.integer("num_predict", -2..=i64::from(u32::MAX))?;
    match most {
        Some(0) => Err(ApiError::invalid(
            "num_predict",
            "'num_predict' must be at least 1, or -1 for the rest of the context",
        )),
        other => Ok(other.and_then(|most| u32::try_from(most).ok())),
    }
}

/// Reads Ollama's repetition penalty, which applies to the whole text here.
fn repetition(options: &mut StrictFields, params: &mut Params) -> Result<(), ApiError> {
    if let Some(penalty) = options.number("repeat_penalty", 0.0..=10.0)? {
        if penalty == 0.0 {
            return Err(ApiError::invalid("repeat_penalty", "'repeat_penalty' must be above 0; 1 is off"));
        }
        params.sampling.repetition_penalty = penalty;
    }
    match options.integer("repeat_last_n", -1..=i64::MAX)? {
        None | Some(-1) => Ok(()),
        // A disabled penalty needs no range.
        Some(_) if params.sampling.repetition_penalty == 1.0 => Ok(()),
        Some(0) => {
            params.sampling.repetition_penalty = 1.0;
            Ok(())
        }
        Some(_) => Err(ApiError::invalid(
            "repeat_last_n",
            "'repeat_last_n' must be -1 (the whole text) or 0 (no penalty); remove it",
        )),
    }
}

/// Accepts `keep_alive`, because models stay loaded, but refuses a request to unload the model.
pub(super) fn keep_alive(fields: &mut StrictFields) -> Result<(), ApiError> {
    let Some(value) = fields.take("keep_alive") else { return Ok(()) };
    let is_nothing = match &value {
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.trim_end_matches(char::is_alphabetic).parse() == Ok(0.0),
        other => return Err(wrong("keep_alive", "seconds, or a time such as \"5m\"", other)),
    };
    if is_nothing {
        let message = "a request cannot unload a model here; remove 'keep_alive'";
        return Err(ApiError::bad_request("unsupported_parameter", message).of("keep_alive"));
    }
    Ok(())
}

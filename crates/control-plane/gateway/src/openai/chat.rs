//! `POST /v1/chat/completions`.

use super::{
    chat_request::ChatRequest,
    generation_request::GenerationRequest,
    messages::messages,
    params::{self, MAX_LOGPROBS, ParamLimits},
    reasoning::effort,
    request_context::RequestContext,
    strict_fields::StrictFields,
    target::ModelRef,
    template_options, tools,
};
use crate::{app::App, body_workers::BodyWork, errors::ApiError};

/// Body of a chat completion, checked without looking up the model.
#[derive(Debug)]
pub struct ChatCompletionBody(ChatRequest);

impl ChatCompletionBody {
    pub fn read(body: &[u8], limits: &ParamLimits<'_>) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let wanted = ModelRef::read(&mut fields)?;
        let params = params::read(&mut fields, limits)?;
        let logprobs = logprobs(&mut fields)?;
        let (messages, tools) =
            (messages(fields.array("messages")?)?, tools::tool_params::read(&mut fields)?);
        let (showing, effort) =
            (template_options::read(&mut fields)?, effort::read(&mut fields, "reasoning_effort")?);
        fields.finish()?;
        if params.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "'max_tokens' must be at least 1 for a chat"));
        }
        let field = "messages";
        Ok(Self(ChatRequest { wanted, params, logprobs, messages, tools, showing, effort, field }))
    }
}

pub(crate) fn job(app: &App, ask: RequestContext) -> Result<BodyWork<GenerationRequest>, ApiError> {
    let RequestContext { caller, serving, default_seed, body } = ask;
    let ChatCompletionBody(conversation) =
        ChatCompletionBody::read(&body, &ParamLimits::of(&serving, default_seed))?;
    conversation.job(app, &caller, serving)
}

/// Reads `logprobs` and `top_logprobs`: the number of alternatives to report for each token.
pub(crate) fn logprobs(fields: &mut StrictFields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.flag("logprobs", false)?;
    let top = fields.count("top_logprobs", 0..=MAX_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "'top_logprobs' is only allowed together with 'logprobs': true",
        )),
    }
}

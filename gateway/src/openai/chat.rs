//! `POST /v1/chat/completions`.

use settings::ToolCallParser;
use shmproto::message::Provisional;

use super::{
    ask::Ask,
    fields::Fields,
    job::{Echo, Job, Kind, Prompt, namespace},
    messages::messages,
    params::{self, EndTokens, Limits, MAX_LOGPROBS, Params},
    target::Wanted,
    tools::{self, Calling, asked::Tools},
};
use crate::{
    app::App,
    errors::ApiError,
    text::{ChatMessage, Text},
};

/// A body, checked as far as it can be without looking anything up.
#[derive(Debug)]
pub struct Body {
    wanted: Wanted,
    params: Params,
    logprobs: Option<u32>,
    messages: Vec<ChatMessage>,
    tools: Option<Tools>,
}

impl Body {
    /// Reads `body`.
    pub fn read(body: &[u8], limits: &Limits<'_>) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let wanted = Wanted::read(&mut fields)?;
        let params = params::read(&mut fields, limits)?;
        let logprobs = logprobs(&mut fields)?;
        let (messages, tools) = (messages(fields.array("messages")?)?, tools::asked::read(&mut fields)?);
        fields.finish()?;
        if params.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "'max_tokens' must be at least 1 for a chat"));
        }
        Ok(Self { wanted, params, logprobs, messages, tools })
    }
}

/// Turns a request into a job.
pub fn job(app: &App, ask: Ask) -> Result<Job, ApiError> {
    let Ask { caller, serving, default_seed, body } = ask;
    let body = Body::read(&body, &Limits::of(&serving, default_seed))?;
    let Body { wanted, params, logprobs, messages, tools } = body;
    let target = wanted.find(app, &serving, &caller)?;
    tools::check_history(&messages, &*serving.text)?;
    let calling = tools.map(|tools| calling(tools, app.tool_call_parser, &*serving.text, &params));
    let calling = calling.transpose()?;
    let shown = calling.as_ref().map_or(&[][..], |calling| &calling.shown);
    let tokens = serving.text.encode_chat(&messages, shown)?;
    let namespace = namespace(&caller, &target, &serving);
    let grammar = match (&calling, &params.structure) {
        (Some(calling), _) => calling.grammar.clone(),
        (None, structure) => {
            structure.as_ref().map(|structure| structure.source(&*serving.text)).transpose()?
        }
    };
    let prompts = vec![Prompt { tokens, text: None }];
    let (kind, echo, tenant) = (Kind::Chat, Echo::Nothing, caller.tenant);
    let answering = calling.map(|calling| calling.answering);
    Job { kind, serving, target, tenant, namespace, prompts, params, logprobs, echo, grammar, answering }
        .check()
}

/// Tools, ready to be shown and read, beside options that they do not go with.
fn calling(
    tools: Tools,
    parser: ToolCallParser,
    text: &dyn Text,
    params: &Params,
) -> Result<Calling, ApiError> {
    if params.delivery.provisional() == Provisional::Wanted {
        let message =
            "'provisional' is for text alone, and an answer with tools may be calls; leave either out";
        return Err(ApiError::invalid("stream_options.provisional", message));
    }
    let calling = Calling::new(tools, parser, text, params.structure.as_ref())?;
    if calling.grammar.is_some() && params.end_tokens == EndTokens::Ignore {
        let message = "'ignore_eos' lets no answer end, and calls that are required or strict have an end; send one of them";
        return Err(ApiError::invalid("ignore_eos", message));
    }
    Ok(calling)
}

fn logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
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

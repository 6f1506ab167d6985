//! A conversation to go on with, by whatever route it came: chat, the Responses API and Ollama's routes all become this.

use std::sync::Arc;

use settings::ToolCallParser;
use shmproto::message::Provisional;
use text::{chat_template::GenerationPrompt, detokenize::TextStart};

use super::{
    job::{Echo, Job, Kind, Prompt, namespace},
    params::{EndTokens, Params},
    target::Wanted,
    tools::{self, Calling, asked::Tools},
};
use crate::{
    app::App,
    caller::Caller,
    errors::ApiError,
    lifecycle::Serving,
    text::{ChatMessage, Showing, Text},
};

/// Checked as far as it can be without looking anything up.
#[derive(Debug)]
pub struct Conversation {
    /// The model.
    pub wanted: Wanted,
    /// How to go on.
    pub params: Params,
    /// Alternatives to report for each token; `None` is no log-probabilities.
    pub logprobs: Option<u32>,
    /// At least one.
    pub messages: Vec<ChatMessage>,
    /// Functions that may be called, if any may be.
    pub tools: Option<Tools>,
    /// How they are shown, but for the tools.
    pub showing: Showing,
    /// What the route calls the messages.
    pub field: &'static str,
}

impl Conversation {
    /// Turns it into a job of `caller`.
    ///
    /// # Errors
    /// The model is not there for them, or cannot be shown the conversation or what is asked of it.
    pub fn job(self, app: &App, caller: &Caller, serving: Arc<Serving>) -> Result<Job, ApiError> {
        let Self { wanted, params, logprobs, messages, tools, mut showing, field } = self;
        let target = wanted.find(app, &serving, caller)?;
        tools::check_history(&messages, &*serving.text).map_err(|error| error.of(field))?;
        let calling = tools.map(|tools| calling(tools, app.tool_call_parser, &*serving.text, &params));
        let calling = calling.transpose()?;
        showing.tools = calling.as_ref().map_or_else(Vec::new, |calling| calling.shown.clone());
        let tokens = serving.text.encode_chat(&messages, &showing)?;
        let start = match showing.prompt {
            GenerationPrompt::Continue => TextStart::Continuation,
            GenerationPrompt::Add | GenerationPrompt::Omit => TextStart::Beginning,
        };
        let namespace = namespace(caller, &target, &serving);
        let grammar = match (&calling, &params.structure) {
            (Some(calling), _) => calling.grammar.clone(),
            (None, structure) => {
                structure.as_ref().map(|structure| structure.source(&*serving.text)).transpose()?
            }
        };
        let job = Job {
            kind: Kind::Chat(start),
            prompt_field: field,
            serving,
            target,
            tenant: Arc::clone(&caller.tenant),
            namespace,
            prompts: vec![Prompt { tokens, text: None }],
            params,
            logprobs,
            echo: Echo::Nothing,
            grammar,
            answering: calling.map(|calling| calling.answering),
        };
        job.check()
    }
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

//! A conversation to go on with, by whatever route it came: chat, the Responses API and Ollama's routes all become this.

use std::sync::Arc;

use shmproto::message::ProvisionalMode;
use text::{chat_template::GenerationPrompt, detokenize::TextStart};

use super::{
    generation_request::{Echo, GenerationKind, GenerationRequest, PromptInput, namespace},
    params::{EndTokens, Params},
    reasoning::{Reasoning, ReasoningTags, effort::ReasoningEffort},
    target::ModelRef,
    tools::{self, RequestTools, tool_params::Tools},
};
use crate::{
    app::App,
    caller::Caller,
    errors::ApiError,
    lifecycle::ServingState,
    text::{ChatMessage, TemplateOptions},
};

/// Checked as far as it can be without looking anything up.
#[derive(Debug)]
pub struct ChatRequest {
    /// The model.
    pub wanted: ModelRef,
    /// How to go on.
    pub params: Params,
    /// Alternatives to report for each token; `None` is no log-probabilities.
    pub logprobs: Option<u32>,
    /// At least one.
    pub messages: Vec<ChatMessage>,
    /// Functions that may be called, if any may be.
    pub tools: Option<Tools>,
    /// How they are shown, but for the tools.
    pub showing: TemplateOptions,
    /// How much the model is to think, if that is said.
    pub effort: Option<ReasoningEffort>,
    /// What the route calls the messages.
    pub field: &'static str,
}

impl ChatRequest {
    /// Turns it into a job of `caller`.
    ///
    /// # Errors
    /// The model is not there for them, or cannot be shown the conversation or what is asked of it.
    pub fn job(
        self,
        app: &App,
        caller: &Caller,
        serving: Arc<ServingState>,
    ) -> Result<GenerationRequest, ApiError> {
        let Self { wanted, params, logprobs, messages, tools, mut showing, effort, field } = self;
        let target = wanted.find(app, &serving, caller)?;
        let text = &*target.text(&serving)?;
        tools::check_history(&messages, text).map_err(|error| error.of(field))?;
        let mut calling = tools.map(|tools| RequestTools::new(tools, app.parsers.calls, text)).transpose()?;
        showing.tools = calling.as_ref().map_or_else(Vec::new, RequestTools::shown);
        let template = text.facts().chat_template.as_deref();
        let tags = ReasoningTags::of(app.parsers.reasoning, template);
        if let Some(effort) = effort {
            effort.apply_to_template(template, tags, &mut showing.variables)?;
        }
        let tokens = text.encode_chat(&messages, &showing)?;
        let reasoning = tags.and_then(|tags| Reasoning::of(tags, &tokens, text));
        let start = match showing.prompt {
            GenerationPrompt::Continue => TextStart::Continuation,
            GenerationPrompt::Add | GenerationPrompt::Omit => TextStart::Beginning,
        };
        let namespace = namespace(caller, &target, &serving);
        let (answer, thought) =
            (params.structure.as_ref(), reasoning.map(|reasoning| reasoning.thought(text)));
        let grammar = match &mut calling {
            Some(calling) => calling.grammar(text, answer, thought)?,
            None => answer.map(|structure| structure.source(thought)).transpose()?,
        };
        if calling.is_some() {
            check_beside_calls(&params, grammar.is_some())?;
        }
        let job = GenerationRequest {
            kind: GenerationKind::Chat(start),
            prompt_field: field,
            serving,
            target,
            tenant: Arc::clone(&caller.tenant),
            namespace,
            prompts: vec![PromptInput { tokens, text: None }],
            params,
            logprobs,
            echo: Echo::Nothing,
            grammar,
            answering: calling.map(|calling| calling.answering),
            reasoning,
        };
        job.check()
    }
}

/// Refuses options that do not go with tools, whose calls have to look like something or not.
fn check_beside_calls(params: &Params, is_formed: bool) -> Result<(), ApiError> {
    if params.delivery.provisional() == ProvisionalMode::Wanted {
        let message =
            "'provisional' is for text alone, and an answer with tools may be calls; leave either out";
        return Err(ApiError::invalid("stream_options.provisional", message));
    }
    if is_formed && params.end_tokens == EndTokens::Ignore {
        let message = "'ignore_eos' lets no answer end, and calls that are required or strict have an end; send one of them";
        return Err(ApiError::invalid("ignore_eos", message));
    }
    Ok(())
}

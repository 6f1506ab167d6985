//! The chat request that the routes of all APIs with messages are read into.

use std::sync::Arc;

use shmproto::message::ProvisionalMode;
use text::{chat_template::GenerationPrompt, detokenize::TextStart};

use super::{
    adapter_switches::{self, AdapterSwitch},
    generation_request::{Echo, GenerationKind, GenerationRequest, PromptInput},
    namespace::namespace,
    params::{EndTokens, Params},
    reasoning::{Reasoning, ReasoningFormat, effort::ReasoningEffort},
    target::{ModelRef, ModelTarget},
    tools::{self, RequestTools, tool_params::Tools},
};
use crate::{
    app::App,
    body_workers::BodyWork,
    caller::Caller,
    config::OutputParsers,
    errors::ApiError,
    lifecycle::ServingState,
    text::{ChatMessage, TemplateOptions, Text},
};

/// Conversation to continue, checked without looking up the model.
#[derive(Debug)]
pub struct ChatRequest {
    pub wanted: ModelRef,
    pub params: Params,
    /// Alternatives to report for each token; `None` reports no log-probabilities.
    pub logprobs: Option<u32>,
    /// Messages of the conversation, at least one.
    pub messages: Vec<ChatMessage>,
    pub tools: Option<Tools>,
    /// Template options without the tools.
    pub showing: TemplateOptions,
    pub effort: Option<ReasoningEffort>,
    /// Name of the field that holds the messages on this route, for errors.
    pub field: &'static str,
}

/// The models of a request: the first, and those of later stages.
struct RequestedModels {
    target: ModelTarget,
    switches: Arc<[AdapterSwitch]>,
}

impl ChatRequest {
    /// Turns the conversation into a generation request of `caller`.
    ///
    /// # Errors
    /// The model is not available to the caller, or the model's template or grammar cannot express the
    /// request.
    pub fn job(
        self,
        app: &App,
        caller: &Caller,
        serving: Arc<ServingState>,
    ) -> Result<BodyWork<GenerationRequest>, ApiError> {
        self.prepare(app, caller, serving, GenerationRequest::check)
    }

    /// Counts the prompt's tokens, also of a prompt that is longer than the context.
    ///
    /// # Errors
    /// The method fails as [`ChatRequest::job`] does.
    pub(crate) fn count_tokens(
        self,
        app: &App,
        caller: &Caller,
        serving: Arc<ServingState>,
    ) -> Result<BodyWork<usize>, ApiError> {
        self.prepare(app, caller, serving, |job| Ok(job.prompt_tokens()))
    }

    /// Renders the conversation of `caller`, and passes the unchecked request to `finish`.
    fn prepare<T: 'static>(
        self,
        app: &App,
        caller: &Caller,
        serving: Arc<ServingState>,
        finish: fn(GenerationRequest) -> Result<T, ApiError>,
    ) -> Result<BodyWork<T>, ApiError> {
        let target = self.wanted.clone().find(app, &serving, caller)?;
        let switches = adapter_switches::resolve(&self.params.switches, app, &serving, caller)?;
        let models = RequestedModels { target, switches };
        let text = models.target.text(&serving);
        let (parsers, caller) = (app.parsers, caller.clone());
        BodyWork::rendering(text, move |text| finish(self.rendered(parsers, &caller, serving, models, text)?))
    }

    /// Renders the conversation for the first of `models`, whose tokenizer and template are `text`.
    fn rendered(
        self,
        parsers: OutputParsers,
        caller: &Caller,
        serving: Arc<ServingState>,
        models: RequestedModels,
        text: &dyn Text,
    ) -> Result<GenerationRequest, ApiError> {
        let RequestedModels { target, switches } = models;
        let Self { params, logprobs, messages, tools, mut showing, effort, field, .. } = self;
        tools::check_history(&messages, text).map_err(|error| error.of(field))?;
        let mut calling = tools.map(|tools| RequestTools::new(tools, parsers.calls, text)).transpose()?;
        showing.tools = calling.as_ref().map_or_else(Vec::new, RequestTools::shown);
        let template = text.info().chat_template.as_deref();
        let format = ReasoningFormat::of(parsers.reasoning, template);
        if let Some(effort) = effort {
            effort.apply_to_template(template, format, &mut showing.variables)?;
        }
        let tokens = text.encode_chat(&messages, &showing)?;
        let reasoning = format.and_then(|format| Reasoning::of(format, &tokens, text));
        let start = match showing.prompt {
            GenerationPrompt::Continue => TextStart::Continuation,
            GenerationPrompt::Add | GenerationPrompt::Omit => TextStart::Beginning,
        };
        let namespace = namespace(caller, &target, &serving);
        let (answer, thought) = (
            params.structure.as_ref(),
            reasoning.map(|reasoning| reasoning.thought(text, calling.is_some())),
        );
        let grammar = match &mut calling {
            Some(calling) => calling.grammar(text, answer, thought)?,
            None => answer.map(|structure| structure.source(thought)).transpose()?,
        };
        if calling.is_some() {
            check_beside_calls(&params, grammar.is_some())?;
        }
        Ok(GenerationRequest {
            kind: GenerationKind::Chat(start),
            prompt_field: field,
            serving,
            target,
            tenant: Arc::clone(&caller.tenant),
            priority: caller.priority,
            namespace,
            prompts: vec![PromptInput { tokens, text: None }],
            params,
            switches,
            logprobs,
            echo: Echo::Nothing,
            grammar,
            answering: calling.map(|calling| calling.answering),
            reasoning,
        })
    }
}

/// Returns template options with which the answer continues a last message of the assistant.
pub(crate) fn continuing(messages: &[ChatMessage]) -> TemplateOptions {
    let is_begun = messages
        .last()
        .is_some_and(|last| last.role == "assistant" && last.calls.is_empty() && !last.content.is_empty());
    let prompt = if is_begun { GenerationPrompt::Continue } else { GenerationPrompt::Add };
    TemplateOptions { prompt, ..TemplateOptions::default() }
}

/// Refuses options that conflict with tools.
fn check_beside_calls(params: &Params, is_formed: bool) -> Result<(), ApiError> {
    if params.delivery.provisional() == ProvisionalMode::Wanted {
        let message =
            "'provisional' works only for text, and answers with tools may be calls; remove one of them";
        return Err(ApiError::invalid("stream_options.provisional", message));
    }
    if is_formed && params.end_tokens == EndTokens::Ignore {
        let message =
            "'ignore_eos' excludes required or strict calls, because a call must end; send one of them";
        return Err(ApiError::invalid("ignore_eos", message));
    }
    Ok(())
}

//! Collects an answer into one JSON body.

use axum::{
    body::Body as HttpBody,
    http::{HeaderValue, Response, header},
};
use serde::Serialize;
use shmproto::message::TokenOutput;

use super::{
    choice::ScoredToken,
    echo::EchoedPrompt,
    generation_request::GenerationKind,
    generation_response::{ChoiceUpdate, GenerationResponse},
    logprobs,
    tools::scan_result::CallKind,
    types::{AssistantMessage, ChatChoice, GenerationBody, PromptReport, TextChoice, TextLogprobs, ToolCall},
};
use crate::{errors::ApiError, usage::FinishReason};

#[derive(Default)]
struct CompleteChoice {
    echoed: Option<EchoedPrompt>,
    /// Scores of the prompt's tokens.
    prompt: Vec<TokenOutput>,
    thought: String,
    text: String,
    scored: Vec<ScoredToken>,
    finish: Option<FinishReason>,
    calls: Vec<CompleteCall>,
}

struct CompleteCall {
    kind: CallKind,
    id: String,
    name: String,
    /// Arguments of a function, or input of a custom tool.
    arguments: String,
}

impl CompleteCall {
    fn to_tool_call(&self) -> ToolCall<'_> {
        ToolCall::of(self.kind, Some((&self.id, &self.name)), &self.arguments)
    }
}

/// Collects the rest of `answer`, whose first update is `first`, and writes the body.
pub(crate) async fn respond(
    mut answer: GenerationResponse,
    first: ChoiceUpdate,
) -> Result<Response<HttpBody>, ApiError> {
    let mut wholes: Vec<CompleteChoice> =
        (0..answer.job.choices()).map(|_| CompleteChoice::default()).collect();
    answer.each(first, |_, step| add(&mut wholes, step)).await?;
    match answer.job.kind {
        GenerationKind::Chat(_) => chat(&answer, &wholes),
        GenerationKind::Text | GenerationKind::Tokens | GenerationKind::Pooled(_) => {
            text(&answer, &mut wholes)
        }
    }
}

fn add(wholes: &mut [CompleteChoice], step: ChoiceUpdate) {
    let whole = &mut wholes[step.index];
    if let Some(echoed) = step.echoed {
        whole.text.push_str(&echoed.text);
        whole.echoed = Some(echoed);
    }
    whole.prompt.extend(step.prompt);
    whole.thought.push_str(&step.piece.thought);
    whole.text.push_str(&step.piece.text);
    whole.scored.extend(step.piece.scored);
    whole.finish = whole.finish.or(step.piece.finish);
    for part in step.piece.calls {
        if let Some((id, name)) = part.begun {
            whole.calls.push(CompleteCall { kind: part.kind, id, name, arguments: String::new() });
        }
        if let Some(call) = whole.calls.get_mut(part.index) {
            call.arguments.push_str(&part.arguments);
        }
    }
}

fn chat(answer: &GenerationResponse, wholes: &[CompleteChoice]) -> Result<Response<HttpBody>, ApiError> {
    let wanted = answer.job.logprobs.is_some();
    let choices = wholes.iter().enumerate().map(|(index, whole)| ChatChoice {
        index,
        message: message(whole),
        logprobs: wanted
            .then(|| logprobs::chat(answer.job.text(), answer.job.params.token_names, &whole.scored)),
        finish_reason: whole.finish.unwrap_or(FinishReason::Length),
        adapter_stages: answer.stages(index),
        token_ids: token_ids(answer, &whole.scored),
    });
    let prompt = wholes.first().map_or_else(PromptReport::default, |whole| prompt(answer, 0, whole));
    send(answer, "chat.completion", (&choices.collect::<Vec<_>>(), prompt))
}

/// Returns the requested token ids and log-probabilities of the prompt of choice `index`.
fn prompt<'a>(answer: &'a GenerationResponse, index: usize, whole: &CompleteChoice) -> PromptReport<'a> {
    let requested = answer.job.params.prompt_logprobs;
    let prompt_logprobs = requested.map(|_| logprobs::of_prompt(answer.job.text(), &whole.prompt));
    PromptReport { prompt_logprobs, ..prompt_ids(answer, index) }
}

/// Returns the token ids of the prompt of choice `index`, if the request asks for token ids.
pub(super) fn prompt_ids(answer: &GenerationResponse, index: usize) -> PromptReport<'_> {
    let requested = answer.job.params.returns_token_ids;
    let prompt_token_ids = requested.then(|| &answer.job.prompt_of(index).tokens[..]);
    PromptReport { prompt_token_ids, prompt_logprobs: None }
}

/// Returns the token ids of `scored`, if the request asks for token ids.
pub(super) fn token_ids(answer: &GenerationResponse, scored: &[ScoredToken]) -> Option<Vec<u32>> {
    let requested = answer.job.params.returns_token_ids;
    requested.then(|| scored.iter().map(|scored| scored.token.token).collect())
}

fn message(whole: &CompleteChoice) -> AssistantMessage<'_> {
    let content = Some(whole.text.as_str()).filter(|text| !text.is_empty() || whole.calls.is_empty());
    AssistantMessage {
        role: "assistant",
        content,
        refusal: None,
        reasoning_content: Some(whole.thought.as_str()).filter(|thought| !thought.is_empty()),
        tool_calls: whole.calls.iter().map(CompleteCall::to_tool_call).collect(),
    }
}

fn text(answer: &GenerationResponse, wholes: &mut [CompleteChoice]) -> Result<Response<HttpBody>, ApiError> {
    let wanted = answer.job.logprobs.is_some();
    let logprobs: Vec<_> =
        wholes.iter_mut().map(|whole| wanted.then(|| text_logprobs(answer, whole))).collect();
    let choices = wholes.iter().zip(logprobs).enumerate().map(|(index, (whole, logprobs))| TextChoice {
        index,
        text: &whole.text,
        logprobs,
        finish_reason: whole.finish,
        adapter_stages: answer.stages(index),
        token_ids: token_ids(answer, &whole.scored),
        prompt: prompt(answer, index, whole),
    });
    send(answer, "text_completion", (&choices.collect::<Vec<_>>(), PromptReport::default()))
}

/// Joins the log-probabilities of the echoed prompt and of the completion.
fn text_logprobs(answer: &GenerationResponse, whole: &mut CompleteChoice) -> TextLogprobs {
    let mut logprobs = TextLogprobs::default();
    let mut shift = 0;
    if let Some(echoed) = &mut whole.echoed {
        logprobs = echoed.logprobs.take().unwrap_or_default();
        shift = echoed.chars;
    }
    let names = answer.job.params.token_names;
    logprobs::append(answer.job.text(), names, &whole.scored, shift, &mut logprobs);
    logprobs
}

fn send<C: Serialize>(
    answer: &GenerationResponse,
    object: &'static str,
    (choices, prompt): (&[C], PromptReport<'_>),
) -> Result<Response<HttpBody>, ApiError> {
    let (envelope, usage) = (answer.envelope(object), Some(Some(answer.usage())));
    let body = GenerationBody { envelope, choices, prompt, usage, end: answer.end_report() };
    let bytes = serde_json::to_vec(&body)
        .map_err(|error| ApiError::internal(format!("the answer could not be written as JSON: {error}")))?;
    let mut response = Response::new(HttpBody::from(bytes));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

//! An answer as one body.

use axum::{
    body::Body as HttpBody,
    http::{HeaderValue, Response, header},
};
use serde::Serialize;

use super::{
    answer::{Answer, Step},
    choice::Scored,
    echo::Echoed,
    job::Kind,
    logprobs,
    types::{Body, ChatChoice, Message, TextChoice, TextLogprobs},
};
use crate::{errors::ApiError, usage::FinishReason};

/// All of a choice.
#[derive(Default)]
struct Whole {
    echoed: Option<Echoed>,
    text: String,
    scored: Vec<Scored>,
    finish: Option<FinishReason>,
}

/// Waits for the rest of `answer`, whose first step has come already.
pub async fn respond(mut answer: Answer, first: Step) -> Result<Response<HttpBody>, ApiError> {
    let mut wholes: Vec<Whole> = (0..answer.job.choices()).map(|_| Whole::default()).collect();
    add(&mut wholes, first);
    while !answer.is_over() {
        match answer.next().await {
            Some(step) => add(&mut wholes, step?),
            None => return Err(ApiError::internal("the answer ended before its choices did")),
        }
    }
    match answer.job.kind {
        Kind::Chat => chat(&answer, &wholes),
        Kind::Text | Kind::Tokens => text(&answer, &mut wholes),
    }
}

fn add(wholes: &mut [Whole], step: Step) {
    let whole = &mut wholes[step.index];
    if let Some(echoed) = step.echoed {
        whole.text.push_str(&echoed.text);
        whole.echoed = Some(echoed);
    }
    whole.text.push_str(&step.piece.text);
    whole.scored.extend(step.piece.scored);
    whole.finish = whole.finish.or(step.piece.finish);
}

fn chat(answer: &Answer, wholes: &[Whole]) -> Result<Response<HttpBody>, ApiError> {
    let wanted = answer.job.logprobs.is_some();
    let choices = wholes.iter().enumerate().map(|(index, whole)| ChatChoice {
        index,
        message: Message { role: "assistant", content: &whole.text, refusal: None },
        logprobs: wanted
            .then(|| logprobs::chat(answer.job.text(), answer.job.params.token_names, &whole.scored)),
        finish_reason: whole.finish.unwrap_or(FinishReason::Length),
    });
    send(answer, "chat.completion", &choices.collect::<Vec<_>>())
}

fn text(answer: &Answer, wholes: &mut [Whole]) -> Result<Response<HttpBody>, ApiError> {
    let wanted = answer.job.logprobs.is_some();
    let logprobs: Vec<_> =
        wholes.iter_mut().map(|whole| wanted.then(|| text_logprobs(answer, whole))).collect();
    let choices = wholes.iter().zip(logprobs).enumerate().map(|(index, (whole, logprobs))| TextChoice {
        index,
        text: &whole.text,
        logprobs,
        finish_reason: whole.finish,
    });
    send(answer, "text_completion", &choices.collect::<Vec<_>>())
}

/// The scores of prompt and completion in one.
fn text_logprobs(answer: &Answer, whole: &mut Whole) -> TextLogprobs {
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
    answer: &Answer,
    object: &'static str,
    choices: &[C],
) -> Result<Response<HttpBody>, ApiError> {
    let body = Body { envelope: answer.envelope(object), choices, usage: Some(Some(answer.usage())) };
    let bytes = serde_json::to_vec(&body)
        .map_err(|error| ApiError::internal(format!("the answer could not be written as JSON: {error}")))?;
    let mut response = Response::new(HttpBody::from(bytes));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

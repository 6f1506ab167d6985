//! Anthropic's Messages API: `/v1/messages`, `/v1/messages/count_tokens` and a form of `/v1/models`.
//!
//! # Layout
//!
//! - [`request`]: the body of a request; `conversation`: system prompt and messages; `tool_params`: tools and
//!   `tool_choice`; `thinking`: the requested reasoning, and signatures of reasoning content.
//! - `content`: the content blocks of an answer and their events; `writing`: an answer as one body or as
//!   events.
//! - [`models`]: lists of models. [`errors`]: the body of errors.

mod content;
mod conversation;
pub(crate) mod errors;
pub(crate) mod models;
pub mod request;
mod thinking;
mod tool_params;
mod writing;

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use self::{
    request::{AnswerOptions, MessagesBody},
    writing::MessageWriter,
};
use crate::{
    app::App,
    body_workers::BodyWork,
    errors::ApiError,
    openai::{
        generation_request::GenerationRequest, generation_response::GenerationResponse, params::ParamLimits,
        request_context::RequestContext, sse, stream_options::ResponseMode,
    },
};

/// `POST /v1/messages`: continues a conversation.
pub(crate) async fn create(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Response, ApiError> {
    let (shared, origin) = (Arc::clone(&app), ask.body.origin());
    let (job, options) = app.bodies.run_blocking(origin, move || job(&shared, ask)).await?;
    let delivery = job.params.delivery;
    let (mut answer, first) = GenerationResponse::begin(&app, job).await?;
    let mut writer = MessageWriter::new(options);
    if let ResponseMode::Stream(_) = delivery {
        return Ok(sse::respond(answer, first, writer));
    }
    answer.each(first, |answer, step| writer.record_step(answer, step, &mut |_, _| {})).await?;
    Ok(Json(writer.end(&answer, &mut |_, _| {})).into_response())
}

fn job(app: &App, ask: RequestContext) -> Result<BodyWork<(GenerationRequest, AnswerOptions)>, ApiError> {
    let limits = ParamLimits::of(&ask.serving, ask.default_seed);
    let MessagesBody { conversation, options } = MessagesBody::read(&ask.body, &limits)?;
    Ok(conversation.job(app, &ask.caller, ask.serving)?.map(|job| (job, options)))
}

/// `POST /v1/messages/count_tokens`: counts the input tokens of a request.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    ask: RequestContext,
) -> Result<Json<Value>, ApiError> {
    let (shared, origin) = (Arc::clone(&app), ask.body.origin());
    let count = move || {
        let limits = ParamLimits::of(&ask.serving, ask.default_seed);
        let conversation = MessagesBody::read_to_count(&ask.body, &limits)?.conversation;
        conversation.count_tokens(&shared, &ask.caller, ask.serving)
    };
    let tokens = app.bodies.run_blocking(origin, count).await?;
    Ok(Json(json!({ "input_tokens": tokens })))
}

//! Ollama's HTTP API, for clients that speak no other: `/api/chat`, `/api/generate` and what they ask before.
//!
//! # Layout
//!
//! - [`request`]: what may be asked; `messages`: a conversation as Ollama writes it.
//! - `ndjson`: an answer, line by line or as one. [`embeddings`]: texts as vectors.
//! - [`listing`]: which models there are. [`unsupported`]: what is done in other ways here.
//! - [`errors`]: how a failure looks.

pub mod embeddings;
pub mod errors;
pub mod listing;
mod messages;
mod ndjson;
pub mod request;
pub mod unsupported;

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};

use self::{
    ndjson::{NdjsonBody, OllamaRoute},
    request::{ChatBody, GenerateBody, OllamaRequestKind},
};
use crate::{
    app::App,
    errors::ApiError,
    openai::{
        generation_request::GenerationRequest, generation_response::GenerationResponse, params::ParamLimits,
        request_context::RequestContext, sse, stream_options::ResponseMode,
    },
};

/// `POST /api/chat`.
pub async fn chat(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Response, ApiError> {
    answer(&app, ask, OllamaRoute::Chat, ChatBody::read).await
}

/// `POST /api/generate`.
pub async fn generate(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Response, ApiError> {
    answer(&app, ask, OllamaRoute::Generate, GenerateBody::read).await
}

/// What is to be done for a request.
enum OllamaAction {
    Generate(Box<GenerationRequest>),
    /// Nothing but to have the model there, as it always is.
    Load(String),
}

async fn answer(
    app: &Arc<App>,
    ask: RequestContext,
    route: OllamaRoute,
    read: fn(&[u8], &ParamLimits<'_>) -> Result<OllamaRequestKind, ApiError>,
) -> Result<Response, ApiError> {
    let shared = Arc::clone(app);
    let order = app.bodies.run(ask.body.origin(), move || order(&shared, ask, read)).await?;
    let job = match order {
        OllamaAction::Generate(job) => *job,
        OllamaAction::Load(model) => return Ok(Json(ndjson::loaded(&model, route)).into_response()),
    };
    let delivery = job.params.delivery;
    let (mut answer, first) = GenerationResponse::begin(app, job).await?;
    let mut lines = NdjsonBody::new(route);
    if let ResponseMode::Stream(_) = delivery {
        return Ok(sse::respond(answer, first, lines));
    }
    answer.each(first, |answer, step| lines.record_step(answer, step)).await?;
    Ok(Json(lines.last(&answer)).into_response())
}

fn order(
    app: &App,
    ask: RequestContext,
    read: fn(&[u8], &ParamLimits<'_>) -> Result<OllamaRequestKind, ApiError>,
) -> Result<OllamaAction, ApiError> {
    let RequestContext { caller, serving, default_seed, body } = ask;
    Ok(match read(&body, &ParamLimits::of(&serving, default_seed))? {
        OllamaRequestKind::Chat(conversation) => {
            OllamaAction::Generate(Box::new(conversation.job(app, &caller, serving)?))
        }
        OllamaRequestKind::Raw(body) => OllamaAction::Generate(Box::new(body.job(app, &caller, serving)?)),
        OllamaRequestKind::Load(wanted) => OllamaAction::Load(wanted.find(app, &serving, &caller)?.name),
    })
}

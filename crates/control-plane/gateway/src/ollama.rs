//! Ollama's HTTP API: `/api/chat`, `/api/generate` and the routes that clients call before them.
//!
//! # Layout
//!
//! - [`request`]: bodies of requests; `messages`: conversations in Ollama's format.
//! - `ndjson`: an answer as lines of JSON or as one body. [`embeddings`]: vectors of texts.
//! - [`listing`]: lists of models. [`unsupported`]: routes that this server does not have.
//! - [`errors`]: the body of errors.

pub mod embeddings;
pub(crate) mod errors;
pub(crate) mod listing;
mod messages;
mod ndjson;
pub mod request;
pub(crate) mod unsupported;

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
    body_workers::BodyWork,
    errors::ApiError,
    openai::{
        generation_request::GenerationRequest, generation_response::GenerationResponse, params::ParamLimits,
        request_context::RequestContext, sse, stream_options::ResponseMode,
    },
};

/// `POST /api/chat`: continues a conversation.
pub async fn chat(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Response, ApiError> {
    answer(&app, ask, OllamaRoute::Chat, ChatBody::read).await
}

/// `POST /api/generate`: continues a prompt.
pub(crate) async fn generate(State(app): State<Arc<App>>, ask: RequestContext) -> Result<Response, ApiError> {
    answer(&app, ask, OllamaRoute::Generate, GenerateBody::read).await
}

enum OllamaAction {
    Generate(Box<GenerationRequest>),
    /// The request only loads the model, which is always loaded; the string is the model's name.
    Load(String),
}

async fn answer(
    app: &Arc<App>,
    ask: RequestContext,
    route: OllamaRoute,
    read: fn(&[u8], &ParamLimits<'_>) -> Result<OllamaRequestKind, ApiError>,
) -> Result<Response, ApiError> {
    let shared = Arc::clone(app);
    let order = app.bodies.run_blocking(ask.body.origin(), move || order(&shared, ask, read)).await?;
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
) -> Result<BodyWork<OllamaAction>, ApiError> {
    let RequestContext { caller, serving, default_seed, body } = ask;
    Ok(match read(&body, &ParamLimits::of(&serving, default_seed))? {
        OllamaRequestKind::Chat(conversation) => {
            conversation.job(app, &caller, serving)?.map(|job| OllamaAction::Generate(Box::new(job)))
        }
        OllamaRequestKind::Raw(body) => {
            BodyWork::Done(OllamaAction::Generate(Box::new(body.job(app, &caller, serving)?)))
        }
        OllamaRequestKind::Load(wanted) => {
            BodyWork::Done(OllamaAction::Load(wanted.find(app, &serving, &caller)?.name))
        }
    })
}

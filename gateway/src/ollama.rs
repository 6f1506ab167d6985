//! Ollama's HTTP API, for clients that speak no other: `/api/chat`, `/api/generate` and what they ask before.
//!
//! # Layout
//!
//! - [`request`]: what may be asked; `messages`: a conversation as Ollama writes it.
//! - `lines`: an answer, line by line or as one. [`embeddings`]: texts as vectors.
//! - [`listing`]: which models there are. [`refused`]: what is done in other ways here.
//! - [`errors`]: how a failure looks.

pub mod embeddings;
pub mod errors;
mod lines;
pub mod listing;
mod messages;
pub mod refused;
pub mod request;

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};

use self::{
    lines::{Lines, Route},
    request::{ChatBody, GenerateBody, What},
};
use crate::{
    app::App,
    errors::ApiError,
    openai::{answer::Answer, ask::Ask, delivery::Delivery, frames, job::Job, params::Limits},
};

/// `POST /api/chat`.
pub async fn chat(State(app): State<Arc<App>>, ask: Ask) -> Result<Response, ApiError> {
    answer(&app, ask, Route::Chat, ChatBody::read).await
}

/// `POST /api/generate`.
pub async fn generate(State(app): State<Arc<App>>, ask: Ask) -> Result<Response, ApiError> {
    answer(&app, ask, Route::Generate, GenerateBody::read).await
}

/// What is to be done for a request.
enum Order {
    Generate(Box<Job>),
    /// Nothing but to have the model there, as it always is.
    Load(String),
}

async fn answer(
    app: &Arc<App>,
    ask: Ask,
    route: Route,
    read: fn(&[u8], &Limits<'_>) -> Result<What, ApiError>,
) -> Result<Response, ApiError> {
    let shared = Arc::clone(app);
    let order = app.work(ask.body.len(), move || order(&shared, ask, read)).await?;
    let job = match order {
        Order::Generate(job) => *job,
        Order::Load(model) => return Ok(Json(lines::loaded(&model, route)).into_response()),
    };
    let delivery = job.params.delivery;
    let (mut answer, first) = Answer::begin(app, job).await?;
    let mut lines = Lines::new(route);
    if let Delivery::Stream(_) = delivery {
        return Ok(frames::respond(answer, first, lines));
    }
    answer.each(first, |answer, step| lines.take(answer, step)).await?;
    Ok(Json(lines.last(&answer)).into_response())
}

fn order(
    app: &App,
    ask: Ask,
    read: fn(&[u8], &Limits<'_>) -> Result<What, ApiError>,
) -> Result<Order, ApiError> {
    let Ask { caller, serving, default_seed, body } = ask;
    Ok(match read(&body, &Limits::of(&serving, default_seed))? {
        What::Chat(conversation) => Order::Generate(Box::new(conversation.job(app, &caller, serving)?)),
        What::Raw(body) => Order::Generate(Box::new(body.job(app, &caller, serving)?)),
        What::Load(wanted) => Order::Load(wanted.find(app, &serving, &caller)?.name),
    })
}

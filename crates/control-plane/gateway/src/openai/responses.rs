//! The Responses API, `/v1/responses`: a request continues a conversation by the id of its last response.
//!
//! # Layout
//!
//! - [`request`]: the body of a request; [`items`]: the items of a conversation.
//! - `output`: the items of an answer and their events; `object`: the response object.
//! - `writing`: writes an answer as one body or as events, and stores it ([`crate::response_store`]).

pub mod items;
mod object;
mod output;
pub mod request;
mod writing;

use std::sync::Arc;

use axum::{
    Extension, Json,
    body::Body as HttpBody,
    extract::{Path, Query, State},
    http::{HeaderValue, Response, header},
};
use serde::Deserialize;
use serde_json::{Value, json};

use self::{
    request::{ResponseEcho, ResponsesBody},
    writing::ResponseWriter,
};
use super::{
    generation_request::GenerationRequest,
    generation_response::{ChoiceUpdate, GenerationResponse},
    paging::list,
    params::ParamLimits,
    request_context::RequestContext,
    sse,
    stream_options::ResponseMode,
};
use crate::{
    app::App, body_workers::BodyWork, caller::Caller, errors::ApiError, response_store::StoredResponse,
};

const MAX_ITEMS: usize = 100;

/// `POST /v1/responses`: generates a response as one body or as events.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    ask: RequestContext,
) -> Result<Response<HttpBody>, ApiError> {
    let shared = Arc::clone(&app);
    let (job, asked, input) = app.bodies.run_blocking(ask.body.origin(), move || job(&shared, ask)).await?;
    let delivery = job.params.delivery;
    let (answer, first) = GenerationResponse::begin(&app, job).await?;
    let writing = ResponseWriter::new(asked, input, Arc::clone(&app.kept));
    match delivery {
        ResponseMode::Stream(_) => Ok(sse::respond(answer, first, writing)),
        ResponseMode::Whole => whole(answer, first, writing).await,
    }
}

/// Reads a request; returns the generation request, the fields to repeat, and all input items.
fn job(
    app: &App,
    ask: RequestContext,
) -> Result<BodyWork<(GenerationRequest, ResponseEcho, Vec<Value>)>, ApiError> {
    let (conversation, asked, input) = read(app, &ask)?.conversation()?;
    Ok(conversation.job(app, &ask.caller, ask.serving)?.map(|job| (job, asked, input)))
}

/// Reads a request with the items of the response that it continues.
fn read(app: &App, ask: &RequestContext) -> Result<ResponsesBody, ApiError> {
    let mut body = ResponsesBody::read(&ask.body, &ParamLimits::of(&ask.serving, ask.default_seed))?;
    if let Some(id) = &body.asked.previous_response_id {
        let entry = find(app, &ask.caller, id).map_err(|error| error.of("previous_response_id"))?;
        body.go_on_from(&entry)?;
    }
    Ok(body)
}

async fn whole(
    mut answer: GenerationResponse,
    first: ChoiceUpdate,
    mut writing: ResponseWriter,
) -> Result<Response<HttpBody>, ApiError> {
    answer.each(first, |answer, step| writing.record_step(answer, step, &mut |_, _| {})).await?;
    Ok(json_text(writing.end(&answer, &mut |_, _| {})))
}

fn json_text(text: String) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn find(app: &App, caller: &Caller, id: &str) -> Result<Arc<StoredResponse>, ApiError> {
    app.kept.get(&caller.tenant, id).ok_or_else(|| gone(id))
}

fn gone(id: &str) -> ApiError {
    let id: String = id.chars().take(64).collect();
    ApiError::not_found(format!(
        "there is no response '{id}': it was not stored, was deleted, or was dropped as the oldest; send \
         the whole conversation in 'input'"
    ))
}

/// `POST /v1/responses/input_tokens`: counts the input tokens of a request.
pub(crate) async fn input_tokens(
    State(app): State<Arc<App>>,
    ask: RequestContext,
) -> Result<Json<Value>, ApiError> {
    let shared = Arc::clone(&app);
    let origin = ask.body.origin();
    let count = move || {
        let (conversation, ..) = read(&shared, &ask)?.conversation()?;
        conversation.count_tokens(&shared, &ask.caller, ask.serving)
    };
    let tokens = app.bodies.run_blocking(origin, count).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": tokens })))
}

/// `POST /v1/responses/compact`: not implemented.
pub(crate) async fn compact() -> ApiError {
    let message = "this server does not shorten conversations; remove old items from 'input', or send a \
                   summary of them";
    ApiError::not_implemented("not_supported", message)
}

/// `GET /v1/responses/{id}`: returns a stored response.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Response<HttpBody>, ApiError> {
    Ok(json_text(find(&app, &caller, &id)?.response.to_string()))
}

/// `DELETE /v1/responses/{id}`: deletes a stored response.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if !app.kept.delete(&caller.tenant, &id) {
        return Err(gone(&id));
    }
    Ok(Json(json!({ "id": id, "object": "response", "deleted": true })))
}

#[derive(Debug, Deserialize)]
pub(crate) struct ItemsQuery {
    after: Option<String>,
    limit: Option<String>,
    order: Option<String>,
}

/// `GET /v1/responses/{id}/input_items`: all input items of a response, newest first by default.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(query): Query<ItemsQuery>,
) -> Result<Json<Value>, ApiError> {
    let entry = find(&app, &caller, &id)?;
    let mut items = items::parse(&entry.input)?;
    match query.order.as_deref() {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(_) => return Err(ApiError::invalid("order", "'order' must be 'asc' or 'desc'")),
    }
    if let Some(after) = &query.after {
        let at = items.iter().position(|item| item["id"] == after.as_str());
        let at =
            at.ok_or_else(|| ApiError::invalid("after", "'after' must be the id of one of these items"))?;
        items.drain(..=at);
    }
    let limit = match query.limit.as_deref().map(str::parse::<usize>) {
        None => 20,
        Some(Ok(limit)) if (1..=MAX_ITEMS).contains(&limit) => limit,
        Some(_) => return Err(ApiError::invalid("limit", "'limit' must be a number from 1 to 100")),
    };
    let has_more = items.len() > limit;
    items.truncate(limit);
    Ok(Json(list(&items, has_more)))
}

//! Lists of models in Anthropic's format.

use std::time::Duration;

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

use crate::{
    app::App,
    bases::Bases,
    caller::Caller,
    clock::rfc3339,
    errors::ApiError,
    openai::models::{self, ModelCard},
};

const DEFAULT_MODELS: usize = 20;
const MAX_MODELS: usize = 1000;

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ModelPageQuery {
    after_id: Option<String>,
    before_id: Option<String>,
    limit: Option<String>,
}

/// `GET /v1/models`: a page of the base model and the usable adapters.
pub(crate) async fn list(
    State(bases): State<Arc<Bases>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<ModelPageQuery>,
) -> Result<Json<Value>, ApiError> {
    let cards = models::cards(&bases, &caller)?;
    let limit = query.limit()?;
    let at = |id: &Option<String>, field: &str| query_position(&cards, id.as_deref(), field);
    let (after, before) = (at(&query.after_id, "after_id")?, at(&query.before_id, "before_id")?);
    let end = before.unwrap_or(cards.len());
    let begin = after.map_or(0, |at| at + 1).min(end);
    let page = match before {
        Some(_) => &cards[begin.max(end.saturating_sub(limit))..end],
        None => &cards[begin..end.min(begin.saturating_add(limit))],
    };
    let data: Vec<Value> = page.iter().map(model).collect();
    let id = |card: Option<&ModelCard>| card.map(|card| card.id.clone());
    Ok(Json(json!({
        "data": data,
        "has_more": end - begin > page.len(),
        "first_id": id(page.first()),
        "last_id": id(page.last()),
    })))
}

/// `GET /v1/models/{id}`: describes the base model or one adapter.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    models::card(&app, &caller, &id).map(|card| Json(model(&card)))
}

impl ModelPageQuery {
    fn limit(&self) -> Result<usize, ApiError> {
        match self.limit.as_deref().map(str::parse) {
            None => Ok(DEFAULT_MODELS),
            Some(Ok(limit)) if (1..=MAX_MODELS).contains(&limit) => Ok(limit),
            Some(_) => {
                Err(ApiError::invalid("limit", format!("'limit' must be a number from 1 to {MAX_MODELS}")))
            }
        }
    }
}

/// Returns the position of the model `id`, which `field` of the query names.
fn query_position(cards: &[ModelCard], id: Option<&str>, field: &str) -> Result<Option<usize>, ApiError> {
    let Some(id) = id else { return Ok(None) };
    let at = cards.iter().position(|card| card.id == id);
    let unknown = || ApiError::invalid(field, format!("'{field}' must be the id of a listed model"));
    at.ok_or_else(unknown).map(Some)
}

fn model(card: &ModelCard) -> Value {
    json!({
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": rfc3339(Duration::from_secs(card.created)),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    })
}

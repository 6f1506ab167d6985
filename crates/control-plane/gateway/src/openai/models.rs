//! `/v1/models`: the base model and every adapter that the caller may use, but for what Tinker's runs keep.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use serde::Serialize;
use serde_json::{Value, json};

use super::adapters::check_is_adapter;
use crate::{
    adapters::AdapterEntry,
    app::App,
    caller::{Caller, KeyRole},
    errors::ApiError,
    lifecycle::ServingState,
    training_sessions::checkpoint_path,
};

/// A model a request may name.
#[derive(Debug, Serialize)]
pub struct ModelCard {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// What the weights are called where they lie.
    root: String,
    /// The base of an adapter.
    parent: Option<String>,
    max_model_len: usize,
    adapter_generation: Option<String>,
}

/// See the module's description.
#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<ModelCard>,
}

/// `GET /v1/models`.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ModelList>, ApiError> {
    let serving = app.serving()?;
    let entries = app.registry.entries();
    let usable = entries.values().filter(|entry| entry.is_for(&caller) && is_listed(entry));
    let adapters = usable.map(|entry| adapter(entry, &serving));
    Ok(Json(ModelList { object: "list", data: std::iter::once(base(&serving)).chain(adapters).collect() }))
}

/// `GET /v1/models/{id}`.
pub async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<ModelCard>, ApiError> {
    let serving = app.serving()?;
    if id == serving.base_name {
        return Ok(Json(base(&serving)));
    }
    let entries = app.registry.entries();
    let entry = entries.find(&id, &caller).filter(|entry| answers(entry));
    entry.map(|entry| Json(adapter(entry, &serving))).ok_or_else(|| ApiError::model_not_found(&id))
}

/// `DELETE /v1/models/{id}`: takes an adapter of the caller's away.
pub async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    check_is_adapter(&id, &serving.base_name)?;
    let entries = app.registry.entries();
    let entry = entries.find(&id, &caller).ok_or_else(|| ApiError::model_not_found(&id))?;
    if entry.record.tenant.as_deref() != Some(&*caller.tenant) && caller.role != KeyRole::Admin {
        return Err(ApiError::forbidden(format!("'{id}' is everybody's: an administrator may take it away")));
    }
    app.registry.unload(&id, Some(&entry.record.generation.to_string())).await?;
    Ok(Json(json!({ "id": id, "object": "model", "deleted": true })))
}

/// Whether lists of models have it: requests can be answered by it, and people named it. What Tinker's runs keep is listed by
/// its own routes; requests may name it too.
pub(crate) fn is_listed(entry: &AdapterEntry) -> bool {
    answers(entry) && !checkpoint_path::is_of_run(&entry.record.name)
}

/// Whether requests can be answered by it: it is there, and no draft.
pub(crate) fn answers(entry: &AdapterEntry) -> bool {
    entry.fault().is_none() && entry.record.draft_layers == 0
}

fn base(serving: &ServingState) -> ModelCard {
    ModelCard {
        id: serving.base_name.clone(),
        object: "model",
        created: serving.since,
        owned_by: "holobiont",
        root: file_name(std::path::Path::new(&serving.welcome.model_path)),
        parent: None,
        max_model_len: serving.context_tokens,
        adapter_generation: None,
    }
}

fn adapter(entry: &AdapterEntry, serving: &ServingState) -> ModelCard {
    ModelCard {
        id: entry.record.name.clone(),
        object: "model",
        created: entry.record.loaded_at,
        owned_by: "holobiont",
        root: file_name(&entry.record.source),
        parent: Some(serving.base_name.clone()),
        max_model_len: serving.context_tokens,
        adapter_generation: Some(entry.record.generation.to_string()),
    }
}

/// The last part only: where things lie on this machine is nobody's business.
fn file_name(path: &std::path::Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

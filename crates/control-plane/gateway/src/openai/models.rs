//! `/v1/models`: the base model and the adapters that the caller may use, without checkpoints of Tinker runs.

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
    bases::Bases,
    caller::{Caller, KeyRole},
    errors::ApiError,
    lifecycle::{ServingState, ServingUnavailable},
    served_base::ServedBase,
    training_sessions::checkpoint_path,
};

#[derive(Debug, Serialize)]
pub(crate) struct ModelCard {
    pub id: String,
    object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    owned_by: &'static str,
    /// File name of the weights, or the pinned URI from which they were fetched.
    root: String,
    parent: Option<String>,
    pub max_model_len: usize,
    adapter_generation: Option<String>,
    /// Arithmetic and data types of the base; other ones may give other bits.
    numbers: String,
    /// `awake`, `asleep` or `waking`, if the base of the model can sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelCard>,
}

/// `GET /v1/models`: lists the base model and the usable adapters.
pub(crate) async fn list(
    State(bases): State<Arc<Bases>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ModelList>, ApiError> {
    Ok(Json(ModelList { object: "list", data: cards(&bases, &caller)? }))
}

/// Returns the base models that serve or sleep, each with its usable adapters.
///
/// # Errors
/// If no base serves or sleeps.
pub(crate) fn cards(bases: &Bases, caller: &Caller) -> Result<Vec<ModelCard>, ApiError> {
    bases.listed(|app| cards_of(app, caller))
}

fn cards_of(app: &App, caller: &Caller) -> Result<Vec<ModelCard>, ApiError> {
    let Some(serving) = listed_state(app)? else { return Ok(vec![asleep(app)]) };
    let entries = app.registry.entries();
    let usable = entries.values().filter(|entry| entry.is_for(caller) && is_listed(entry));
    let adapters = usable.map(|entry| adapter(entry, &serving));
    let cards = std::iter::once(base(&serving)).chain(adapters);
    Ok(cards.map(|card| card.of_base(&app.base)).collect())
}

impl ModelCard {
    /// Adds the state of the model's base, if the base can sleep.
    fn of_base(self, base: &ServedBase) -> Self {
        Self { state: base.can_sleep().then(|| base.phase().name()), ..self }
    }
}

/// Returns the serving state of a base, or its last one; `None` if the base has slept since the start.
fn listed_state(app: &App) -> Result<Option<Arc<ServingState>>, ServingUnavailable> {
    match app.last_serving() {
        Err(ServingUnavailable::Asleep) => Ok(None),
        serving => serving.map(Some),
    }
}

/// Describes a base that has slept since the start of the gateway; only its name is known.
fn asleep(app: &App) -> ModelCard {
    ModelCard {
        id: app.base.served_name().unwrap_or(app.base.name()).to_owned(),
        object: "model",
        created: 0,
        owned_by: "holobiont",
        root: String::new(),
        parent: None,
        max_model_len: 0,
        adapter_generation: None,
        numbers: String::new(),
        state: None,
    }
    .of_base(&app.base)
}

/// `GET /v1/models/{id}`: describes the base model or one adapter.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<ModelCard>, ApiError> {
    card(&app, &caller, &id).map(Json)
}

/// Returns the base model or one adapter.
pub(crate) fn card(app: &App, caller: &Caller, id: &str) -> Result<ModelCard, ApiError> {
    let Some(serving) = listed_state(app)? else { return Ok(asleep(app)) };
    if id == serving.base_name {
        return Ok(base(&serving).of_base(&app.base));
    }
    let entries = app.registry.entries();
    let entry = entries.find(id, caller).filter(|entry| answers(entry));
    let card = entry.map(|entry| adapter(entry, &serving).of_base(&app.base));
    card.ok_or_else(|| ApiError::model_not_found(id))
}

/// `DELETE /v1/models/{id}`: unloads an adapter of the caller.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    check_is_adapter(&id, &serving.base_name)?;
    let entries = app.registry.entries();
    let entry = entries.find(&id, &caller).ok_or_else(|| ApiError::model_not_found(&id))?;
    if entry.record.tenant.as_deref() != Some(&*caller.tenant) && caller.role != KeyRole::Admin {
        return Err(ApiError::forbidden(format!(
            "'{id}' belongs to no tenant; only an administrator may remove it"
        )));
    }
    app.registry.unload(&entry.record.name, Some(&entry.record.generation.to_string())).await?;
    Ok(Json(json!({ "id": id, "object": "model", "deleted": true })))
}

/// Returns the names of the listed adapters that `caller` may use.
pub(crate) fn usable_names(app: &App, caller: &Caller) -> Vec<String> {
    let entries = app.registry.entries();
    let usable = entries.values().filter(|entry| entry.is_for(caller) && is_listed(entry));
    usable.map(|entry| entry.record.name.clone()).collect()
}

/// True if model lists show the adapter. Checkpoints of Tinker runs have their own list, but requests may
/// name them.
pub(crate) fn is_listed(entry: &AdapterEntry) -> bool {
    answers(entry) && !checkpoint_path::is_of_run(&entry.record.name)
}

/// True if the adapter can answer requests: usable, and no draft adapter.
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
        numbers: serving.welcome.numbers.clone(),
        state: None,
    }
}

fn adapter(entry: &AdapterEntry, serving: &ServingState) -> ModelCard {
    ModelCard {
        id: entry.record.name.clone(),
        object: "model",
        created: entry.record.loaded_at,
        owned_by: "holobiont",
        root: entry.record.uri().map_or_else(|| file_name(&entry.record.source), str::to_owned),
        parent: Some(serving.base_name.clone()),
        max_model_len: serving.context_tokens,
        adapter_generation: Some(entry.record.generation.to_string()),
        numbers: serving.welcome.numbers.clone(),
        state: None,
    }
}

/// Returns the last component of the path, because callers should not learn paths on this machine.
fn file_name(path: &std::path::Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

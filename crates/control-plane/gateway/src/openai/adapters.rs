//! `POST /v1/load_lora_adapter`, `/v1/unload_lora_adapter`, `/v1/pin_lora_adapter`, `GET /v1/lora_adapters`.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    load_request::{LoadSource, read_load},
    strict_fields::StrictFields,
};
use crate::{
    adapters::{
        AdapterEntry, AdapterError, LeaseError, Pin, ResidencyError, UnusableAdapter, WeightedMergeError,
        database::DatabaseError, jail::JailError, store::StoreError,
    },
    app::App,
    bases::{Bases, name_in_requests},
    body::JsonBody,
    errors::ApiError,
    executors::ExecutorHandle,
    placement_stats::PlacementReport,
    training_sessions::checkpoint_path,
};

#[derive(Debug, Deserialize)]
pub(crate) struct AdapterListQuery {
    /// True lists the checkpoints of Tinker runs; false lists the other adapters.
    #[serde(default)]
    runs: bool,
}

/// Lists adapters with their state, placement and use.
pub(crate) async fn list(
    State(bases): State<Arc<Bases>>,
    Query(AdapterListQuery { runs }): Query<AdapterListQuery>,
) -> Json<Value> {
    let each = bases.all();
    let data: Vec<Value> = each.iter().flat_map(|app| listed(app, runs, bases.are_several())).collect();
    Json(json!({
        "object": "list",
        "data": data,
        "max_adapters": bases.first().registry.max_adapters(),
        "resident_bytes": each.iter().map(|app| app.registry.resident().1).sum::<u64>(),
        "budget_bytes": budget_bytes(each),
    }))
}

/// Returns the host memory for adapters; `None` if no executor is connected.
pub(crate) fn budget_bytes(apps: &[Arc<App>]) -> Option<u64> {
    apps.iter().filter_map(|app| app.registry.budget_bytes()).reduce(u64::saturating_add)
}

/// Describes the adapters of one base, with its name if there are several.
fn listed(app: &App, runs: bool, are_several: bool) -> Vec<Value> {
    let registry = &app.registry;
    let is_asked = |entry: &&Arc<AdapterEntry>| checkpoint_path::is_of_run(&entry.record.name) == runs;
    let named = registry.entries();
    let placed = placed(app);
    let data = named.values().filter(is_asked).map(|entry| describe(app, &placed, entry, NameState::Yes));
    let draining = registry.draining();
    let draining =
        draining.iter().filter(is_asked).map(|entry| describe(app, &placed, entry, NameState::NoMore));
    let mut data: Vec<Value> = data.chain(draining).collect();
    if are_several {
        data.iter_mut().for_each(|adapter| adapter["base"] = json!(name_in_requests(app)));
    }
    data
}

/// Loads or replaces an adapter; answers once the adapter is durable and ready.
pub async fn load(State(app): State<Arc<App>>, body: JsonBody) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let base = (&*serving).into();
    let entry = match read_load(&body, &serving.base_name)? {
        (request, LoadSource::Path) => app.registry.load(request, base).await?,
        (request, LoadSource::Uri(uri)) => app.registry.load_uri(uri, request, base).await?,
    };
    Ok(Json(loaded(&app, &entry)))
}

pub(super) fn loaded(app: &App, entry: &AdapterEntry) -> Value {
    let mut answer = describe_one(app, entry);
    answer["status"] = "loaded".into();
    answer["warnings"] = entry.warnings().into();
    answer
}

#[derive(Debug)]
pub struct UnloadRequest {
    name: String,
    /// Expected adapter version in hexadecimal.
    expected: Option<String>,
}

impl UnloadRequest {
    /// Reads `body`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let name = fields.required_text("lora_name")?;
        let expected = fields.text("expected_generation")?;
        fields.integer("lora_int_id", 0..=i64::MAX)?;
        fields.finish()?;
        Ok(Self { name, expected })
    }
}

/// Refuses new requests, waits for running ones, and answers when the adapter's memory is free.
pub(crate) async fn unload(State(app): State<Arc<App>>, body: JsonBody) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let UnloadRequest { name, expected } = UnloadRequest::read(&body)?;
    check_is_adapter(&name, &serving.base_name)?;
    let freed_bytes = app.registry.unload(&name, expected.as_deref()).await?;
    Ok(Json(unloaded(&name, freed_bytes)))
}

pub(super) fn unloaded(name: &str, freed_bytes: u64) -> Value {
    json!({ "status": "unloaded", "name": name, "freed_bytes": freed_bytes })
}

#[derive(Debug)]
pub struct PinRequest {
    name: String,
    pin: Pin,
}

impl PinRequest {
    /// Reads `body`.
    ///
    /// # Errors
    /// Names the field that is missing, malformed or unknown.
    pub fn read(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = StrictFields::parse(body)?;
        let name = fields.required_text("lora_name")?;
        let pin = if fields.flag("pinned", true)? { Pin::Keep } else { Pin::Release };
        fields.finish()?;
        Ok(Self { name, pin })
    }
}

/// Pins an adapter in host memory, or permits its eviction again.
pub(crate) async fn pin(State(app): State<Arc<App>>, body: JsonBody) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let PinRequest { name, pin } = PinRequest::read(&body)?;
    check_is_adapter(&name, &serving.base_name)?;
    let entry = app.registry.pin(&name, pin).await?;
    Ok(Json(describe_one(&app, &entry)))
}

/// Refuses the name of the base, which can neither be unloaded nor pinned.
pub(super) fn check_is_adapter(name: &str, base_name: &str) -> Result<(), ApiError> {
    if name != base_name {
        return Ok(());
    }
    let message = format!("'{name}' is the base model; name an adapter");
    Err(ApiError::invalid("lora_name", message))
}

/// Whether the adapter's name still resolves for new requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NameState {
    Yes,
    NoMore,
}

pub(crate) fn placed(app: &App) -> PlacementReport {
    PlacementReport::of(app.metrics.reported().iter().map(|report| &*report.stats))
}

pub(super) fn describe_one(app: &App, entry: &AdapterEntry) -> Value {
    describe(app, &placed(app), entry, NameState::Yes)
}

fn describe(app: &App, placed: &PlacementReport, entry: &AdapterEntry, named: NameState) -> Value {
    let (registry, record, fault) = (&app.registry, &entry.record, entry.fault());
    let placement = placed.find(entry.id());
    let [on_device, by_workers, by_executor] = placement.rank_rows;
    let state = match named {
        NameState::NoMore => "draining",
        NameState::Yes if fault.is_some() => "failed",
        NameState::Yes if registry.is_loading(entry) => "loading",
        NameState::Yes => "ready",
    };
    let mut answer = json!({
        "name": record.name,
        "generation": record.generation.to_string(),
        "rank": record.rank,
        "bytes": record.bytes,
        "modules": record.modules,
        "draft_layers": (record.draft_layers > 0).then_some(record.draft_layers),
        "labels": (!record.labels.0.is_empty()).then(|| record.labels.0.to_vec()),
        "tenant": record.tenant,
        "tier": registry.tier(entry).name(),
        "device_bytes": placement.device_bytes,
        "state": state,
        "error": fault,
        "pinned": entry.is_pinned(),
        "durable": entry.is_durable(),
        "requests": entry.requests(),
        "tokens_per_s": entry.tokens_per_s(),
        "cold_starts": placement.cold_starts,
        "load_wait_ms": placement.load_wait_ms,
        "rank_rows": { "device": on_device, "workers": by_workers, "executor": by_executor },
        "drafted_tokens": placement.drafted_tokens,
        "accepted_tokens": placement.accepted_tokens,
        "least_confidence": placement.least_confidence,
        "own_chat_template": record.template.is_some(),
        "uri": record.uri(),
        "loaded_at": record.loaded_at,
        "expires_at": entry.expires_at(),
        "last_used_at": entry.last_used_us() / 1_000_000,
    });
    if app.executors.are_several() {
        let has = |member: &&ExecutorHandle| registry.is_at(entry.id(), member.index());
        answer["executors"] = app.executors.all().iter().filter(has).map(ExecutorHandle::name).collect();
    }
    answer
}

impl From<AdapterError> for ApiError {
    fn from(error: AdapterError) -> Self {
        Self::from(&error)
    }
}

impl From<&AdapterError> for ApiError {
    fn from(error: &AdapterError) -> Self {
        let message = error.to_string();
        match error {
            AdapterError::BadName(_) | AdapterError::ReservedName(_) | AdapterError::NameOfBase(_) => {
                Self::invalid("lora_name", message)
            }
            AdapterError::BadTenant(_) | AdapterError::OtherTenant(_) => Self::invalid("tenant", message),
            AdapterError::NameTaken(_) => {
                Self::bad_request("adapter_already_loaded", message).of("lora_name")
            }
            AdapterError::OfOtherBase { .. } => {
                Self::conflict("adapter_of_other_base", message).of("lora_name")
            }
            AdapterError::DurableName(_) => Self::conflict("adapter_is_durable", message).of("durable"),
            AdapterError::OtherGeneration { .. } => Self::conflict("generation_mismatch", message),
            AdapterError::NotFound(name) => Self::model_not_found(name).of("lora_name"),
            AdapterError::NoModules(_) | AdapterError::Text(_) => {
                Self::bad_request("invalid_adapter", message).of("lora_path")
            }
            AdapterError::Full(_) | AdapterError::TenantFull { .. } => {
                Self::bad_request("adapter_limit_exceeded", message)
            }
            AdapterError::Busy(_) => Self::busy("lora_load_busy", message),
            AdapterError::PinsExceedBudget { .. } => {
                Self::no_room("adapter_budget_exceeded", message).of("pinned")
            }
            AdapterError::Store(store) => of_store(store, message),
            AdapterError::Residency(residency) => residency.clone().into(),
            AdapterError::Database(DatabaseError::Full) => Self::no_room("insufficient_storage", message),
            AdapterError::Database(DatabaseError::Conflict(_)) => {
                Self::conflict("registry_conflict", message)
            }
            AdapterError::Database(_) => Self::registry_unavailable(message),
            AdapterError::Stopped(_) => Self::internal(message),
            AdapterError::Fetch(refusal) => Self::from(refusal.clone()).of("lora_path"),
        }
    }
}

fn of_store(error: &StoreError, message: String) -> ApiError {
    match error {
        StoreError::Jail(JailError::Forbidden { .. }) => {
            ApiError::bad_request("adapter_path_forbidden", message).of("lora_path")
        }
        StoreError::NoPart { .. } => ApiError::bad_request("invalid_adapter", message).of("file"),
        StoreError::Jail(_) | StoreError::TooLarge { .. } => {
            ApiError::bad_request("invalid_adapter", message).of("lora_path")
        }
        StoreError::PushedConfig(_) => {
            ApiError::bad_request("invalid_adapter", message).of("x-adapter-config")
        }
        StoreError::TenantMemory { .. } | StoreError::Memory { .. } => {
            ApiError::no_room("ephemeral_limit_exceeded", message).of("durable")
        }
        StoreError::Full(_) => ApiError::no_room("insufficient_storage", message),
        StoreError::Io { .. } => ApiError::registry_unavailable(message),
        StoreError::Bucket(_) | StoreError::Damaged(_) => {
            ApiError::unavailable("adapter_store_unavailable", message)
        }
        StoreError::Stopped(_) => ApiError::internal(message),
    }
}

impl From<ResidencyError> for ApiError {
    fn from(error: ResidencyError) -> Self {
        let message = error.to_string();
        match error {
            ResidencyError::Busy(_) => Self::busy("lora_load_busy", message),
            ResidencyError::NeverFits(_) => Self::no_room("adapter_budget_exceeded", message),
            ResidencyError::Unusable(unusable) => unusable.into(),
            ResidencyError::Call(call) => call.into(),
            ResidencyError::Unfetched(_) => {
                Self::unavailable("adapter_store_unavailable", message).of("model")
            }
            ResidencyError::Sum(sum) => sum.into(),
        }
    }
}

impl From<LeaseError> for ApiError {
    fn from(error: LeaseError) -> Self {
        match error {
            LeaseError::Unusable(unusable) => unusable.into(),
            LeaseError::Draft(_) => Self::invalid("model", error.to_string()),
            LeaseError::Sum(sum) => sum.into(),
        }
    }
}

impl From<WeightedMergeError> for ApiError {
    fn from(error: WeightedMergeError) -> Self {
        match error {
            WeightedMergeError::Unknown(name) => Self::model_not_found(&name),
            WeightedMergeError::Busy(_) => Self::busy("lora_load_busy", error.to_string()),
            _ => Self::invalid("model", format!("'model' is not a valid sum of adapters: {error}")),
        }
    }
}

impl From<UnusableAdapter> for ApiError {
    fn from(error: UnusableAdapter) -> Self {
        Self::adapter_unusable(error.to_string())
    }
}

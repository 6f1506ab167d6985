//! Routes of checkpoints: `training_runs`, their `checkpoints`, and `weights_info`. A run exists while it
//! trains or has checkpoints.

use std::{collections::BTreeMap, io, sync::Arc};

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::sessions::read;
use crate::{
    adapters::{AdapterEntry, AdapterError},
    app::App,
    body::JsonBody,
    caller::Caller,
    clock::seconds_since_1970,
    errors::ApiError,
    thread,
    training_sessions::{
        checkpoint_path::{self, CheckpointPath},
        checkpoint_store::{self, Checkpoint, CheckpointKind, CheckpointStore},
        expiry,
        sessions::ActiveModel,
    },
};

/// Default number of list items per page.
const USUAL_PIECE: usize = 20;
/// Maximum number of list items per page.
const MAX_PIECE: usize = 1000;

/// A page of a list. Clients also send project parameters, which are ignored because there are no projects.
#[derive(Debug, Deserialize)]
pub(crate) struct ListRange {
    limit: Option<String>,
    offset: Option<String>,
}

impl ListRange {
    fn of(&self, name: &str, all: Vec<Value>) -> Result<Json<Value>, ApiError> {
        let limit = number("limit", self.limit.as_deref(), USUAL_PIECE)?.min(MAX_PIECE);
        let (offset, total) = (number("offset", self.offset.as_deref(), 0)?, all.len());
        let piece: Vec<Value> = all.into_iter().skip(offset).take(limit).collect();
        let cursor = json!({ "offset": offset, "limit": limit, "total_count": total });
        Ok(Json(json!({ name: piece, "cursor": cursor })))
    }
}

fn number(name: &str, said: Option<&str>, otherwise: usize) -> Result<usize, ApiError> {
    let wrong = |_| ApiError::invalid(name, format!("'{name}' must be a whole number"));
    said.map_or(Ok(otherwise), |said| said.parse().map_err(wrong))
}

/// Reads a run's name in either spelling of clients.
fn named(run: &str) -> Result<String, ApiError> {
    let run = run.replacen(":train:", "-", 1);
    checkpoint_path::checked(&run).map(str::to_owned).map_err(|refusal| ApiError::not_found(refusal.message))
}

/// Returns all checkpoints of a tenant, newest first.
async fn all(app: &App, caller: &Caller) -> Result<Vec<Checkpoint>, ApiError> {
    let (states, tenant) = (app.runs.means.states.clone(), Arc::clone(&caller.tenant));
    let listed = thread::run("tinker-states", move || states.list(&tenant)).await;
    let listed = listed.map_err(|error| ApiError::internal(error.to_string()))?;
    let mut all = listed.map_err(|error| ApiError::internal(format!("cannot read the states: {error}")))?;
    all.extend(checkpoint_store::adapters(&app.registry.entries(), &caller.tenant));
    all.sort_by(|a, b| b.at.cmp(&a.at).then_with(|| a.path().cmp(&b.path())));
    Ok(all)
}

/// Returns the models that a tenant trains now, by run.
fn active_models_by_run(app: &App, caller: &Caller) -> BTreeMap<String, ActiveModel> {
    let own = app.runs.book.active_models().into_iter().filter(|live| live.tenant == caller.tenant);
    own.map(|live| (live.run.clone(), live)).collect()
}

fn described(checkpoint: &Checkpoint) -> Value {
    json!({
        "checkpoint_id": checkpoint.id(), "checkpoint_type": checkpoint.kind.as_str(), "time": checkpoint.at,
        "tinker_path": checkpoint.path(), "size_bytes": checkpoint.bytes, "expires_at": checkpoint.expires_at,
    })
}

/// Returns the runs of a tenant, newest first.
async fn all_runs(app: &App, caller: &Caller) -> Result<Vec<Value>, ApiError> {
    let base = app.last_serving()?.base_name.clone();
    let mut runs: BTreeMap<String, Vec<Checkpoint>> = BTreeMap::new();
    for checkpoint in all(app, caller).await? {
        runs.entry(checkpoint.run.clone()).or_default().push(checkpoint);
    }
    let live = active_models_by_run(app, caller);
    for run in live.keys() {
        runs.entry(run.clone()).or_default();
    }
    let described = |(run, kept): (String, Vec<Checkpoint>)| {
        let last = |kind| kept.iter().find(|checkpoint| checkpoint.kind == kind);
        let live = live.get(&run);
        let at = live.map(|live| live.at).max(kept.first().map(|newest| newest.at));
        let rank = live.and_then(|live| live.rank).or_else(|| kept.iter().find_map(|kept| kept.rank));
        let run = json!({
            "training_run_id": run, "base_model": base, "model_owner": &*caller.tenant, "is_lora": true,
            "lora_rank": rank, "last_request_time": at,
            "last_checkpoint": last(CheckpointKind::State).map(described),
            "last_sampler_checkpoint": last(CheckpointKind::Sampler).map(described),
        });
        (at, run)
    };
    let mut runs: Vec<_> = runs.into_iter().map(described).collect();
    runs.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    Ok(runs.into_iter().map(|(_, run)| run).collect())
}

/// `GET training_runs`: lists the tenant's runs.
pub(crate) async fn runs(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(piece): Query<ListRange>,
) -> Result<Json<Value>, ApiError> {
    piece.of("training_runs", all_runs(&app, &caller).await?)
}

/// `GET training_runs/{run}`: describes one run.
pub(crate) async fn run(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(run): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let run = named(&run)?;
    let found = all_runs(&app, &caller).await?.into_iter().find(|found| found["training_run_id"] == run);
    found.map(Json).ok_or_else(|| no_run(&run))
}

fn no_run(run: &str) -> ApiError {
    ApiError::not_found(format!("there is no active or saved run '{run}'"))
}

/// `GET training_runs/{run}/checkpoints`: lists one run's checkpoints.
pub(crate) async fn of_run(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(run): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let run = named(&run)?;
    let kept = all(&app, &caller).await?.into_iter().filter(|kept| kept.run == run);
    let kept: Vec<Value> = kept.map(|kept| described(&kept)).collect();
    if kept.is_empty() && !active_models_by_run(&app, &caller).contains_key(&run) {
        return Err(no_run(&run));
    }
    Ok(Json(json!({ "checkpoints": kept })))
}

/// `GET checkpoints`: lists the tenant's checkpoints.
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(piece): Query<ListRange>,
) -> Result<Json<Value>, ApiError> {
    let all = all(&app, &caller).await?;
    piece.of("checkpoints", all.iter().map(described).collect())
}

/// The run and checkpoint that a route's path names.
pub(super) struct RunPath {
    pub(super) path: String,
    kept: CheckpointPath,
}

impl RunPath {
    pub(super) fn read((run, kind, name): (String, String, String)) -> Result<Self, ApiError> {
        let path = format!("tinker://{}/{kind}/{name}", named(&run)?);
        match CheckpointPath::parse(&path) {
            Ok(kept) => Ok(Self { path, kept }),
            Err(_) => Err(nothing(&path)),
        }
    }

    /// Returns the adapter at this path, if it belongs to the caller's tenant.
    pub(super) fn adapter(&self, app: &App, caller: &Caller) -> Result<Arc<AdapterEntry>, ApiError> {
        let (CheckpointPath::Sampler { adapter } | CheckpointPath::External { adapter }) = &self.kept else {
            return Err(nothing(&self.path));
        };
        let own = |entry: &&Arc<AdapterEntry>| entry.record.tenant.as_deref() == Some(&*caller.tenant);
        app.registry.entries().get(adapter).filter(own).cloned().ok_or_else(|| nothing(&self.path))
    }

    /// Applies `work` to a saved training state of the caller's tenant.
    async fn with_state(
        &self,
        app: &App,
        caller: &Caller,
        work: impl FnOnce(&CheckpointStore, &str, &str, &str) -> io::Result<()> + Send + 'static,
    ) -> Result<(), ApiError> {
        let CheckpointPath::State { run, name } = self.kept.clone() else { return Err(nothing(&self.path)) };
        let (states, tenant) = (app.runs.means.states.clone(), Arc::clone(&caller.tenant));
        let done = thread::run("tinker-states", move || match states.has(&tenant, &run, &name) {
            true => work(&states, &tenant, &run, &name).map(|()| true),
            false => Ok(false),
        });
        match done.await.map_err(|error| ApiError::internal(error.to_string()))? {
            Ok(true) => Ok(()),
            Ok(false) => Err(nothing(&self.path)),
            Err(error) => Err(ApiError::internal(format!("cannot change {}: {error}", self.path))),
        }
    }
}

fn nothing(path: &str) -> ApiError {
    ApiError::not_found(format!("there is no checkpoint at {path}"))
}

/// `DELETE training_runs/{run}/checkpoints/{kind}/{name}`: deletes a training state or an adapter; running
/// requests finish.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(place): Path<(String, String, String)>,
) -> Result<Json<Value>, ApiError> {
    let named = RunPath::read(place)?;
    if matches!(named.kept, CheckpointPath::State { .. }) {
        let remove = |states: &CheckpointStore, tenant: &str, run: &str, name: &str| {
            states.remove(tenant, run, name).map(drop)
        };
        named.with_state(&app, &caller, remove).await?;
        return Ok(Json(json!({})));
    }
    let adapter = named.adapter(&app, &caller)?;
    match app.registry.unload(&adapter.record.name, None).await {
        Err(AdapterError::NotFound(_)) => Err(nothing(&named.path)),
        removed => Ok(removed.map(|_| Json(json!({})))?),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ttl {
    ttl_seconds: Option<u64>,
}

/// `PUT training_runs/{run}/checkpoints/{kind}/{name}/ttl`: sets the time to live in seconds, or removes it.
pub(crate) async fn set_ttl(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(place): Path<(String, String, String)>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let (named, Ttl { ttl_seconds }) = (RunPath::read(place)?, read(&app, body).await?);
    let ttl_s = checkpoint_path::checked_ttl(ttl_seconds);
    let ttl_s = ttl_s.map_err(|refusal| ApiError::invalid("ttl_seconds", refusal.message))?;
    let at = ttl_s.map(|ttl_s| seconds_since_1970().saturating_add(ttl_s));
    if matches!(named.kept, CheckpointPath::State { .. }) {
        let set = move |states: &CheckpointStore, tenant: &str, run: &str, name: &str| {
            expiry::set(&states.directory(tenant, run, name), at)
        };
        named.with_state(&app, &caller, set).await?;
    } else {
        let adapter = named.adapter(&app, &caller)?;
        app.registry.set_expiry(&adapter.record.name, at).await?;
    }
    Ok(Json(json!({})))
}

/// `POST` and `DELETE training_runs/{run}/checkpoints/{kind}/{name}/publish`: this server has no public
/// checkpoints.
pub(crate) async fn publish() -> ApiError {
    ApiError::not_implemented(
        "not_supported",
        "this server does not publish checkpoints; download the adapter ('holobiont adapters pull', \
         'tinker checkpoint download'), and let an administrator load it ('holobiont adapters add')",
    )
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WeightsInfo {
    tinker_path: String,
}

/// `weights_info`: properties of a model that would resume from a checkpoint.
pub(crate) async fn weights_info(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let WeightsInfo { tinker_path } = read(&app, body).await?;
    let found = all(&app, &caller).await?.into_iter().find(|kept| kept.path() == tinker_path);
    let found = found.ok_or_else(|| ApiError::not_found("there is no checkpoint at this path"))?;
    let directory = app.runs.means.states.directory(&caller.tenant, &found.run, &found.name);
    let about = match found.kind {
        CheckpointKind::Sampler | CheckpointKind::External => None,
        CheckpointKind::State => thread::run("tinker-states", move || CheckpointStore::about(&directory))
            .await
            .map_err(|error| ApiError::internal(error.to_string()))?,
    };
    let base = about.as_ref().map(|about| about.base.clone());
    let base = base.map_or_else(|| Ok(app.last_serving()?.base_name.clone()), Ok::<_, ApiError>)?;
    let learns = |target: &str| {
        let lora = about.as_ref()?.lora.as_ref()?;
        Some(lora.targets.iter().any(|name| name == target))
    };
    Ok(Json(json!({
        "base_model": base, "is_lora": true, "lora_rank": found.rank,
        "train_attn": learns("q_proj"), "train_mlp": learns("up_proj"), "train_unembed": learns("lm_head"),
    })))
}

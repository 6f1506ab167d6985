//! Routes about what is kept: `training_runs`, their `checkpoints`, and `weights_info`. There is nothing of a run but what it
//! has kept and what it does now: one that has ended without keeping anything is gone.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::sessions::read;
use crate::{
    adapters::AdapterError,
    app::App,
    body::JsonBody,
    caller::Caller,
    errors::ApiError,
    runs::{
        book::Live,
        kept::{self, Checkpoint, Kind, States},
        saved::{self, Kept},
    },
    thread,
};

/// Things of a piece of a list, unless it is said how many.
const USUAL_PIECE: usize = 20;
/// Most of them.
const MAX_PIECE: usize = 1000;

/// Which piece of a list is asked for. The rest of what clients say is about projects, which there are none of.
#[derive(Debug, Deserialize)]
pub struct Piece {
    limit: Option<String>,
    offset: Option<String>,
}

impl Piece {
    /// That piece of `all`.
    fn of(&self, name: &str, all: Vec<Value>) -> Result<Json<Value>, ApiError> {
        let limit = number("limit", self.limit.as_deref(), USUAL_PIECE)?.min(MAX_PIECE);
        let (offset, total) = (number("offset", self.offset.as_deref(), 0)?, all.len());
        let piece: Vec<Value> = all.into_iter().skip(offset).take(limit).collect();
        let cursor = json!({ "offset": offset, "limit": limit, "total_count": total });
        Ok(Json(json!({ name: piece, "cursor": cursor })))
    }
}

fn number(name: &str, said: Option<&str>, otherwise: usize) -> Result<usize, ApiError> {
    let wrong = |_| ApiError::invalid(name, format!("'{name}' is a whole number"));
    said.map_or(Ok(otherwise), |said| said.parse().map_err(wrong))
}

/// A run, as clients may name it.
fn named(run: &str) -> Result<String, ApiError> {
    let run = run.replacen(":train:", "-", 1);
    saved::checked(&run).map(str::to_owned).map_err(|refusal| ApiError::not_found(refusal.message))
}

/// Everything that is kept for a tenant, the newest first.
async fn all(app: &App, caller: &Caller) -> Result<Vec<Checkpoint>, ApiError> {
    let (states, tenant) = (app.runs.means.states.clone(), Arc::clone(&caller.tenant));
    let listed = thread::run("tinker-states", move || states.list(&tenant)).await;
    let listed = listed.map_err(|error| ApiError::internal(error.to_string()))?;
    let mut all =
        listed.map_err(|error| ApiError::internal(format!("the states cannot be looked at: {error}")))?;
    all.extend(kept::samplers(&app.registry.entries(), &caller.tenant));
    all.sort_by(|a, b| b.at.cmp(&a.at).then_with(|| a.path().cmp(&b.path())));
    Ok(all)
}

/// What a tenant trains now, by run.
fn live(app: &App, caller: &Caller) -> BTreeMap<String, Live> {
    let own = app.runs.book.live().into_iter().filter(|live| live.tenant == caller.tenant);
    own.map(|live| (live.run.clone(), live)).collect()
}

fn described(checkpoint: &Checkpoint) -> Value {
    let kind = if checkpoint.kind == Kind::State { "training" } else { "sampler" };
    json!({
        "checkpoint_id": checkpoint.id(), "checkpoint_type": kind, "time": checkpoint.at,
        "tinker_path": checkpoint.path(), "size_bytes": checkpoint.bytes,
    })
}

/// The runs of a tenant, the newest first.
async fn all_runs(app: &App, caller: &Caller) -> Result<Vec<Value>, ApiError> {
    let base = app.serving()?.base_name.clone();
    let mut runs: BTreeMap<String, Vec<Checkpoint>> = BTreeMap::new();
    for checkpoint in all(app, caller).await? {
        runs.entry(checkpoint.run.clone()).or_default().push(checkpoint);
    }
    let live = live(app, caller);
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
            "last_checkpoint": last(Kind::State).map(described),
            "last_sampler_checkpoint": last(Kind::Sampler).map(described),
        });
        (at, run)
    };
    let mut runs: Vec<_> = runs.into_iter().map(described).collect();
    runs.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    Ok(runs.into_iter().map(|(_, run)| run).collect())
}

/// `GET training_runs`.
pub async fn runs(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(piece): Query<Piece>,
) -> Result<Json<Value>, ApiError> {
    piece.of("training_runs", all_runs(&app, &caller).await?)
}

/// `GET training_runs/{run}`.
pub async fn run(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(run): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let run = named(&run)?;
    let found = all_runs(&app, &caller).await?.into_iter().find(|found| found["training_run_id"] == run);
    found.map(Json).ok_or_else(|| no_run(&run))
}

fn no_run(run: &str) -> ApiError {
    ApiError::not_found(format!("there is no run '{run}' that does anything or has kept anything"))
}

/// `GET training_runs/{run}/checkpoints`.
pub async fn of_run(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(run): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let run = named(&run)?;
    let kept = all(&app, &caller).await?.into_iter().filter(|kept| kept.run == run);
    let kept: Vec<Value> = kept.map(|kept| described(&kept)).collect();
    if kept.is_empty() && !live(&app, &caller).contains_key(&run) {
        return Err(no_run(&run));
    }
    Ok(Json(json!({ "checkpoints": kept })))
}

/// `GET checkpoints`.
pub async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(piece): Query<Piece>,
) -> Result<Json<Value>, ApiError> {
    let all = all(&app, &caller).await?;
    piece.of("checkpoints", all.iter().map(described).collect())
}

/// `DELETE training_runs/{run}/checkpoints/{id}`: takes a state away, or an adapter. Whoever samples from it finishes.
pub async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path((run, id)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let path = format!("tinker://{}/{id}", named(&run)?);
    let gone = || ApiError::not_found(format!("nothing is kept at {path}"));
    let is_removed = match Kept::parse(&path).map_err(|_| gone())? {
        Kept::State { run, name } => {
            let (states, tenant) = (app.runs.means.states.clone(), Arc::clone(&caller.tenant));
            let removed = thread::run("tinker-states", move || states.remove(&tenant, &run, &name)).await;
            let removed = removed.map_err(|error| ApiError::internal(error.to_string()))?;
            removed.map_err(|error| ApiError::internal(format!("{path} cannot be removed: {error}")))?
        }
        Kept::Sampler { adapter } => {
            let entries = app.registry.entries();
            let own = |adapter: &String| {
                entries.get(adapter).is_some_and(|of| of.record.tenant.as_deref() == Some(&*caller.tenant))
            };
            match Some(adapter).filter(own) {
                None => false,
                Some(adapter) => match app.registry.unload(&adapter, None).await {
                    Err(AdapterError::NotFound(_)) => false,
                    removed => removed.map(|_| true)?,
                },
            }
        }
    };
    if is_removed { Ok(Json(json!({}))) } else { Err(gone()) }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WeightsInfo {
    tinker_path: String,
}

/// `weights_info`: what a model would be that goes on from a state.
pub async fn weights_info(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let WeightsInfo { tinker_path } = read(&app, body).await?;
    let found = all(&app, &caller).await?.into_iter().find(|kept| kept.path() == tinker_path);
    let found = found.ok_or_else(|| ApiError::not_found("nothing is kept at this path"))?;
    let directory = app.runs.means.states.directory(&caller.tenant, &found.run, &found.name);
    let about = match found.kind {
        Kind::Sampler => None,
        Kind::State => thread::run("tinker-states", move || States::about(&directory))
            .await
            .map_err(|error| ApiError::internal(error.to_string()))?,
    };
    let base = about.as_ref().map(|about| about.base.clone());
    let base = base.map_or_else(|| Ok(app.serving()?.base_name.clone()), Ok::<_, ApiError>)?;
    let learns = |target: &str| {
        let lora = about.as_ref()?.lora.as_ref()?;
        Some(lora.targets.iter().any(|name| name == target))
    };
    Ok(Json(json!({
        "base_model": base, "is_lora": true, "lora_rank": found.rank,
        "train_attn": learns("q_proj"), "train_mlp": learns("up_proj"), "train_unembed": learns("lm_head"),
    })))
}

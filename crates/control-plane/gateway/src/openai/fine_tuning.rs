//! `/v1/fine_tuning/jobs`: training jobs, whose adapters this server serves when a job succeeds.

use std::{io, sync::Arc};

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::HeaderMap,
};
use serde_json::{Value, json};

use super::{
    creation, idempotency,
    paging::{self, PageQuery},
};
use crate::{
    adapters::database::DatabaseError,
    app::App,
    body::JsonBody,
    caller::Caller,
    errors::ApiError,
    trainer_client::TrainerUnavailable,
    training::{
        TrainingError,
        records::{
            EventLevel, EventRecord, JobHyperparameters, JobRecord, JobSpec, JobStatus, TrainingMethod,
        },
    },
};

/// Maximum number of list items per page.
const MAX_PAGE: u32 = 100;

/// Creates a job; answers when the job is durable. Requests with equal `Idempotency-Key` create one job.
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: JsonBody,
) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let order = JobSpec::read(&body)?;
    let key = idempotency::key(&headers)?.map(<[u8]>::to_vec);
    let (training, tenant) = (Arc::clone(&app.training), Arc::clone(&caller.tenant));
    let create = async move { training.create(order, key.as_deref(), &caller, &serving).await };
    let slots = (app.training.creation_slots(), &tenant);
    let job = creation::create(slots, app.connections.body_timeout, "fine-tuning jobs", create).await?;
    Ok(Json(describe(&job)))
}

/// Lists the caller's jobs, newest first.
pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let listed = app.training.jobs(&caller.tenant, &page.checked(MAX_PAGE)?).await?;
    Ok(Json(paging::list(&listed.items.iter().map(describe).collect::<Vec<_>>(), listed.has_more)))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.training.job(&id, &caller.tenant).await?)))
}

/// Lists the events of a job, newest first.
pub(crate) async fn events(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    Query(page): Query<PageQuery>,
) -> Result<Json<Value>, ApiError> {
    let mut page = page.checked(MAX_PAGE)?;
    page.after = page.after.map(|id| id.trim_start_matches(EVENT).to_owned());
    let listed = app.training.events(&id, &caller.tenant, &page).await?;
    let data: Vec<Value> = listed.items.iter().map(|(number, event)| of_event(*number, event)).collect();
    Ok(Json(paging::list(&data, listed.has_more)))
}

/// Returns the checkpoint from which the job would resume, if there is one.
pub(crate) async fn checkpoints(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let job = app.training.job(&id, &caller.tenant).await?;
    let mark = job.mark.map(|mark| {
        json!({
            "id": format!("ftckpt-{}-{}", job.id.trim_start_matches("ftjob-"), mark.step),
            "object": "fine_tuning.job.checkpoint",
            "created_at": mark.at,
            "fine_tuned_model_checkpoint": job.name,
            "fine_tuning_job_id": job.id,
            "step_number": mark.step,
            "metrics": { "step": mark.step, "train_loss": mark.loss, "full_valid_loss": mark.held_out_loss },
        })
    });
    Ok(Json(paging::list(mark.as_slice(), false)))
}

pub(crate) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.training.cancel(&id, &caller.tenant).await?)))
}

pub(crate) async fn pause(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.training.pause(&id, &caller.tenant).await?)))
}

pub(crate) async fn resume(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(describe(&app.training.resume(&id, &caller.tenant).await?)))
}

/// Prefix of event ids.
const EVENT: &str = "ftevent-";

fn of_event(number: i64, event: &EventRecord) -> Value {
    let level = match event.level {
        EventLevel::Info => "info",
        EventLevel::Warn => "warn",
        EventLevel::Error => "error",
    };
    json!({
        "id": format!("{EVENT}{number}"),
        "object": "fine_tuning.job.event",
        "created_at": event.created_at,
        "level": level,
        "message": event.message,
        "type": if event.metrics.is_some() { "metrics" } else { "message" },
        "data": event.metrics,
    })
}

fn describe(job: &JobRecord) -> Value {
    let is_done = job.status == JobStatus::Succeeded;
    let hyper = hyperparameters(job);
    let name = job.order.method.as_str();
    let method = json!({ "type": name, name: { "hyperparameters": hyper } });
    json!({
        "id": job.id,
        "object": "fine_tuning.job",
        "status": job.status,
        "model": job.order.model,
        "fine_tuned_model": is_done.then_some(&job.name),
        "organization_id": job.tenant,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "estimated_finish": job.estimated_finish,
        "trained_tokens": is_done.then_some(job.trained_tokens),
        "training_file": job.order.training_file,
        "validation_file": job.order.validation_file,
        "result_files": job.result_file.iter().collect::<Vec<_>>(),
        "hyperparameters": hyper,
        "method": method,
        "seed": job.plan.as_ref().map_or(job.order.choices.seed.unwrap_or(0), |plan| plan.seed),
        "error": job.error,
        "metadata": job.order.metadata,
        "integrations": [],
        "user_provided_suffix": job.order.suffix,
        // Fields beyond OpenAI's API.
        "generation": job.generation,
        "step": job.step,
        "plan": job.plan,
    })
}

/// Returns the hyperparameters that the request or the trainer chose.
fn hyperparameters(job: &JobRecord) -> Value {
    let JobHyperparameters { n_epochs, batch_size, learning_rate_multiplier, beta, .. } = job.order.choices;
    let JobHyperparameters { desirable_weight, undesirable_weight, .. } = job.order.choices;
    let auto = |value: Option<Value>| value.unwrap_or_else(|| "auto".into());
    let plan = job.plan.as_ref();
    let mut hyper = json!({
        "n_epochs": auto(n_epochs.or(plan.map(|plan| plan.epochs)).map(Value::from)),
        "batch_size": auto(batch_size.or(plan.map(|plan| plan.batch_size)).map(Value::from)),
        "learning_rate_multiplier": auto(learning_rate_multiplier.or(plan.map(|_| 1.0)).map(Value::from)),
    });
    if job.order.method != TrainingMethod::Supervised {
        hyper["beta"] = auto(beta.map(Value::from));
    }
    if job.order.method == TrainingMethod::Kto {
        hyper["desirable_weight"] = auto(desirable_weight.map(Value::from));
        hyper["undesirable_weight"] = auto(undesirable_weight.map(Value::from));
    }
    hyper
}

impl From<TrainingError> for ApiError {
    fn from(error: TrainingError) -> Self {
        let message = error.to_string();
        match error {
            TrainingError::NoTrainer(none) => none.into(),
            TrainingError::NoModel(name) => Self::model_not_found(&name),
            TrainingError::Lease(error) => error.into(),
            TrainingError::Files(error) => error.into(),
            TrainingError::Database(DatabaseError::Full) => Self::no_room("insufficient_storage", message),
            TrainingError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Self::no_room("insufficient_storage", message)
            }
            TrainingError::Database(_) | TrainingError::Io { .. } => Self::registry_unavailable(message),
            TrainingError::Bucket(_) | TrainingError::Damaged(_) => {
                Self::unavailable("adapter_store_unavailable", message)
            }
            TrainingError::NoFile(_) | TrainingError::NoJob(_) => Self::not_found(message),
            TrainingError::WrongState { .. } | TrainingError::TooManyPauses(_) => {
                Self::bad_request("invalid_job_state", message)
            }
            TrainingError::WrongPurpose { .. } => Self::invalid("training_file", message),
            TrainingError::TooManyBytes { .. } => Self::no_room("file_quota_exceeded", message),
            TrainingError::TooManyJobs(_) => Self::busy("job_quota_exceeded", message),
            TrainingError::NameTaken(_) => Self::conflict("name_taken", message).of("suffix"),
            TrainingError::KeyReused(_) => {
                Self::unprocessable("idempotency_key_reused", message).of("idempotency-key")
            }
            TrainingError::Stopped(_) => Self::internal(message),
        }
    }
}

impl From<TrainerUnavailable> for ApiError {
    fn from(error: TrainerUnavailable) -> Self {
        let message = error.to_string();
        match error {
            TrainerUnavailable::Nowhere => Self::not_implemented("training_disabled", message),
            TrainerUnavailable::Unreachable(_) => Self::unavailable("trainers_unavailable", message),
        }
    }
}

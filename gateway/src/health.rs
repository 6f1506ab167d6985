//! Whether requests are served: for load balancers, service managers and people.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::{
    app::App,
    errors::ApiError,
    layers,
    lifecycle::{Serving, Status},
    placement,
    training::figures::UnderWay,
};

/// `GET /health`: 200 when requests are served, 503 with the reason when they are not.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    answer(&app, "ok")
}

/// `GET /ready`: the same, in the words of a start.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response {
    answer(&app, "ready")
}

fn answer(app: &App, well: &str) -> Response {
    let status = app.status.borrow().clone();
    let body = match status {
        _ if app.is_draining() => stopping(),
        Status::Ready(_) => return Json(json!({ "status": well })).into_response(),
        Status::Starting { stage, percent } => json!({
            "status": "loading", "detail": loading(&stage, percent), "stage": stage, "percent": percent,
        }),
        Status::Lost { detail } => json!({ "status": "lost", "detail": detail }),
        Status::Closing => stopping(),
    };
    let mut response = (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

fn stopping() -> Value {
    json!({ "status": "stopping", "detail": "the gateway is shutting down" })
}

/// A stage for a person: `loading 43 %`, or what is waited for.
#[must_use]
pub fn loading(stage: &str, percent: Option<u32>) -> String {
    percent.map_or_else(|| stage.to_owned(), |percent| format!("loading {percent} %"))
}

/// `GET /version`.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /v1/status`: what the gateway and its executor do now.
pub(crate) async fn status(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let serving: Option<Arc<Serving>> = app.serving().ok();
    let report = app.metrics.reported();
    let stats = &report.stats;
    let welcome = serving.as_ref().map(|serving| &*serving.welcome);
    Ok(Json(json!({
        "model": serving.as_ref().map(|serving| serving.base_name.as_str()),
        "model_path": welcome.map(|welcome| welcome.model_path.as_str()),
        "adapter_root": app.registry.root().to_string_lossy(),
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": app.started.elapsed().as_secs(),
        "ready": serving.is_some() && !app.is_draining(),
        "requests": { "running": stats.running, "waiting": stats.waiting },
        "tokens_per_s": {
            "prompt": report.prompt_tokens_per_s, "generated": report.generated_tokens_per_s,
        },
        "kv_blocks": {
            "total": stats.kv_blocks_total, "used": stats.kv_blocks_used, "cached": stats.kv_blocks_cached,
        },
        "memory": placement::memory(stats),
        "adapters": {
            "registered": app.registry.len(),
            "resident": stats.adapters.len(),
            "bytes": stats.adapter_bytes,
            "budget_bytes": welcome.map(|welcome| welcome.adapter_budget_bytes),
        },
        "device": placement::device(stats, welcome),
        "cold_starts": placement::cold_starts(stats),
        "workers": placement::workers(stats, app.metrics.expected_workers()),
        "layers": layers::status(&stats.layers),
        "training": training(&app),
    })))
}

/// What is trained now, for the operator: jobs, and models of sessions step by step.
fn training(app: &App) -> Value {
    let jobs = app.training.under_way().into_iter().map(|UnderWay { job, tokens_per_s }| {
        json!({
            "id": job.id, "name": job.name, "tenant": job.tenant, "status": job.status,
            "step": job.step, "steps": job.plan.map(|plan| plan.steps), "loss": job.loss,
            "tokens_per_s": tokens_per_s, "estimated_finish": job.estimated_finish,
        })
    });
    let runs = app.runs.book.live().into_iter().map(|live| {
        let status = if live.progress.has_trainer { "running" } else { "queued" };
        json!({
            "name": live.run, "tenant": &*live.tenant, "status": status,
            "step": live.progress.steps, "loss_sum": live.progress.loss,
        })
    });
    json!({
        "trains": app.runs.means.trainers.check().is_ok(),
        "jobs": jobs.collect::<Vec<_>>(), "runs": runs.collect::<Vec<_>>(),
    })
}

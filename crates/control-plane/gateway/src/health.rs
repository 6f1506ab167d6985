//! Health and status endpoints for load balancers, service managers and operators.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use shmproto::message::{Stats, Welcome};

use crate::{
    adapters::Registry,
    app::App,
    base_sleep,
    bases::Bases,
    errors::ApiError,
    executors::{ExecutorHandle, ExecutorState as Executor},
    layer_stats,
    lifecycle::{GatewayReadiness, ServingState},
    metrics::LastStats,
    openai::adapters::budget_bytes,
    placement_stats,
    served_base::SleepPhase,
    slo_status,
    training::stats::JobInProgress,
};

/// `GET /health`: 200 if requests are served, otherwise 503 with the reason.
pub(crate) async fn health(State(bases): State<Arc<Bases>>) -> Response {
    answer(&bases, "ok")
}

/// `GET /ready`: answers as `/health`, with the status `ready`.
pub(crate) async fn ready(State(bases): State<Arc<Bases>>) -> Response {
    answer(&bases, "ready")
}

fn answer(bases: &Bases, well: &str) -> Response {
    let body = match bases.readiness() {
        _ if bases.first().is_draining() => stopping(),
        GatewayReadiness::Ready(_) | GatewayReadiness::Asleep(_) => {
            return Json(json!({ "status": well })).into_response();
        }
        GatewayReadiness::Starting { stage, percent } => json!({
            "status": "loading", "detail": loading(&stage, percent), "stage": stage, "percent": percent,
        }),
        GatewayReadiness::Lost { detail } => json!({ "status": "lost", "detail": detail }),
        GatewayReadiness::Closing => stopping(),
    };
    let mut response = (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

fn stopping() -> Value {
    json!({ "status": "stopping", "detail": "the gateway is shutting down" })
}

/// Formats a start stage for display: `loading 43 %`, or the stage's name.
#[must_use]
pub(crate) fn loading(stage: &str, percent: Option<u32>) -> String {
    percent.map_or_else(|| stage.to_owned(), |percent| format!("loading {percent} %"))
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /v1/status`: the current state of the gateway, its bases and their executors.
pub(crate) async fn status(State(bases): State<Arc<Bases>>) -> Result<Json<Value>, ApiError> {
    let (app, apps) = (bases.first(), bases.all());
    let serving: Option<Arc<ServingState>> = app.last_serving().ok();
    let mut status = of_executors(&bases);
    let welcome = serving.as_ref().map(|serving| &*serving.welcome);
    status["model"] = json!(serving.as_ref().map(|serving| serving.base_name.as_str()));
    status["model_path"] = json!(welcome.map(|welcome| welcome.model_path.as_str()));
    status["adapter_root"] = json!(app.registry.root().to_string_lossy());
    status["version"] = json!(env!("CARGO_PKG_VERSION"));
    status["uptime_s"] = json!(app.lifetime.started.elapsed().as_secs());
    status["ready"] = json!(bases.readiness().answers() && !app.is_draining());
    status["adapters"]["registered"] = json!(apps.iter().map(|app| app.registry.len()).sum::<usize>());
    status["registry"] = registry(&app.registry);
    status["store"] = store(&app.registry);
    status["training"] = training(app);
    status["classes"] = slo_status::status(app);
    let waiting = status["requests"]["waiting"].as_u64().unwrap_or_default();
    let queued = apps.iter().map(|app| app.turns.queued() as u64).sum::<u64>();
    status["requests"]["waiting"] = json!(waiting + queued);
    status["bases"] = apps.iter().map(|app| base_sleep::describe(app)).collect();
    Ok(Json(status))
}

/// Reports the stats of all executors: of a single one alone, and of several together and one by one.
fn of_executors(bases: &Bases) -> Value {
    let reports: Vec<_> = bases.all().iter().map(|app| (app, app.metrics.reported())).collect();
    if let [(app, one)] = &reports[..]
        && let [only] = &one[..]
    {
        return figures(only, welcome_of(app, 0).as_deref(), app.metrics.expected_workers(0));
    }
    let mut together = sums(&reports.iter().flat_map(|(_, each)| each.clone()).collect::<Vec<_>>());
    let each = reports.iter().flat_map(|(app, each)| {
        let of_one = |(report, member): (&LastStats, &ExecutorHandle)| {
            let welcome = welcome_of(app, member.index());
            let workers = app.metrics.expected_workers(member.index());
            let mut told = executor(member, report, welcome.as_deref(), workers);
            if app.base.phase() == SleepPhase::Asleep {
                told["state"] = "asleep".into();
            }
            if bases.are_several() {
                told["base"] = app.base.name().into();
            }
            told
        };
        each.iter().zip(app.executors.all()).map(of_one).collect::<Vec<_>>()
    });
    together["executors"] = each.collect();
    together["adapters"]["budget_bytes"] = json!(budget_bytes(bases.all()));
    together
}

fn welcome_of(app: &App, index: usize) -> Option<Arc<Welcome>> {
    let serving = app.serving().ok()?;
    let ready = serving.ready.iter().find(|ready| ready.index == index)?;
    Some(Arc::clone(&ready.welcome))
}

/// Reports where the registry lies, and how old this gateway's copy of it is.
fn registry(registry: &Registry) -> Value {
    match registry.freshness() {
        None => json!({ "kind": "sqlite" }),
        Some(known) => json!({
            "kind": "postgres", "address": known.address, "reachable": known.fault.is_none(),
            "age_ms": u64::try_from(known.age.as_millis()).unwrap_or(u64::MAX), "error": known.fault,
        }),
    }
}

/// Reports where adapter files lie, and how many bytes of them this host has cached.
fn store(registry: &Registry) -> Value {
    match registry.fetch_figures() {
        None => json!({ "kind": "directory" }),
        Some(figures) => json!({
            "kind": "s3", "address": figures.address.to_string(), "cached_bytes": figures.cached_bytes,
            "fetched": figures.fetched, "failed": figures.failed, "damaged": figures.damaged,
            "evicted": figures.evicted,
        }),
    }
}

/// Reports the stats of one executor.
fn figures(report: &LastStats, welcome: Option<&Welcome>, expected_workers: u32) -> Value {
    let stats = &report.stats;
    json!({
        "requests": { "running": stats.running, "waiting": stats.waiting },
        "tokens_per_s": {
            "prompt": report.prompt_tokens_per_s, "generated": report.generated_tokens_per_s,
        },
        "kv_blocks": {
            "total": stats.kv_blocks_total, "used": stats.kv_blocks_used, "cached": stats.kv_blocks_cached,
        },
        "memory": placement_stats::memory(stats),
        "adapters": {
            "resident": stats.adapters.len(),
            "bytes": stats.adapter_bytes,
            "budget_bytes": welcome.map(|welcome| welcome.adapter_budget_bytes),
        },
        "device": placement_stats::device(stats, welcome),
        "cold_starts": placement_stats::cold_starts(stats),
        "speculation": placement_stats::speculation(stats),
        "workers": placement_stats::workers(stats, expected_workers),
        "layers": layer_stats::status(&stats.layers),
    })
}

/// Reports one of several executors: its stats, and its state as the gateway sees it.
fn executor(
    member: &ExecutorHandle,
    report: &LastStats,
    welcome: Option<&Welcome>,
    expected_workers: u32,
) -> Value {
    let mut told = figures(report, welcome, expected_workers);
    let (state, connection, detail) = match member.state() {
        Executor::Ready(one) if member.is_drained() => ("drained", Some(one.epoch), None),
        Executor::Ready(one) => ("ready", Some(one.epoch), None),
        Executor::Starting { stage, percent } => ("loading", None, Some(loading(&stage, percent))),
        Executor::Lost { detail } => ("lost", None, Some(detail)),
        Executor::Refused { detail } => ("refused", None, Some(detail)),
    };
    let (sent, taken_over) = member.counts();
    told["name"] = member.name().into();
    told["state"] = state.into();
    told["connection"] = json!(connection);
    told["detail"] = json!(detail);
    told["address"] = json!(member.executor().far().map(|far| far.address().to_string()));
    told["drained"] = member.is_drained().into();
    told["sequences"] = json!({
        "under_way": member.executor().load().held, "sent": sent, "taken_over": taken_over,
    });
    told
}

/// Sums those stats of several executors that can be added; the rest is reported per executor.
fn sums(reports: &[LastStats]) -> Value {
    let sum = |figure: fn(&Stats) -> u64| reports.iter().map(|report| figure(&report.stats)).sum::<u64>();
    let rate = |figure: fn(&LastStats) -> f64| reports.iter().map(figure).sum::<f64>();
    json!({
        "requests": {
            "running": sum(|stats| stats.running.into()), "waiting": sum(|stats| stats.waiting.into()),
        },
        "tokens_per_s": {
            "prompt": rate(|report| report.prompt_tokens_per_s),
            "generated": rate(|report| report.generated_tokens_per_s),
        },
        "kv_blocks": {
            "total": sum(|stats| stats.kv_blocks_total.into()),
            "used": sum(|stats| stats.kv_blocks_used.into()),
            "cached": sum(|stats| stats.kv_blocks_cached.into()),
        },
        "adapters": {
            "resident": sum(|stats| stats.adapters.len() as u64), "bytes": sum(|stats| stats.adapter_bytes),
        },
    })
}

/// Reports running training for the operator: fine-tuning jobs, and models that clients train step by step.
fn training(app: &App) -> Value {
    let jobs = app.training.under_way().into_iter().map(|JobInProgress { job, tokens_per_s }| {
        json!({
            "id": job.id, "name": job.name, "tenant": job.tenant, "status": job.status,
            "step": job.step, "steps": job.plan.map(|plan| plan.steps), "loss": job.loss,
            "tokens_per_s": tokens_per_s, "estimated_finish": job.estimated_finish,
        })
    });
    let runs = app.runs.book.active_models().into_iter().map(|live| {
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

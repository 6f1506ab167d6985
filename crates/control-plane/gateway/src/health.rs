//! Health and status endpoints for load balancers, service managers and operators.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use control_protocol::status::{
    AdapterCounts, DeploymentStatus, ExecutorStats, ExecutorStatus, KvBlockCounts, RequestCounts,
    SequenceCounts, TokenRates,
    shared::{RegistryStatus, SharedRegistryStatus, StoreStatus},
    training::{JobSummary, RunSummary, TrainingStatus},
};
use serde_json::{Value, json};
use shmproto::message::{Stats, Welcome};

use crate::{
    adapters::Registry,
    app::App,
    base_sleep,
    bases::Bases,
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
pub(crate) async fn status(State(bases): State<Arc<Bases>>) -> Json<DeploymentStatus> {
    let (app, apps) = (bases.first(), bases.all());
    let serving: Option<Arc<ServingState>> = app.last_serving().ok();
    let (mut stats, executors) = of_executors(&bases);
    stats.adapters.registered = Some(apps.iter().map(|app| app.registry.len()).sum());
    stats.requests.waiting += apps.iter().map(|app| app.admission.queued() as u64).sum::<u64>();
    Json(DeploymentStatus {
        stats,
        executors,
        model: serving.as_ref().map(|serving| serving.base_name.clone()),
        model_path: serving.as_ref().map(|serving| serving.welcome.model_path.clone()),
        adapter_root: app.registry.root().to_string_lossy().into_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_s: app.lifetime.started.elapsed().as_secs(),
        ready: bases.readiness().answers() && !app.is_draining(),
        registry: registry(&app.registry),
        store: store(&app.registry),
        training: training(app),
        classes: slo_status::status(app),
        bases: apps.iter().map(|app| base_sleep::describe(app)).collect(),
    })
}

/// Reports the stats of all executors: of a single one alone, and of several together and one by one.
fn of_executors(bases: &Bases) -> (ExecutorStats, Vec<ExecutorStatus>) {
    let reports: Vec<_> = bases.all().iter().map(|app| (app, app.metrics.reported())).collect();
    if let [(app, one)] = &reports[..]
        && let [only] = &one[..]
    {
        let welcome = welcome_of(app, 0);
        return (executor_stats(only, welcome.as_deref(), app.metrics.expected_workers(0)), Vec::new());
    }
    let mut together = sums(&reports.iter().flat_map(|(_, each)| each.clone()).collect::<Vec<_>>());
    together.adapters.budget_bytes = budget_bytes(bases.all());
    let each = reports.iter().flat_map(|(app, each)| {
        let of_one = |(report, member): (&LastStats, &ExecutorHandle)| {
            let welcome = welcome_of(app, member.index());
            let workers = app.metrics.expected_workers(member.index());
            let mut status = executor(member, report, welcome.as_deref(), workers);
            if app.base.phase() == SleepPhase::Asleep {
                status.state = Some("asleep".to_owned());
            }
            status.base = bases.are_several().then(|| app.base.name().to_owned());
            status
        };
        each.iter().zip(app.executors.all()).map(of_one).collect::<Vec<_>>()
    });
    (together, each.collect())
}

fn welcome_of(app: &App, index: usize) -> Option<Arc<Welcome>> {
    let serving = app.serving().ok()?;
    let ready = serving.ready.iter().find(|ready| ready.index == index)?;
    Some(Arc::clone(&ready.welcome))
}

/// Reports where the registry lies, and how old this gateway's copy of it is.
fn registry(registry: &Registry) -> RegistryStatus {
    let shared = registry.freshness().map(|known| SharedRegistryStatus {
        address: known.address,
        reachable: known.fault.is_none(),
        age_ms: u64::try_from(known.age.as_millis()).unwrap_or(u64::MAX),
        error: known.fault,
    });
    let kind = if shared.is_some() { "postgres" } else { "sqlite" };
    RegistryStatus { kind: kind.to_owned(), shared }
}

/// Reports where adapter files lie, and how many bytes of them this host has cached.
fn store(registry: &Registry) -> StoreStatus {
    let shared = registry.bucket_status();
    let kind = if shared.is_some() { "s3" } else { "directory" };
    StoreStatus { kind: kind.to_owned(), shared }
}

/// Reports the stats of one executor.
fn executor_stats(report: &LastStats, welcome: Option<&Welcome>, expected_workers: u32) -> ExecutorStats {
    let stats = &report.stats;
    let mut sums = sums(std::slice::from_ref(report));
    sums.adapters.budget_bytes = welcome.map(|welcome| welcome.adapter_budget_bytes);
    ExecutorStats {
        memory: Some(placement_stats::memory(stats)),
        device: Some(placement_stats::device(stats, welcome)),
        cold_starts: Some(placement_stats::cold_starts(stats)),
        speculation: Some(placement_stats::speculation(stats)),
        workers: Some(placement_stats::workers(stats, expected_workers)),
        layers: Some(layer_stats::status(&stats.layers)),
        ..sums
    }
}

/// Reports one of several executors: its stats, and its state as the gateway sees it.
fn executor(
    member: &ExecutorHandle,
    report: &LastStats,
    welcome: Option<&Welcome>,
    expected_workers: u32,
) -> ExecutorStatus {
    let (state, connection, detail) = match member.state() {
        Executor::Ready(one) if member.is_drained() => ("drained", Some(one.epoch), None),
        Executor::Ready(one) => ("ready", Some(one.epoch), None),
        Executor::Starting { stage, percent } => ("loading", None, Some(loading(&stage, percent))),
        Executor::Lost { detail } => ("lost", None, Some(detail)),
        Executor::Refused { detail } => ("refused", None, Some(detail)),
    };
    let (sent, taken_over) = member.counts();
    ExecutorStatus {
        stats: executor_stats(report, welcome, expected_workers),
        name: member.name().to_owned(),
        state: Some(state.to_owned()),
        connection,
        detail,
        address: member.executor().far().map(|far| far.address().to_string()),
        drained: member.is_drained(),
        sequences: SequenceCounts { under_way: member.executor().load().held, sent, taken_over },
        base: None,
    }
}

/// Sums those stats of executors that can be added.
fn sums(reports: &[LastStats]) -> ExecutorStats {
    let sum = |figure: fn(&Stats) -> u64| reports.iter().map(|report| figure(&report.stats)).sum::<u64>();
    let rate = |figure: fn(&LastStats) -> f64| reports.iter().map(figure).sum::<f64>();
    ExecutorStats {
        requests: RequestCounts {
            running: sum(|stats| stats.running.into()),
            waiting: sum(|stats| stats.waiting.into()),
        },
        tokens_per_s: TokenRates {
            prompt: rate(|report| report.prompt_tokens_per_s),
            generated: rate(|report| report.generated_tokens_per_s),
        },
        kv_blocks: KvBlockCounts {
            total: sum(|stats| stats.kv_blocks_total.into()),
            used: sum(|stats| stats.kv_blocks_used.into()),
            cached: sum(|stats| stats.kv_blocks_cached.into()),
        },
        adapters: AdapterCounts {
            resident: reports.iter().map(|report| report.stats.adapters.len()).sum(),
            bytes: sum(|stats| stats.adapter_bytes),
            ..AdapterCounts::default()
        },
        ..ExecutorStats::default()
    }
}

/// Reports running training for the operator: fine-tuning jobs, and models that clients train step by step.
fn training(app: &App) -> TrainingStatus {
    let jobs = app.training.under_way().into_iter().map(|JobInProgress { job, tokens_per_s }| JobSummary {
        id: job.id,
        name: job.name,
        tenant: job.tenant,
        status: job.status.as_str().to_owned(),
        step: job.step,
        steps: job.plan.map(|plan| plan.steps),
        loss: job.loss,
        tokens_per_s,
        estimated_finish: job.estimated_finish,
    });
    let runs = app.runs.book.active_models().into_iter().map(|live| RunSummary {
        name: live.run,
        tenant: live.tenant.to_string(),
        status: if live.progress.has_trainer { "running" } else { "queued" }.to_owned(),
        step: live.progress.steps,
        loss_sum: live.progress.loss,
    });
    TrainingStatus {
        trains: app.runs.means.trainers.check().is_ok(),
        jobs: jobs.collect(),
        runs: runs.collect(),
    }
}

#[cfg(test)]
mod tests;

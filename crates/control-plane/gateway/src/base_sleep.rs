//! `GET /v1/bases`, `POST /v1/bases/{name}/sleep` and `/wake`: the bases, and their sleep by administrators.
//!
//! vLLM has these routes for its one model: `/sleep`, `/wake_up` and `/is_sleeping`.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep as pause};

use crate::{
    app::App,
    bases::{Bases, name_in_requests},
    caller::Caller,
    errors::ApiError,
    lifecycle::GatewayReadiness,
    served_base::{SleepPhase, StaysAwake},
};

/// How long a request for a sleep waits until the base is idle.
const IDLE_WAIT: Duration = Duration::from_secs(30);
/// How often it is checked whether the base is idle.
const IDLE_LOOK: Duration = Duration::from_millis(50);

/// Reaction of a request for a sleep while requests use the base.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum BusyMode {
    /// Waits until the base is idle.
    #[default]
    Wait,
    /// Fails at once.
    Refuse,
}

/// Query of a request for a sleep.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SleepQuery {
    #[serde(default)]
    mode: BusyMode,
}

/// Lists the bases with their states.
pub(crate) async fn list(State(bases): State<Arc<Bases>>) -> Json<Value> {
    let data: Vec<Value> = bases.all().iter().map(|app| describe(app)).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// Ends the executors of a base; a request for the base starts them again.
pub(crate) async fn sleep(
    State(bases): State<Arc<Bases>>,
    Path(name): Path<String>,
    Query(SleepQuery { mode }): Query<SleepQuery>,
) -> Result<Json<Value>, ApiError> {
    let app = bases.named(&name)?;
    let deadline = Instant::now() + IDLE_WAIT;
    loop {
        match bases.send_to_sleep(app) {
            Ok(()) => break,
            Err(StaysAwake::NotAwake) if app.base.phase() == SleepPhase::Asleep => break,
            Err(StaysAwake::InUse) if mode == BusyMode::Wait && Instant::now() < deadline => {
                pause(IDLE_LOOK).await;
            }
            Err(reason) => return Err(refused(app, reason)),
        }
    }
    tracing::info!(base = name, "an administrator let the base fall asleep");
    Ok(Json(describe(app)))
}

/// Starts the executors of a sleeping base, and answers when the base serves.
pub(crate) async fn wake(
    State(bases): State<Arc<Bases>>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let app = bases.named(&name)?;
    drop(bases.use_awake(app, &caller.tenant).await?);
    Ok(Json(describe(app)))
}

fn refused(app: &App, reason: StaysAwake) -> ApiError {
    let name = app.base.name();
    match reason {
        StaysAwake::Unsupervised => ApiError::not_implemented(
            "sleep_unsupported",
            format!(
                "the base '{name}' cannot sleep, because nobody would start its executors again; start the \
                 deployment with 'holobiont up', or stop the executors yourself"
            ),
        ),
        StaysAwake::InUse => ApiError::conflict(
            "base_in_use",
            format!("requests, training or split clients use the base '{name}'; wait until they end"),
        ),
        StaysAwake::NotAwake => ApiError::conflict(
            "base_not_ready",
            format!("the base '{name}' does not serve yet; wait until it does"),
        ),
    }
}

/// Describes a base and its sleep.
pub(crate) fn describe(app: &App) -> Value {
    let (base, stats) = (&app.base, app.base.stats());
    let state = match (&*app.status.borrow(), base.phase()) {
        (_, phase @ (SleepPhase::Asleep | SleepPhase::Waking)) => phase.name(),
        (GatewayReadiness::Ready(_), _) => "ready",
        (GatewayReadiness::Starting { .. }, _) => "loading",
        (GatewayReadiness::Lost { .. }, _) => "lost",
        (GatewayReadiness::Asleep(_), _) => "asleep",
        (GatewayReadiness::Closing, _) => "stopping",
    };
    json!({
        "name": base.name(),
        "model": name_in_requests(app),
        "state": state,
        "is_sleeping": base.phase() == SleepPhase::Asleep,
        "can_sleep": base.can_sleep(),
        "sleep_after_s": base.sleeps_after().map(|after| after.as_secs()),
        "host_bytes": (base.host_bytes() > 0).then(|| base.host_bytes()),
        "adapters": app.registry.len(),
        "waiting": app.admission.queued(),
        "sleeps": stats.sleeps,
        "wakes": stats.wakes,
        "mean_wake_s": (stats.wakes > 0).then(|| stats.wake_s / stats.wakes as f64),
    })
}

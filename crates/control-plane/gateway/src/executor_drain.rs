//! `POST /v1/executors/{name}/drain` and `/undrain`: keep new requests from an executor, to replace it.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State},
};
use serde_json::{Value, json};

use crate::{app::App, errors::ApiError, executors::ExecutorHandle};

/// Keeps new requests from an executor, and answers at once. Running requests end there, or move to another
/// executor when it stops.
pub(crate) async fn drain(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let member = find(&app, &name)?;
    let others = app.executors.all().iter().filter(|other| other.index() != member.index());
    if !others.into_iter().any(|other| other.is_open()) {
        let message =
            format!("no other executor could serve the requests of '{name}'; keep it, or undrain another");
        return Err(ApiError::conflict("last_executor", message));
    }
    member.drain();
    tracing::info!(executor = name, "executor drained: it gets no new requests");
    Ok(answer(member))
}

/// Lets an executor receive requests again.
pub(crate) async fn undrain(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let member = find(&app, &name)?;
    member.undrain();
    tracing::info!(executor = name, "executor undrained: it gets new requests again");
    Ok(answer(member))
}

fn find<'a>(app: &'a App, name: &str) -> Result<&'a ExecutorHandle, ApiError> {
    let names = || app.executors.all().iter().map(ExecutorHandle::name).collect::<Vec<_>>().join(", ");
    let missing =
        || ApiError::not_found(format!("there is no executor '{name}'; the executors are {}", names()));
    app.executors.named(name).ok_or_else(missing)
}

fn answer(member: &ExecutorHandle) -> Json<Value> {
    Json(json!({
        "name": member.name(), "drained": member.is_drained(),
        "sequences_under_way": member.executor().load().held,
    }))
}

//! `GET /v1/load`: the report ([`control_protocol::fleet`]) that endpoint pickers request many times per
//! second.

use std::sync::Arc;

use axum::{
    Json,
    extract::{RawQuery, State},
};
use control_protocol::fleet::{GatewayReport, GatewayState as Host, KnownTags, ReportedExecutor, Tagged};

use crate::{adapters::ListedAdapters, app::App, errors::ApiError, executors::ExecutorHandle};

/// Reports the load, and those adapter lists that the caller does not have yet.
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    RawQuery(query): RawQuery,
) -> Result<Json<GatewayReport>, ApiError> {
    let have = query.as_deref().unwrap_or_default().parse::<KnownTags>().map_err(|_| {
        ApiError::bad_request("invalid_value", "the query of /v1/load is 'registered=TAG&resident=TAG'")
    })?;
    Ok(Json(report(&app, have)))
}

fn report(app: &App, have: KnownTags) -> GatewayReport {
    // A request wakes a sleeping base, so its host counts as ready.
    let (serving, listed) = (app.last_serving().ok(), app.listing.now(&app.registry));
    let state = match &serving {
        _ if app.is_draining() => Host::Stopping,
        Some(_) => Host::Ready,
        None => Host::Unready,
    };
    GatewayReport {
        state,
        instance: app.lifetime.instance,
        base: serving.map_or_else(String::new, |serving| serving.base_name.clone()),
        answer_tokens: app.executors.answer_tokens(),
        queued: app.admission.queued() as u64,
        executors: app.executors.all().iter().map(executor).collect(),
        registered: listed.registered.unless_known(have.registered),
        resident: Tagged::of(resident(app, &listed), have.resident),
    }
}

fn executor(member: &ExecutorHandle) -> ReportedExecutor {
    let (books, load) = (member.books().loads(), member.executor().load());
    ReportedExecutor {
        open: member.is_open() && load.held < load.limit,
        places: load.places as u64,
        running: books.running.into(),
        waiting: books.waiting.into(),
        promised_tpot_us: books.promised_tpot_us,
        timings: member.books().seen().map(Into::into),
    }
}

fn resident(app: &App, listed: &ListedAdapters) -> Vec<Vec<String>> {
    let at = |member: &ExecutorHandle| listed.resident(&app.registry.held_at(member.index()));
    app.executors.all().iter().map(at).collect()
}

//! `GET /v1/load`: what the gateway tells whoever chooses among hosts ([`fleet_protocol`]), many times a second.

use std::sync::Arc;

use axum::{
    Json,
    extract::{RawQuery, State},
};
use fleet_protocol::{Adapter, Executor, Have, Report, State as Host, Tagged};

use crate::{
    adapters::{Entry, Registry},
    app::App,
    errors::ApiError,
    executors::Member,
};

/// What there is to do, and what of adapters the caller does not have.
pub(crate) async fn load(
    State(app): State<Arc<App>>,
    RawQuery(query): RawQuery,
) -> Result<Json<Report>, ApiError> {
    let have = query.as_deref().unwrap_or_default().parse::<Have>().map_err(|_| {
        ApiError::bad_request("invalid_value", "the query of /v1/load is 'registered=TAG&resident=TAG'")
    })?;
    Ok(Json(report(&app, have)))
}

fn report(app: &App, have: Have) -> Report {
    let serving = app.serving().ok();
    let state = match &serving {
        _ if app.is_draining() => Host::Stopping,
        Some(_) => Host::Ready,
        None => Host::Unready,
    };
    Report {
        state,
        instance: app.instance,
        base: serving.map_or_else(String::new, |serving| serving.base_name.clone()),
        answer_tokens: app.executors.answer_tokens(),
        queued: app.turns.queued() as u64,
        executors: app.executors.all().iter().map(executor).collect(),
        registered: Tagged::of(registered(&app.registry), have.registered),
        resident: Tagged::of(resident(app), have.resident),
    }
}

fn executor(member: &Member) -> Executor {
    let (books, load) = (member.books().loads(), member.executor().load());
    Executor {
        open: member.is_open() && load.held < load.limit,
        places: load.places as u64,
        running: books.running.into(),
        waiting: books.waiting.into(),
        promised_tpot_us: books.promised_tpot_us,
        timings: member.books().seen().map(Into::into),
    }
}

/// Whether it answers requests.
fn answers(entry: &Entry) -> bool {
    entry.record.draft_layers == 0 && entry.fault().is_none()
}

fn registered(registry: &Registry) -> Vec<Adapter> {
    let entries = registry.entries();
    let answering = entries.values().filter(|entry| answers(entry));
    let adapter = |entry: &Arc<Entry>| Adapter {
        name: entry.record.name.clone(),
        rank: entry.record.rank.into(),
        bytes: entry.record.bytes,
    };
    answering.map(adapter).collect()
}

fn resident(app: &App) -> Vec<Vec<String>> {
    let entries = app.registry.entries();
    let at = |member: &Member| {
        let there = entries.values().filter(|entry| app.registry.is_at(entry.id(), member.index()));
        there.map(|entry| entry.record.name.clone()).collect()
    };
    app.executors.all().iter().map(at).collect()
}

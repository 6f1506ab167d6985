//! `GET /v1/load`: what the gateway tells whoever chooses among hosts ([`fleet_protocol`]), many times a second.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::{
    Json,
    extract::{RawQuery, State},
};
use fleet_protocol::{Adapter, Executor, Have, Report, State as Host, Tagged, beginning_of};
use ids::AdapterId;

use crate::{
    adapters::{Entry, Registry, Table},
    app::App,
    errors::ApiError,
    executors::Member,
    lock::lock,
};

/// After so long it is looked again which adapters can be used.
const LOOK: Duration = Duration::from_secs(1);

/// Which adapters there are, put together once for all who ask: thousands of them do not change ten times a second.
#[derive(Debug, Default)]
pub(crate) struct Listing(Mutex<Option<Arc<Listed>>>);

#[derive(Debug)]
struct Listed {
    table: Arc<Table>,
    at: Instant,
    registered: Tagged<Vec<Adapter>>,
    /// What is in an executor, by the names it has.
    names: HashMap<AdapterId, Vec<String>>,
}

impl Listing {
    fn now(&self, registry: &Registry) -> Arc<Listed> {
        let mut listed = lock(&self.0);
        let table = registry.entries();
        let is_true = |old: &&Arc<Listed>| Arc::ptr_eq(&old.table, &table) && old.at.elapsed() < LOOK;
        if let Some(old) = listed.as_ref().filter(is_true) {
            return Arc::clone(old);
        }
        let now = Arc::new(Listed::of(table));
        *listed = Some(Arc::clone(&now));
        now
    }
}

impl Listed {
    fn of(table: Arc<Table>) -> Self {
        let registered = table.values().filter(|entry| answers(entry)).map(|entry| adapter(entry)).collect();
        let mut names: HashMap<_, Vec<_>> = HashMap::with_capacity(table.len());
        for (name, entry) in table.iter() {
            names.entry(entry.id()).or_default().push(name.clone());
        }
        Self { registered: Tagged::of(registered, None), names, at: Instant::now(), table }
    }

    /// Names of what is in an executor, in their order.
    fn resident(&self, ids: &[AdapterId]) -> Vec<String> {
        let mut names: Vec<_> = ids.iter().filter_map(|id| self.names.get(id)).flatten().cloned().collect();
        names.sort_unstable();
        names
    }
}

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
    let (serving, listed) = (app.serving().ok(), app.listing.now(&app.registry));
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
        registered: listed.registered.told(have.registered),
        resident: Tagged::of(resident(app, &listed), have.resident),
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

fn adapter(entry: &Entry) -> Adapter {
    Adapter {
        name: entry.record.name.clone(),
        rank: entry.record.rank.into(),
        bytes: entry.record.bytes,
        generation: beginning_of(&entry.record.generation.to_string()).unwrap_or_default(),
    }
}

fn resident(app: &App, listed: &Listed) -> Vec<Vec<String>> {
    let at = |member: &Member| listed.resident(&app.registry.held_at(member.index()));
    app.executors.all().iter().map(at).collect()
}

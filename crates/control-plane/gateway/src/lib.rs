//! The gateway process: tokenizes text and serves OpenAI's HTTP API in front of base-executors.
//!
//! # Layout
//!
//! - [`config`] checks the arguments; [`server`] starts, serves and shuts down.
//! - [`connections`] limits connections and the cost of each. [`tenant_memory`] counts bytes that requests
//!   keep, by tenant. [`tenant_slots`] limits how many slow operations of a tenant run at once.
//! - [`routes`] is the one table of routes and their required roles. [`auth`], [`keys`] and [`limits`]
//!   enforce it.
//! - `origin` refuses foreign web pages; [`request`] names and logs each request; `body` reads its body,
//!   and [`body_workers`] parse long bodies.
//! - [`health`] answers probes, [`pages`] browsers, [`systemd`] the service manager, `fleet` the endpoint
//!   picker.
//! - [`openai`] checks requests and formats answers. [`app`] is the state that all handlers share.
//!   [`errors`] defines the error response.
//! - [`text`] has tokenizer and chat template. [`grammars`] checks that a grammar can be compiled.
//! - [`admission_queue`] decides whose request goes next, by [`service_classes`]. [`queue_delay`] measures
//!   how long requests of one tenant wait for a first token. [`slo_status`] reports which targets of a
//!   class are met.
//! - [`bases`] are all bases, each with an [`app::App`]; `base_choice` finds the base of a request, and
//!   [`served_base`] knows whether a base sleeps. `base_sleep` has the routes of administrators.
//! - [`executor`] is a connection that carries token ids; [`executors`] are all connections. [`lifecycle`]
//!   decides when they can be used, [`routing`] which of them gets a request, `executor_drain` which gets
//!   none.
//! - [`adapters`] has names, versions and files of adapters; [`placement_stats`] reports where adapters are
//!   computed.
//! - [`ollama`] is Ollama's HTTP API, and [`anthropic`] is Anthropic's. `error_format` gives errors the
//!   format of the request's API (`http_api`). [`response_store`] keeps responses that a client may continue.
//! - [`tinker`] is Tinker's HTTP API, for adapters that clients train step by step in
//!   [`training_sessions`].
//! - [`batches`] has files of requests that are answered in the background, by the handlers of the online
//!   routes (`batch_lines`).
//! - [`training`] has training files and fine-tuning jobs; [`trainer_client`] requests trainer processes.
//! - `kv_events` publishes which prefixes are cached, for routers of other projects.
//! - [`layer_stats`] reports the usage of the base layers by split clients.
//! - [`metrics`] has metrics for Prometheus; [`telemetry`] has the log, the record of each request, and
//!   traces.
//! - [`maintenance`] checks, cleans and copies registries and buckets.
//! - Modules below all others: [`caller`] (authenticated sender), [`usage`] (tokens of a request),
//!   [`random`], `clock`, `thread` (threads for slow work), `lock`, and `slow_peer_timeout` (timeouts of slow
//!   peers).
//!
//! # Principles
//!
//! - Tensors never enter this process: text comes in, token ids go out, token ids come back, text goes out.
//! - An option that cannot be honoured is refused with an error that names it; nothing degrades silently.
//! - A stream ends in finish reasons and `[DONE]`, or in one error event.
//! - A request whose client disconnects is cancelled. Work that an executor loses is repeated or ends in
//!   one typed error.
//! - Everything that can grow has a limit, and reaching a limit is a regular answer.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only this program and its tests use the items")]

pub mod adapters;
pub mod admission_queue;
pub mod anthropic;
pub mod app;
pub(crate) mod auth;
mod base_choice;
mod base_sleep;
pub mod bases;
mod batch_lines;
pub mod batches;
mod body;
pub mod body_workers;
pub mod caller;
mod clock;
pub mod config;
pub(crate) mod connections;
mod error_format;
pub mod errors;
pub mod executor;
mod executor_drain;
pub mod executors;
mod fleet;
pub mod grammars;
pub(crate) mod health;
mod http_api;
pub mod keys;
mod kv_events;
pub(crate) mod layer_stats;
pub mod lifecycle;
pub mod limits;
mod lock;
pub mod maintenance;
pub mod metrics;
pub mod ollama;
pub mod openai;
#[cfg(test)]
mod openapi_test;
mod origin;
pub mod pages;
pub(crate) mod placement_stats;
pub mod queue_delay;
pub mod random;
pub(crate) mod request;
pub mod response_store;
pub mod routes;
pub(crate) mod routing;
pub mod served_base;
pub mod server;
pub mod service_classes;
pub(crate) mod slo_status;
mod slow_peer_timeout;
pub mod systemd;
pub mod telemetry;
pub mod tenant_memory;
pub(crate) mod tenant_slots;
pub mod text;
mod thread;
pub mod tinker;
pub mod trainer_client;
pub mod training;
pub mod training_sessions;
pub(crate) mod usage;

pub use self::clock::seconds_since_1970;

/// Failpoints of start, request handling and shutdown (crate `failpoint`).
const FRONT_DOOR_FAILPOINTS: &[&str] = &[
    "gateway.accepted",
    "gateway.before_start",
    "gateway.first_step",
    "gateway.ready",
    "gateway.drain_begun",
    "gateway.drain_cut",
];

/// Returns the names of all failpoints of this process.
#[must_use]
pub fn failpoints() -> Vec<&'static str> {
    [
        FRONT_DOOR_FAILPOINTS,
        adapters::FAILPOINTS,
        training::FAILPOINTS,
        bases::FAILPOINTS,
        batches::FAILPOINTS,
        openai::sse::FAILPOINTS,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    /// Collects every failpoint that the source files under `directory` hit.
    fn hit_in(directory: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                hit_in(&path, found);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for call in ["hit", "pass"] {
                let start = format!("failpoint::{call}(\"");
                let names = text.split(&start).skip(1).filter_map(|rest| rest.split('"').next());
                found.extend(names.filter(|name| name.starts_with("gateway.")).map(str::to_owned));
            }
        }
    }

    #[test]
    fn every_failpoint_that_is_hit_is_in_the_table_and_every_one_in_the_table_is_hit() {
        let mut hit = BTreeSet::new();
        hit_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut hit);
        let table: BTreeSet<String> = super::failpoints().into_iter().map(str::to_owned).collect();
        assert_eq!(hit, table);
    }
}

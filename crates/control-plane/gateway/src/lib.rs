//! The process that owns text: OpenAI's HTTP API in front of a base-executor.
//!
//! # Layout
//!
//! - [`config`], [`server`]: `config` checks the arguments; `server` starts, serves and shuts down.
//! - [`connections`] limits connections and what each may cost. [`tenant_memory`] counts bytes that requests keep, by tenant.
//!   [`tenant_slots`] limits how many slow operations of a tenant run at once.
//! - [`routes`] is the one table of routes and of who may use them. [`auth`], [`keys`] and [`limits`] enforce it; `origin`
//!   keeps other people's web pages out; [`request`] names and logs each request; `body` reads its body, and
//!   [`body_workers`] parse long ones.
//! - [`health`] answers probes, [`pages`] browsers, [`systemd`] the service manager, `fleet` the endpoint picker.
//! - [`openai`] checks requests and shapes answers. [`app`] is what all handlers share. [`errors`] is the shape of a failure.
//! - [`text`] has tokenizer and chat template. [`grammars`] checks that a grammar can be compiled.
//! - [`admission_queue`] decides whose request goes next, by [`service_classes`]. [`queue_delay`] measures how long
//!   one tenant's requests wait for a first token. [`slo_status`] reports which targets of a class are met.
//! - [`executor`] is a connection over which token ids travel; [`executors`] are all of them. [`lifecycle`] says when they can
//!   be used, [`routing`] which of them gets a request, `executor_drain` which gets none.
//! - [`adapters`] has names, versions and files of adapters; [`placement_stats`] says where adapters are computed.
//! - [`ollama`] is Ollama's HTTP API. [`response_store`] keeps responses that a client may continue.
//! - [`tinker`] is Tinker's HTTP API, for adapters that clients train step by step in [`training_sessions`].
//! - [`training`] has training files and fine-tuning jobs; [`trainer_client`] asks for processes that train.
//! - [`layer_stats`] reports what split clients have used of the base layers.
//! - [`metrics`] has figures for Prometheus; [`telemetry`] has the log, the record of each request, and traces.
//! - [`maintenance`] changes a registry while no gateway serves it.
//! - Below all of them: [`caller`] (who asks), [`usage`] (tokens of a request), [`random`], `clock`, `thread` (threads for slow
//!   work), `lock`, and `pace` (how long a slow peer is waited for).
//!
//! # Principles
//!
//! - Tensors never come here: text in, token ids out, token ids back, text out.
//! - Refuse by name, never degrade in silence: an option not honoured is an error that names it.
//! - A stream ends in finish reasons and `[DONE]`, or in one error event.
//! - Whoever goes away is cancelled; whatever the executor loses is redone or ends in one typed error.
//! - Everything that can grow has a limit, and a full limit is an answer.

#![forbid(unsafe_code)]

pub mod adapters;
pub mod admission_queue;
pub mod app;
pub mod auth;
mod body;
pub mod body_workers;
pub mod caller;
mod clock;
pub mod config;
pub mod connections;
pub mod errors;
pub mod executor;
mod executor_drain;
pub mod executors;
mod fleet;
pub mod grammars;
pub mod health;
pub mod keys;
pub mod layer_stats;
pub mod lifecycle;
pub mod limits;
mod lock;
pub mod maintenance;
pub mod metrics;
pub mod ollama;
pub mod openai;
mod origin;
mod pace;
pub mod pages;
pub mod placement_stats;
pub mod queue_delay;
pub mod random;
pub mod request;
pub mod response_store;
pub mod routes;
pub mod routing;
pub mod server;
pub mod service_classes;
pub mod slo_status;
pub mod systemd;
pub mod telemetry;
pub mod tenant_memory;
pub mod tenant_slots;
pub mod text;
mod thread;
pub mod tinker;
pub mod trainer_client;
pub mod training;
pub mod training_sessions;
pub mod usage;

pub use self::clock::seconds_since_1970;

/// The named places of this process where a test may make it die, stop or wait (crate `failpoint`).
const FRONT_DOOR_FAILPOINTS: &[&str] = &[
    "gateway.accepted",
    "gateway.before_start",
    "gateway.first_step",
    "gateway.ready",
    "gateway.drain_begun",
    "gateway.drain_cut",
];

/// Every failpoint of this process.
#[must_use]
pub fn failpoints() -> Vec<&'static str> {
    [FRONT_DOOR_FAILPOINTS, adapters::FAILPOINTS, training::FAILPOINTS, openai::sse::FAILPOINTS].concat()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    /// Every failpoint that the source files under `directory` hit.
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

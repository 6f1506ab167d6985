//! An endpoint picker of the Gateway API inference extension: chooses hosts for Envoy (`ext_proc`) or
//! compatible gateways.
//!
//! # Layout
//!
//! - [`config`]: checked arguments. [`server`]: start, service and end of the process.
//! - [`listener`]: routes of the port. [`tls`]: the port's certificate. [`messages`]: Envoy's wire messages.
//! - [`exchange`]: one HTTP request, part by part. [`request_parser`]: the model and prompt of a request.
//! - [`picker`]: state that all requests share. [`fleet`]: the hosts and the choice. [`scrape`]: reports of
//!   hosts.
//! - [`metrics`]: counters for Prometheus.
//!
//! # Principles
//!
//! - `scheduling::routing` makes the choice, as on one host and in the simulator.
//! - No state outlives the process, and pickers do not know each other: a second one is a hot standby.
//! - A host without a recent report is no candidate. Reports are bounded in size and time.
//! - Request bodies are read and never changed; responses are not read.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only this program and its tests use the items")]

pub mod config;
pub mod exchange;
pub mod fleet;
pub(crate) mod listener;
pub mod messages;
pub mod metrics;
pub mod picker;
pub mod request_parser;
pub mod scrape;
pub mod server;
pub mod tls;

//! The process that says which host a request goes to: an endpoint picker of the Gateway API inference extension, asked by
//! Envoy (`ext_proc`) or any gateway that speaks that protocol.
//!
//! # Layout
//!
//! - [`config`], [`server`]: arguments checked, everything put together, served and ended.
//! - [`listener`]: what is answered on the port, [`tls`]: its certificate; [`messages`]: what Envoy says and is told, on the wire.
//! - [`exchange`]: one HTTP request, as Envoy tells of it part by part; [`request_parser`]: what it asks for.
//! - [`picker`]: what all of them share; [`fleet`]: the hosts there are, and the choice; [`scrape`]: asks them what they do.
//! - [`metrics`]: what is counted.
//!
//! # Principles
//!
//! - The decision is `scheduling::routing`'s, as on one host and in the simulator.
//! - No state outlives the process, and two pickers do not know each other: the second is a hot standby.
//! - A host that was not heard of lately is no candidate; what a host says is bounded in size and time.
//! - Bodies are read and never changed, and answers are not looked at.

#![forbid(unsafe_code)]

pub mod config;
pub mod exchange;
pub mod fleet;
pub mod listener;
pub mod messages;
pub mod metrics;
pub mod picker;
pub mod request_parser;
pub mod scrape;
pub mod server;
pub mod tls;

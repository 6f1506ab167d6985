//! The gateway's observability: metrics, log, traces, and the ends of streams.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(dead_code, reason = "the harness is shared with the tests of HTTP, which use other parts of it")]

#[path = "../http/client.rs"]
mod client;
#[path = "../http/fake_executor.rs"]
mod fake_executor;
#[path = "../http/harness.rs"]
mod harness;
#[path = "../http/text.rs"]
mod text;

mod endings;
mod log;
mod names;
mod parser;
mod placement;
mod traces;
mod values;

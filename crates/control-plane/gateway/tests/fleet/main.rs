//! Registries of several gateways over one real PostgreSQL and one real S3 server, before executors that hold
//! few adapters: changes reach all gateways, also around failures of the servers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../registry/fake_executor.rs"]
#[allow(dead_code, reason = "the tests of the registry use all of it")]
mod fake_executor;
mod support;

mod encryption;
mod files;
mod jobs;
mod names;
mod outages;
mod publishing;
mod stores;
mod tinker;

use testkit::servers;

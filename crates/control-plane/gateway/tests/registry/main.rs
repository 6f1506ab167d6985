//! The adapter registry by itself, in front of an executor that holds few adapters: what is durable, what is
//! resident, what hostile paths get.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod child;
mod fake_executor;
mod support;

mod crashes;
mod disk;
mod durability;
mod hostile_paths;
mod residency;
mod tenants;

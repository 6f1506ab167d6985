//! The adapter registry alone, before an executor that holds few adapters: durability, residency and hostile
//! paths.

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

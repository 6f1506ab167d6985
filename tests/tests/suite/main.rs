//! Deployments of the real programs, started as users start them, with and without faults.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapters;
mod bad_input;
mod batches;
mod capacity;
mod churn;
mod cold_starts;
mod commands_in_docs;
mod exact_faults;
mod executors;
mod fleet;
mod fleet_clients;
mod fleet_faults;
mod history;
mod jobs;
mod kills;
mod lifecycle;
mod overload;
mod provisional;
mod remote_executors;
mod same_bits;
mod same_generation;
mod scoring;
mod shared_jobs;
mod shared_registry;
mod soak;
mod speculation;
mod split;
mod split_faults;
mod split_hostile;
mod stops;
mod structured;
mod tenants;
mod tinker;
mod tune;
mod workers;

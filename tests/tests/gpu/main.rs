//! Deployments on a GPU, or on the driver's stand-in: the tests that `scripts/gpu-pack` packs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod faults;
mod memory;
mod rented;

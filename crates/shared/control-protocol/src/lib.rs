//! Messages of the control plane that two programs share, as JSON.
//!
//! # Layout
//!
//! - [`fleet`]: the report of a gateway to endpoint pickers (`GET /v1/load`).
//! - [`status`]: the report of a gateway to operators (`GET /v1/status`).
//! - [`training`]: requests to the trainer service, and events of trainers.

#![forbid(unsafe_code)]

pub mod fleet;
pub mod status;
pub mod training;

//! Messages of the control plane that two programs share, as JSON.
//!
//! # Layout
//!
//! - [`fleet`]: the report of a gateway to endpoint pickers (`GET /v1/load`).
//! - [`training`]: requests to the trainer service, and events of trainers.

#![forbid(unsafe_code)]

pub mod fleet;
pub mod training;

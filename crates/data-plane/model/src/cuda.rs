//! The pass on an NVIDIA GPU.
//!
//! # Layout
//!
//! - [`model`]: the whole, as an engine runs it. `weights`: from files to the device. `modular`: what is promised of these.
//! - `device`: rows on the device ([`Device`](crate::forward::Device)). `layers`: linear layers, and the calls that join
//!   them. `kv`: keys and values. `graph_cache`: decode steps that are replayed. `experts`: which rows go to which expert.
//! - `deltas`, `plan` and `direct`: adapters. [`copies`]: on their way here. [`assist`]: who sums what is not here yet.
//!
//! # Principles
//!
//! - A pass enqueues everything on one stream and waits once, for its logits. Only rows of split clients, which come from
//!   the host and go back there, are waited for in between, and what routers say, which decides what is enqueued.
//! - What changes from step to step lies in tables on the device, uploaded before the pass: a step of the same shape is
//!   the same sequence of launches, and is replayed as a whole.

pub mod assist;
pub mod copies;
mod deltas;
mod device;
mod direct;
mod experts;
mod graph_cache;
mod kv;
mod layers;
pub mod model;
mod modular;
mod plan;
mod weights;

pub use self::{
    device::CudaDevice,
    model::{CudaModel, CudaModelError, CudaOptions, Graphs},
    weights::CudaWeights,
};

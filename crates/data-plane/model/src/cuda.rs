//! The forward pass on an NVIDIA GPU.
//!
//! # Layout
//!
//! - [`model`]: the whole model, as an engine runs it.
//! - `weights`: uploads weights from files to the device.
//! - `modular`: commitments of the modular path's weights.
//! - `device`: rows on the device ([`Device`](crate::forward::Device)).
//! - `layers`: linear layers, and the calls that join them.
//! - `kv`: the KV cache on the device.
//! - `graph_cache`: CUDA graphs of decode steps.
//! - `experts`: sorts rows by expert.
//! - `deltas`, `plan` and `direct`: adapter deltas.
//! - [`copies`]: copies of adapters to the device.
//! - [`assist`]: partial sums from the CPU for ranks that the device lacks.
//!
//! # Principles
//!
//! - A pass enqueues all work on one stream and waits once, for its logits. Only rows of split clients, which
//!   pass through the host, and router outputs, which decide the launches, cause further waits.
//! - Values that change from step to step lie in device tables that are uploaded before the pass. Steps of
//!   the same shape are thus the same launches, which a CUDA graph replays.

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

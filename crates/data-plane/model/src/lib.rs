//! Models: weights, adapter files, sampling, and the one forward pass.
//!
//! # Layout, from the bottom up
//!
//! - [`shape`]: configurations, the tensors they need, and the identity of a base.
//! - [`sampling`]: the choice of the next token.
//! - [`sources`]: weights from files, or from a seed.
//! - [`adapter`]: adapters as their files hold them.
//! - [`weight_stream_stats`]: costs of weights that are streamed from a disk.
//! - [`forward`]: the forward pass, over traits that the other modules implement.
//! - [`cpu`]: the CPU as a device of the pass.
//! - [`weights`]: weights packed for the CPU.
//! - [`linear_sites`]: single linear groups, evaluated for split clients.
//! - [`site_model`]: a base that serves only its linear layers.
//! - [`deltas`]: adapter deltas in the kernels' formats, on the host and on the device.
//! - [`precision`]: the arithmetic of linear layers.
//! - [`client_weights`]: the weights that split clients hold.
//! - [`backward`]: the reverse pass that trains adapters.
//! - [`resident`]: a whole model in one process.
//! - [`cuda`]: a whole model on a GPU.
#![forbid(unsafe_code)]

pub mod adapter;
pub mod backward;
pub mod client_weights;
pub mod cpu;
pub mod cuda;
pub mod deltas;
pub mod forward;
pub mod linear_sites;
pub mod precision;
pub mod resident;
pub mod sampling;
pub mod shape;
pub mod site_model;
pub mod sources;
pub mod weight_stream_stats;
pub mod weights;

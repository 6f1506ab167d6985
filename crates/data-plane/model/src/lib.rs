//! What a model is: its weights, adapter files, sampling, and the one forward pass.
//!
//! # Layout, from the bottom up
//!
//! - [`shape`]: a model's numbers, the tensors they call for, and what tells it from others. [`sampling`]: the next token.
//! - [`sources`]: weights as files hold them, or as a number makes them. [`adapter`]: adapters as their files hold them.
//! - [`weight_stream_stats`]: what it costs that weights come from a disk.
//! - [`forward`]: the pass, over the traits that all else implements. [`cpu`]: one of its devices.
//! - [`weights`]: packed for the CPU. [`linear_sites`]: single linear layers, lent to others; [`site_model`]: a base of nothing else.
//! - [`deltas`]: what adapters change, in the forms the kernels take, on the host and on the device.
//! - [`precision`]: how finely activations are rounded.
//! - [`client_weights`]: all but the linear layers, for those who rent them.
//! - [`backward`]: the reverse pass, for adapters that learn.
//! - [`resident`]: all of a model in one process; [`cuda`]: the same on a GPU.
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

//! Shape of a model: architectures as data for one forward pass.
//!
//! # Layout
//!
//! - [`config`]: sizes and traits of a model.
//! - [`experts`]: sizes of mixtures of experts.
//! - [`layout`]: the required tensors and their shapes.
//! - [`rope`]: rotary frequencies.
//! - [`source`]: the trait that supplies weights of a shape.
//! - [`identity`]: hashes that tell one base from another.

pub mod config;
pub mod experts;
pub mod identity;
pub mod layout;
pub mod rope;
pub mod source;

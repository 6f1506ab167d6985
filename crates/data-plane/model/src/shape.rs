//! A model's shape: architectures as data over one forward pass.
//!
//! # Layout
//!
//! - [`config`]: the numbers. [`experts`]: those of mixtures. [`layout`]: which tensors they call for, and how large. [`rope`]: rotary
//!   frequencies.
//! - [`source`]: the trait through which weights of that shape come. [`identity`]: what tells one base from another.

pub mod config;
pub mod experts;
pub mod identity;
pub mod layout;
pub mod rope;
pub mod source;

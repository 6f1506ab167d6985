//! Where weights come from: [`WeightSource`](crate::shape::source::WeightSource) over every kind of file, and over none.
//!
//! # Layout
//!
//! - [`open`]: whatever the files are; [`identity`]: which base they are. [`gguf`]; [`safetensors`], with `config.json` ([`hf_config`]) and names ([`hf_names`]).
//! - `family`: the families that are read; `fused`: those whose linear layers share tensors; `gemma`, `families`: what all files of these leave unsaid. `norms`: weights that are not stored as they are used. `quantization`: how
//!   linear layers were quantized, as `config.json` says it.
//! - [`random`]: weights that nobody trained. [`dequantized`]: those of another source, exact.

pub mod dequantized;
mod families;
mod family;
pub(crate) mod fused;
mod gemma;
pub mod gguf;
pub mod hf_config;
pub mod hf_names;
pub mod identity;
mod norms;
pub mod open;
mod quantization;
pub mod random;
pub mod safetensors;

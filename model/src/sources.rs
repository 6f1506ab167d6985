//! Where weights come from: [`WeightSource`](crate::shape::source::WeightSource) over every kind of file, and over none.
//!
//! # Layout
//!
//! - [`open`]: whatever the files are; [`identity`]: which base they are. [`gguf`]; [`safetensors`], with `config.json` ([`hf_config`]) and names ([`hf_names`]).
//! - `gemma`: what all files of that family leave unsaid. `quantization`: how linear layers were quantized, as `config.json` says it.
//! - [`random`]: weights that nobody trained. [`dequantized`]: those of another source, exact.

pub mod dequantized;
mod gemma;
pub mod gguf;
pub mod hf_config;
pub mod hf_names;
pub mod identity;
pub mod open;
mod quantization;
pub mod random;
pub mod safetensors;

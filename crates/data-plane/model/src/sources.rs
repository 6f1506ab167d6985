//! Sources of weights: [`WeightSource`](crate::shape::source::WeightSource) for all formats and for seeds.
//!
//! # Layout
//!
//! - [`open`]: opens model files of any supported format.
//! - [`identity`]: computes the identity of a base while its files are read.
//! - [`gguf`]: weights of GGUF files.
//! - [`safetensors`]: weights of safetensors directories.
//! - [`hf_config`]: the configuration in `config.json`.
//! - [`hf_names`]: tensor names of the Hugging Face layout.
//! - `family`: the supported model families.
//! - `fused`: families whose linear layers share tensors.
//! - `gemma` and `families`: facts that the files of these families leave unsaid.
//! - `norms`: norm weights that are stored in another form than they are used.
//! - `quantization`: the quantization of linear layers in `config.json`.
//! - [`random`]: untrained weights from a seed.
//! - [`dequantized`]: the weights of another source, dequantized exactly.

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

//! What a model is: weight files, tokenizer, chat template, adapter files, sampling, and the one forward pass.
//!
//! # Layout
//!
//! - [`location`], [`open`]: where a model's files are; [`gguf`], [`safetensors_file`]: what is in them; [`gguf_source`],
//!   [`safetensors_source`], [`random_source`], [`dequantized`]: the [`source`] of weights they become, or one without files.
//! - [`config`], [`layout`], [`identity`]: a model's shape, the tensors it calls for, and what tells it from others.
//! - [`tokenizer`], [`detokenize`], [`chat_template`], [`stop`]: text; [`sampling`], [`generation_defaults`]: the next token.
//! - [`adapter`], [`generation`]: adapters as their files hold them, and their identity; [`prepared_adapter`],
//!   [`device_copy`]: as the kernels take them, on the host and on the device.
//! - [`forward`]: the pass; [`cpu`], [`cuda`]: its devices; [`weights`], [`embedding`], [`rope`], [`paged_kv`],
//!   [`batch_deltas`], [`assist`]: its parts; [`resident`]: all of it in one process.
//! - [`sites`], [`site_weights`], [`site_model`]: single linear layers, lent to others; [`skeleton`], [`client_base`]: what
//!   these hold of a model themselves.
#![forbid(unsafe_code)]

pub mod adapter;
mod adapter_rows;
pub mod assist;
pub mod batch_deltas;
pub mod chat_template;
pub mod client_base;
pub mod config;
pub mod cpu;
pub mod cuda;
pub mod dequantized;
pub mod detokenize;
pub mod device_copy;
pub mod embedding;
pub mod forward;
pub mod generation;
pub mod generation_defaults;
pub mod gguf;
pub mod gguf_source;
pub mod hf_config;
mod hf_names;
pub mod identity;
mod joined_layers;
pub mod layout;
pub mod location;
pub mod open;
mod packing;
pub mod paged_kv;
pub mod prepared_adapter;
pub mod random_source;
pub mod resident;
pub mod rope;
mod safetensors_error;
pub mod safetensors_file;
mod safetensors_shards;
pub mod safetensors_source;
pub mod sampling;
pub mod site_model;
pub mod site_weights;
pub mod sites;
pub mod skeleton;
mod small_json;
pub mod source;
pub mod stop;
mod tensors;
pub mod tokenizer;
mod utf8_buffer;
pub mod weights;
mod whole_file;

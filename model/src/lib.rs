//! What a model is: weight files, tokenizer, chat template, adapter files, sampling, and the one forward pass.
#![forbid(unsafe_code)]

pub mod adapter;
pub mod assist;
pub mod batch_deltas;
pub mod chat_template;
pub mod config;
pub mod dequantized;
pub mod detokenize;
pub mod device_copy;
pub mod forward;
pub mod generation;
pub mod generation_defaults;
pub mod gguf;
pub mod gguf_source;
pub mod hf_config;
pub mod layout;
pub mod location;
pub mod open;
pub mod prepared_adapter;
pub mod resident;
pub mod rope;
pub mod safetensors_file;
pub mod safetensors_source;
pub mod sampling;
mod small_json;
pub mod source;
pub mod stop;
pub mod tokenizer;
pub mod weights;
mod whole_file;

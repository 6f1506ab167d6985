//! Models and adapters as files, and passes over them, compared with transformers and PEFT and with each
//! other.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod device_group;
mod files_adapter;
mod files_adapter_classification;
mod files_adapter_dora;
mod files_adapter_embedding;
mod files_adapter_experts;
mod files_adapter_methods;
mod files_adapter_named;
mod files_adapter_names;
mod files_adapter_saved;
mod files_adapter_types;
mod files_experts;
mod files_families;
mod files_gguf;
mod files_gguf_source;
mod files_location;
mod files_quantized;
mod files_safetensors;
#[path = "../files_support/mod.rs"]
mod files_support;
mod first_layers;
mod golden;
#[path = "../golden_support/mod.rs"]
mod golden_support;
mod identity;
mod key_origins;
mod ring;
mod same_bits;
mod sampling;
mod site_model;
mod sites;
mod skeleton;
mod split;
mod streamed;
mod tiers;
mod training;

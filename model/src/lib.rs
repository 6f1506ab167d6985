//! What a model is: weight files, tokenizer, chat template, adapter files, sampling, and the one forward pass.
#![forbid(unsafe_code)]

pub mod adapter;
pub mod config;
pub mod forward;
pub mod generation;
pub mod source;

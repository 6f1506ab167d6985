//! Reads a model's files on disk: finds them, lists them and checks their content before any use.
//!
//! # Layout
//!
//! - [`location`]: finds a model by its path or its name on a hub.
//! - [`hub_access`]: reads the address of a hub and the user's token from the environment.
//! - [`model_files`], [`weight_files`]: list a model's files, and the weight files of a directory.
//! - [`gguf`]: reads metadata and tensors in one file.
//! - [`generation_defaults`]: reads sampling defaults from a GGUF file or a directory.
//! - [`model_summary`]: reads names and the number of parameters (`parameters`) for listings.
//! - [`text_hash`], [`token_list`]: tell whether two models handle text alike, and whether ids mean the same.
//! - [`whole_file`], [`bounded_json`]: read small files and documents within bounds.
//! - [`strict_json`]: parses untrusted JSON and refuses repeated names.
//!
//! # Principles
//!
//! - A file is untrusted input: declared sizes are checked against the bytes of the file before anything is
//!   allocated for it.
//! - Nothing here computes: the bytes of a tensor are handed on as they are stored.
#![forbid(unsafe_code)]

pub mod bounded_json;
pub mod generation_defaults;
pub mod gguf;
pub mod hub_access;
pub mod location;
pub mod model_files;
pub mod model_summary;
mod parameters;
pub mod strict_json;
pub mod text_hash;
pub mod token_list;
pub mod weight_files;
pub mod whole_file;

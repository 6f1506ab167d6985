//! What lies on disk of a model: where it is, which files it has, and what is in them before anybody knows what it means.
//!
//! # Layout
//!
//! - [`location`]: a path, or a name on a hub. [`model_files`]: the files of the model there. [`weight_files`]: those of a directory that hold weights.
//! - [`gguf`]: metadata and tensors in one file. [`generation_defaults`]: what either kind of files says about sampling.
//! - [`model_summary`]: what the files call it, and how many parameters it has (`parameters`). [`text_hash`]: what tells the text of one model from that of another. [`token_list`]: whether an id means the same to both.
//! - [`whole_file`], [`bounded_json`]: small files and documents, bounded before they are read. [`strict_json`]: JSON from
//!   anybody, in which nothing is said twice.
//!
//! # Principles
//!
//! - A file is untrusted input: what it says about sizes is checked against the bytes there are before anything is
//!   allocated for it.
//! - Nothing here computes: the bytes of a tensor are handed on as they are stored.
#![forbid(unsafe_code)]

pub mod bounded_json;
pub mod generation_defaults;
pub mod gguf;
pub mod location;
pub mod model_files;
pub mod model_summary;
mod parameters;
pub mod strict_json;
pub mod text_hash;
pub mod token_list;
pub mod weight_files;
pub mod whole_file;

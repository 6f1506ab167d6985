//! Tokenizers, templates and grammars, compared with independent implementations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ends;
mod grammar;
mod practice;
mod support;
mod templates;
mod tokenizer;

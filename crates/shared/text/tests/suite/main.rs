//! Tokenizers, templates and grammars, judged by those of other people.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ends;
mod grammar;
mod practice;
mod support;
mod templates;
mod tokenizer;

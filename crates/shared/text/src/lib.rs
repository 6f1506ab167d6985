//! Text on one side, token ids on the other.
//!
//! # Layout
//!
//! - [`tokenizer`]: text to ids and back; [`detokenize`]: back, one token at a time; `utf8_buffer`: what of it is text already.
//! - [`chat_template`]: a conversation as the model was trained to see it. [`chat`]: the same in tokens, with what people wrote
//!   quoted, and where an answer begins in it.
//! - [`adapter_text`]: the text files beside an adapter: a chat template of its own, a tokenizer that may differ.
//! - [`stop`]: stop strings in streamed text.
//! - [`grammar`]: what an answer has to look like: which tokens may come next. [`sandbox`]: a process with limits in which a
//!   grammar is compiled before any other process compiles it.
//! - [`tenant_queue`], [`tenant_cache`]: what grammars wait in and where they are kept, with a share for each tenant.
//!
//! # Principles
//!
//! - No kernel, no weights: who turns text into ids needs no arithmetic, and whoever computes needs no text.
//! - What comes from a model's files or a request is bounded in memory and in time: expressions, templates, lists.
#![forbid(unsafe_code)]

pub mod adapter_text;
pub mod chat;
pub mod chat_template;
pub mod detokenize;
pub mod grammar;
pub mod sandbox;
pub mod stop;
pub mod tenant_cache;
pub mod tenant_queue;
pub mod tokenizer;
mod utf8_buffer;

//! Converts text to token ids and back: tokenizers, chat templates, stop strings and grammars.
//!
//! # Layout
//!
//! - [`tokenizer`]: text to token ids and back. [`detokenize`]: ids to text, one token at a time.
//!   `utf8_buffer`: complete characters in a stream of bytes.
//! - [`chat_template`]: a conversation in the model's training format. [`chat`]: a conversation as tokens
//!   with user text quoted, and the position of an answer; `chat_error`: why that fails. [`history`]: adapts
//!   conversations that a template cannot render.
//! - [`pair_template`]: the prompt of a query and a document for a reranker.
//! - [`adapter_text`]: the text files beside an adapter: a chat template, and a tokenizer that may differ.
//! - [`stop`]: stop strings in streamed text.
//! - [`grammar`]: constraints on an answer, as allowed next tokens. [`sandbox`]: a process with limits that
//!   compiles a grammar before any other process does.
//! - [`tenant_queue`], [`tenant_cache`]: queue and cache of grammars, with a share for each tenant.
//!
//! # Principles
//!
//! - This crate has no kernels and no weights, because converting text needs neither.
//! - Model files and requests are bounded in memory and time: expressions, templates, lists.
#![forbid(unsafe_code)]

pub mod adapter_text;
pub mod chat;
mod chat_error;
pub mod chat_template;
pub mod detokenize;
pub mod grammar;
pub mod history;
pub mod pair_template;
pub mod sandbox;
pub mod stop;
pub mod tenant_cache;
pub mod tenant_queue;
pub mod tokenizer;
mod utf8_buffer;

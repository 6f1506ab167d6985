//! Drafts that need a model: a smaller one with the same tokenizer, or the base's own first layers with a draft adapter.
//!
//! ```text
//! open::by_model(PATH) ----\
//!                           > Drafter: one model, keys and values of several texts --text()--> ModelDraft, one a sequence
//! open::by_itself(adapter) /
//! ```
//!
//! # Layout
//!
//! - [`load`]: a model, or first layers, made ready to guess.
//! - [`drafter`]: the model that guesses, and for whom. `kv_slots`: whose keys and values are kept. `vocabulary`: which tokens it knows.
//! - [`draft`]: what it guesses for one text, and how far that is to be trusted.
//!
//! # Principles
//!
//! - What several texts are about to be asked for is read in one pass, and is what each would have said alone.
//! - A draft owns what it computes with: threads, scratch, keys and values. Whoever waits for a pass may ask it meanwhile.
//! - It never reads a disk once it is open, and takes no memory.
//! - No adapter of a tenant is part of it (CHECKLIST D4.11).

#![forbid(unsafe_code)]

pub mod draft;
pub mod drafter;
mod kv_slots;
pub mod load;
mod vocabulary;

//! Who is in memory.
//!
//! # Layout
//!
//! - [`pool`]: the KV blocks there are, and how many sequences hold each.
//! - [`tree`]: which blocks hold which prefix, and which of them to give up first.
//! - [`kv`]: [`KvCache`], the two as one; what an engine talks to.
//! - [`device`]: the places of the device tier, and which adapters give theirs up.
//! - [`residency`]: which adapters are on the device or on their way there, one state for each.
//! - [`copy`]: the thread that moves everything between tiers, the urgent first.
//!
//! # Principles
//!
//! - Only ids live here. The floats of a block belong to whoever runs the forward pass.
//! - At any time every block is exactly one of free, used (a sequence holds it) or cached (only the tree
//!   knows it), so `free + used + cached = total`.
//! - A prefix is compared token by token, never by a hash of it: two prompts cannot be taken for each other.

#![forbid(unsafe_code)]

pub mod copy;
pub mod device;
pub mod kv;
pub mod pool;
pub mod residency;
pub mod tree;

pub use kv::{KvCache, Prefix, Statistics};
pub use pool::Counts;
pub use tree::{Cursor, Namespace};

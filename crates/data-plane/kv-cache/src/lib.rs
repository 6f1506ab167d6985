//! Who is in memory.
//!
//! # Layout
//!
//! - [`manager`]: [`Cache`], one pool for adapters and for keys and values; what an engine talks to.
//! - [`pool`]: the blocks of the device, and how many sequences hold each.
//! - [`tree`]: what every block depends on, and in which tiers it is.
//! - [`replacement`]: what everything is worth, so who leaves first. `eviction_candidates`: those that may, in this order.
//! - [`tier`]: the tiers, and their slots. [`namespace`]: who may share prefixes, and their names on disk.
//! - [`prefix_path`]: the way of a sequence whose adapter begins somewhere, from the base's prefixes to the adapter's.
//! - [`residency`]: which adapters are on the device or on their way there, one state for each.
//! - [`copy`]: the thread that moves everything between tiers, the urgent first.
//! - [`store`]: blocks in a file, for the next process too.
//! - [`ledger`]: how many bytes there may be of everything, and who has them.
//!
//! # Principles
//!
//! - Only ids live here, and bytes that are kept as they are. The floats of a block belong to whoever runs the forward pass.
//! - A prefix is compared token by token, never by a hash of it: two prompts cannot be taken for each other. In the file, where
//!   the tokens before a block may be gone, a hash of 256 bits stands for them.

#![forbid(unsafe_code)]

pub mod copy;
mod eviction_candidates;
pub mod ledger;
pub mod manager;
pub mod namespace;
pub mod pool;
pub mod prefix_path;
pub mod replacement;
pub mod residency;
pub mod store;
pub mod tier;
pub mod tree;

pub use manager::{BlockCounts, Cache, CacheSettings, Prefix, Statistics};
pub use namespace::{Chain, Namespace};
pub use prefix_path::PrefixPath;
pub use tier::Tier;
pub use tree::{Cursor, NodeId};

//! KV cache and adapters in all memory tiers: what stays in memory, and what is evicted.
//!
//! # Layout
//!
//! - [`manager`]: [`Cache`], one block pool for adapters and KV blocks; the interface for an engine.
//! - [`pool`]: blocks of the device, and how many sequences hold each.
//! - [`tree`]: the dependencies of every block, and the tiers in which it is.
//! - [`replacement`]: values blocks and adapters, and so decides the order of eviction.
//!   `eviction_candidates`: keeps candidates in this order.
//! - [`tier`]: the tiers, and their slots. [`namespace`]: who may share prefixes, and their names on disk.
//! - [`prefix_path`]: path of a sequence through the namespaces of the base and of an activated adapter.
//! - [`residency`]: tracks which adapters are on the device or on their way there, one state for each.
//! - [`block_events`]: events of cached blocks, for routers.
//! - [`copy`]: the thread that copies between tiers, the most urgent job first.
//! - [`store`]: blocks in a file, which survive a restart.
//! - [`ledger`]: limits memory in bytes, and counts who holds it.
//!
//! # Principles
//!
//! - This crate handles ids and raw bytes. Only the owner of the forward pass interprets a block's values.
//! - A prefix is compared token by token, not by hash, so two prompts are never confused. In the file the
//!   tokens before a block may be gone; there a 256-bit hash stands for them.

#![forbid(unsafe_code)]

pub mod block_events;
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

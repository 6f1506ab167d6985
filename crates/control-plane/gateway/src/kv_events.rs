//! KV events: which prefixes this host has cached, for routers outside of the deployment.
//!
//! The messages are those of vLLM's ZeroMQ publisher, so that a router that reads vLLM's can route to this
//! host. A host appears as one server: several executors and tenants may hold one prefix, and the events
//! report when the first copy appears and when the last one is gone. The block updates of executors arrive by
//! [`block_feed`](crate::executor::block_feed).
//!
//! # Modules
//!
//! - [`prefix_index`]: counts the copies of each prefix, and turns block updates into events.
//! - [`batch`]: encodes events in MessagePack.
//! - [`publisher`]: the sockets, and the batches that can be repeated.

pub(crate) mod batch;
pub(crate) mod prefix_index;
pub(crate) mod publisher;

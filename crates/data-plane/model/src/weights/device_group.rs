//! Base layers over a device group: each process of the group holds a part of the weights.
//!
//! Every linear group is cut by its *outputs*, or whole blocks are dealt out. An output is then summed by one
//! device over the whole input, in the order of a single device, so the bits of an answer do not depend on
//! the number of devices. Gradients are sums over outputs; the devices pass the sums on in the order of the
//! outputs, chunk of rows by chunk of rows, so that several devices work at once.
//!
//! ```text
//! leader: forward pass --rows--> members: their outputs of the linear group --outputs--> leader: gathers
//! ```
//!
//! # Layout
//!
//! - `plan`: which outputs of a site each device holds.
//! - `shard`: the weights of one device.
//! - [`leader`]: the linear layers as the leader's pass sees them.
//! - [`member`]: computes the calls of the leader.

pub mod leader;
pub mod member;
mod plan;
mod shard;

pub use self::{plan::GroupPlan, shard::ShardWeights};

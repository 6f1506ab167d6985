//! Changes of an executor's cached KV blocks, for routers outside of the deployment.

use super::AdapterIdBytes;
use crate::{wire_enum, wire_struct};

/// Name of a block: a hash of its namespace and of all tokens up to its end.
pub type ChainBytes = [u8; 32];

wire_enum! {
    /// Memory tier of a KV block.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum BlockTier {
        /// Memory of the device that computes the base.
        Device = 0,
        /// Memory of the host.
        Host = 1,
        /// File on a disk.
        Disk = 2,
    }
}

wire_enum! {
    /// Change of the blocks in the cache.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum BlockUpdate {
        /// The block's bytes are in the tier.
        Added(AddedBlock) = 0,
        /// The tier no longer holds the block.
        Removed(RemovedBlock) = 1,
        /// All earlier updates are void; the blocks in the cache follow.
        Cleared = 2,
    }
}

wire_struct! {
    /// Block that a tier holds from now on.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AddedBlock {
        /// Name of the block.
        pub chain: ChainBytes,
        /// Name of the block before it; absent for the first block of a prompt.
        pub parent: Option<ChainBytes>,
        /// Adapter that computed the block; absent for the base.
        pub adapter: Option<AdapterIdBytes>,
        /// Token ids of the block.
        pub tokens: Vec<u32>,
        /// Tier that holds the block.
        pub tier: BlockTier,
    }
}

wire_struct! {
    /// Block that a tier no longer holds.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct RemovedBlock {
        /// Name of the block.
        pub chain: ChainBytes,
        /// Tier that the block has left.
        pub tier: BlockTier,
    }
}

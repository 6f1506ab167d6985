//! What a cache holds itself to.

use std::time::Duration;

use crate::{replacement::Variant, tier::Tier};

/// How adapters give up their places.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum AdapterUnit {
    /// All at once: an adapter is there, or it is not (E-14).
    #[default]
    Whole,
    /// Block by block, the one that came last first: of use where somebody computes the ranks that are missing (D4.4). So one
    /// whose history is on the device may give up all but its first block, and one that there is no room for may have some.
    Block {
        /// What it costs who asks for an adapter that one of its blocks is missing: the time that computing its ranks elsewhere
        /// adds, or a copy's where that is shorter. In copies of a block.
        cost: f32,
    },
}

/// What a cache holds itself to.
#[derive(Debug, Clone, Copy)]
pub struct CacheSettings {
    /// Blocks of the device.
    pub device: u32,
    /// Slots of the host tier; 0 is none.
    pub host: u32,
    /// Slots of the disk tier; 0 is none.
    pub disk: u32,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Blocks of the device that keys and values may take at most.
    pub max_kv_blocks: u32,
    /// Blocks of the device that adapters may take at most.
    pub max_adapter_blocks: u32,
    /// How adapters give up their places.
    pub adapter_unit: AdapterUnit,
    /// Who leaves first.
    pub variant: Variant,
    /// The cost model's unit of time.
    pub tau: Duration,
    /// What computing a block again takes, in copies of a block between host and device.
    pub recompute_cost: f32,
}

impl CacheSettings {
    /// That of a model of 7 billion weights on a GPU with a link of 25 GB/s.
    pub const RECOMPUTE_COST: f32 = 10.0;

    /// A device of so many blocks, all of which may be anybody's, and nothing below.
    #[must_use]
    pub fn device_alone(blocks: u32, block_tokens: usize) -> Self {
        Self {
            device: blocks,
            host: 0,
            disk: 0,
            block_tokens,
            max_kv_blocks: blocks,
            max_adapter_blocks: blocks,
            adapter_unit: AdapterUnit::default(),
            variant: Variant::default(),
            tau: Duration::from_secs(10),
            recompute_cost: Self::RECOMPUTE_COST,
        }
    }

    /// Slots of a tier.
    #[must_use]
    pub fn blocks(&self, tier: Tier) -> u32 {
        match tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
            Tier::Disk => self.disk,
        }
    }
}

//! What a cache holds itself to.

use std::time::Duration;

use crate::{replacement::Variant, tier::Tier};

/// What a cache holds itself to.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
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
    /// Who leaves first.
    pub variant: Variant,
    /// The cost model's unit of time.
    pub tau: Duration,
    /// What computing a block again takes, in copies of a block between host and device.
    pub recompute_cost: f32,
}

impl Settings {
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

//! Sizes, limits and policy of a cache.

use std::time::Duration;

use crate::{replacement::Variant, tier::Tier};

/// Unit in which adapters are evicted.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum AdapterUnit {
    /// Complete adapters: an adapter is on the device, or it is not (E-14).
    #[default]
    Whole,
    /// Single blocks, the last first, where other threads compute missing ranks. An adapter with
    /// cached KV blocks may lose all but its first block; one that does not fit may have some blocks.
    Block {
        /// Cost of a missing block for a request: the time that computing its ranks elsewhere adds, or a
        /// copy's if that is shorter; in block copies.
        cost: f32,
    },
}

/// Sizes, limits and policy of a cache.
#[derive(Debug, Clone, Copy)]
pub struct CacheSettings {
    /// Number of blocks on the device.
    pub device: u32,
    /// Number of slots in the host tier; 0 disables it.
    pub host: u32,
    /// Number of slots in the disk tier; 0 disables it.
    pub disk: u32,
    /// Number of tokens in a block.
    pub block_tokens: usize,
    /// Maximum number of device blocks for the KV cache.
    pub max_kv_blocks: u32,
    /// Maximum number of device blocks for adapters.
    pub max_adapter_blocks: u32,
    /// Unit in which adapters are evicted.
    pub adapter_unit: AdapterUnit,
    /// Replacement policy that orders the eviction.
    pub variant: Variant,
    /// Time unit of the cost model.
    pub tau: Duration,
    /// Cost of computing a block again, in block copies between host and device.
    pub recompute_cost: f32,
}

impl CacheSettings {
    /// Cost for a model of 7 billion weights on a GPU with a link of 25 GB/s.
    pub const RECOMPUTE_COST: f32 = 10.0;

    /// Settings of a device with `blocks` blocks for KV cache and adapters alike, without lower tiers.
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

    /// Returns the number of blocks or slots in a tier.
    #[must_use]
    pub fn blocks(&self, tier: Tier) -> u32 {
        match tier {
            Tier::Device => self.device,
            Tier::Host => self.host,
            Tier::Disk => self.disk,
        }
    }
}

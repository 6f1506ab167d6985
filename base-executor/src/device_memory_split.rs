//! The operator's division of the device's memory.

use kv_cache::CacheSettings;
use model::forward::BLOCK_TOKENS;

use crate::config::ExecutorConfig;

/// Default memory of the KV cache and of adapters, each.
const DEFAULT_BYTES: u64 = 512 << 20;

/// Memory limits of the device in bytes, as far as they are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceBytes {
    pub all: Option<u64>,
    pub kv: Option<u64>,
    pub adapters: Option<u64>,
}

impl DeviceBytes {
    pub(crate) fn of(config: &ExecutorConfig) -> Self {
        let [all, kv, adapters] = [config.device_bytes, config.kv_bytes, config.device_adapter_bytes]
            .map(|said| said.map(|bytes| bytes.0));
        Self { all, kv, adapters }
    }

    /// Returns the total, if set. A limit of the KV cache alone is added to that of adapters.
    pub(crate) fn said(self) -> Option<u64> {
        self.all.or_else(|| Some(self.kv?.saturating_add(self.adapters.unwrap_or(DEFAULT_BYTES))))
    }

    pub(crate) fn on_a_cpu(self) -> u64 {
        self.said().unwrap_or_else(|| DEFAULT_BYTES.saturating_add(self.adapters.unwrap_or(DEFAULT_BYTES)))
    }

    /// Divides a pool of `blocks` blocks. KV cache and adapters share it, but one sequence of `context`
    /// blocks, up to three quarters of the pool, is reserved for the KV cache.
    pub(crate) fn divide(self, blocks: u32, context: u32, block_bytes: usize) -> CacheSettings {
        // A limit below one block counts as one block.
        let of = |bytes: u64| {
            let whole = bytes / (block_bytes as u64).max(1);
            u32::try_from(whole.max(bytes.min(1))).unwrap_or(u32::MAX)
        };
        let max_kv_blocks = self.kv.map_or(blocks, of).clamp(1, blocks);
        let sure = context.min(max_kv_blocks).min(blocks - blocks / 4);
        let max_adapter_blocks = self.adapters.map_or(blocks, of).min(blocks - sure);
        CacheSettings {
            max_kv_blocks,
            max_adapter_blocks,
            ..CacheSettings::device_alone(blocks, BLOCK_TOKENS)
        }
    }
}

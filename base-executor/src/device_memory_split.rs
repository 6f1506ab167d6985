//! The device's memory, as an operator divided it.

use kv_cache::CacheSettings;
use model::forward::BLOCK_TOKENS;

use crate::config::ExecutorConfig;

/// What each of two may take of the device's memory unless told otherwise.
const DEFAULT_BYTES: u64 = 512 << 20;

/// What an operator said of the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceBytes {
    /// Of all of it.
    pub all: Option<u64>,
    /// Of keys and values, at most.
    pub kv: Option<u64>,
    /// Of adapters, at most.
    pub adapters: Option<u64>,
}

impl DeviceBytes {
    /// What `config` says.
    pub(crate) fn of(config: &ExecutorConfig) -> Self {
        let [all, kv, adapters] = [config.device_bytes, config.kv_bytes, config.device_adapter_bytes]
            .map(|said| said.map(|bytes| bytes.0));
        Self { all, kv, adapters }
    }

    /// All of it, if that was said: what keys and values may have alone is theirs beside what adapters may have.
    pub(crate) fn said(self) -> Option<u64> {
        self.all.or_else(|| Some(self.kv?.saturating_add(self.adapters.unwrap_or(DEFAULT_BYTES))))
    }

    /// All of it, on a CPU.
    pub(crate) fn on_a_cpu(self) -> u64 {
        self.said().unwrap_or_else(|| DEFAULT_BYTES.saturating_add(self.adapters.unwrap_or(DEFAULT_BYTES)))
    }

    /// The pool of `blocks` blocks, as the cache divides it: all are anybody's, beside room for one sequence of `context` blocks,
    /// or a quarter.
    pub(crate) fn divide(self, blocks: u32, context: u32, block_bytes: usize) -> CacheSettings {
        // Less than a block is one, or a small bound would be none.
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

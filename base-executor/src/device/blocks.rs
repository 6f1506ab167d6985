//! Copies of adapters to the device, block by block, as sources for the copy engine.

use std::sync::Arc;

use kv_cache::copy::CopySource;
use model::deltas::{
    device_copy::{DeviceCopy, DeviceMemory},
    prepared::PreparedAdapter,
};

pub(super) struct Blocks {
    pub(super) adapter: Arc<PreparedAdapter>,
    pub(super) copy: Arc<DeviceCopy>,
    pub(super) memory: Arc<dyn DeviceMemory>,
}

impl CopySource for Blocks {
    fn next_bytes(&self) -> Option<usize> {
        // The last block may have arrived since.
        self.memory.poll_arrivals();
        self.copy.next_bytes()
    }

    fn copy_next(&mut self) {
        self.copy.copy_next(self.adapter.host());
        failpoint::pass("executor.block_arrived");
    }
}

//! An adapter's way to the device, block by block, as the copy engine takes it.

use std::sync::Arc;

use cache::copy::Load;
use model::{
    device_copy::{DeviceCopy, DeviceMemory},
    prepared_adapter::PreparedAdapter,
};

/// The blocks of one adapter, for the copy engine.
pub(super) struct Blocks {
    pub(super) adapter: Arc<PreparedAdapter>,
    pub(super) copy: Arc<DeviceCopy>,
    pub(super) memory: DeviceMemory,
}

impl Load for Blocks {
    fn next_bytes(&self) -> Option<usize> {
        // The last block may have arrived since.
        settle(&self.memory);
        self.copy.next_bytes()
    }

    fn copy_next(&mut self) {
        self.copy.copy_next(&self.adapter);
        failpoint::pass("executor.block_arrived");
    }
}

/// Lets the next pass see what has arrived. A device that is lost is noticed by the pass.
pub(super) fn settle(memory: &DeviceMemory) {
    if let DeviceMemory::Cuda(lane) = memory {
        let _ = lane.settle();
    }
}

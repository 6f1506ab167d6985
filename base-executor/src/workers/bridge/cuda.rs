//! The words and the sums of a bridge where a GPU reaches them.

use std::sync::Arc;

use anyhow::Context as _;
use kernels::cuda::{Cuda, CudaError, HostMapping, Pinned, board::Signal};
use model::assist::{DeviceAssist, Invocation, Job};
use shmproto::board::XSlab;

use super::{Bridge, Wire};

/// What a GPU and the bridge share: the slab, registered, and page-locked memory of the host.
#[derive(Debug)]
pub struct CudaWire {
    slab: HostMapping,
    asked: Signal,
    answered: Signal,
    sums: Pinned<f32>,
}

impl CudaWire {
    /// Registers `slab`, and takes memory for so many elements of sums.
    ///
    /// # Errors
    ///
    /// The driver locks no more memory of the host.
    pub(in crate::workers) fn new(
        cuda: &Arc<Cuda>,
        slab: XSlab,
        sums_elements: usize,
    ) -> anyhow::Result<Self> {
        let registered = "the workers' board cannot be registered with the GPU";
        let slab = HostMapping::register(cuda, Arc::new(slab)).context(registered)?;
        let locked = "there is no memory that the GPU and its workers could share";
        let word = || Signal::new(cuda).context(locked);
        Ok(Self {
            slab,
            asked: word()?,
            answered: word()?,
            sums: Pinned::new(cuda, sums_elements).context(locked)?,
        })
    }
}

impl Wire for CudaWire {
    fn asked(&self) -> u32 {
        self.asked.load()
    }

    fn answered(&self) -> u32 {
        self.answered.load()
    }

    fn answer(&self, number: u32) {
        self.answered.store(number);
    }

    fn write_sums(&self, at: usize, sums: &[f32]) {
        self.sums.write(at, sums);
    }

    fn sums_elements(&self) -> usize {
        self.sums.len()
    }
}

/// A bridge for a GPU.
#[derive(Debug)]
pub(in crate::workers) struct CudaBridge {
    bridge: Bridge<CudaWire>,
    invocation: Invocation,
}

impl CudaBridge {
    pub(in crate::workers) fn new(bridge: Bridge<CudaWire>, invocation: Invocation) -> Self {
        Self { bridge, invocation }
    }
}

impl DeviceAssist for CudaBridge {
    fn begin_pass(&mut self) {
        self.bridge.begin_pass();
    }

    fn end_pass(&mut self) -> Result<(), CudaError> {
        let ended = self.bridge.end_pass();
        // A stream that gave up went on without the sums.
        self.bridge.wire().answered.take_fault().and(ended)
    }

    fn post(&mut self, job: Job) -> u32 {
        self.bridge.post(job)
    }

    fn slab(&self) -> &HostMapping {
        &self.bridge.wire().slab
    }

    fn asked(&self) -> &Signal {
        &self.bridge.wire().asked
    }

    fn answered(&self) -> &Signal {
        &self.bridge.wire().answered
    }

    fn sums(&self) -> &Pinned<f32> {
        &self.bridge.wire().sums
    }

    fn invocation(&self) -> Invocation {
        self.invocation
    }
}

//! Host memory that the bridge shares with an NVIDIA GPU: signal words, rows and sums.

use std::sync::Arc;

use anyhow::Context as _;
use kernels::cuda::{Cuda, CudaError, HostMapping, HostWords, Pinned, board::Signal};
use model::{
    cuda::assist::{DeviceAssist, Invocation},
    deltas::assist::AssistJob,
};
use shmproto::board::ActivationSlab;

use super::{Bridge, BridgeMemory};

/// Memory that a GPU and the bridge share: the slab, registered if possible, and page-locked memory.
#[derive(Debug)]
pub(crate) struct CudaBridgeMemory {
    slab: HostMapping,
    asked: Signal,
    answered: Signal,
    sums: Pinned<f32>,
}

impl CudaBridgeMemory {
    /// Registers `slab`, and allocates `sums_elements` elements of sums. If the driver refuses the
    /// registration, as in some containers, the host copies the rows.
    ///
    /// # Errors
    ///
    /// If the driver locks no host memory, or the GPU is lost.
    pub(in crate::workers) fn new(
        cuda: &Arc<Cuda>,
        slab: ActivationSlab,
        sums_elements: usize,
    ) -> anyhow::Result<Self> {
        let registered = "cannot register the workers' board with the GPU";
        let words: HostWords = Arc::new(slab);
        let slab = match HostMapping::register(cuda, Arc::clone(&words)) {
            Err(reason @ (CudaError::Refused { .. } | CudaError::NoLockedMemory { .. })) => {
                tracing::warn!(%reason, "rows travel from the GPU to workers through host memory, which \
                    is slower");
                HostMapping::unregistered(cuda, words)
            }
            slab => slab.context(registered)?,
        };
        let locked = "cannot allocate memory that the GPU and its workers share";
        let word = || Signal::new(cuda).context(locked);
        Ok(Self {
            slab,
            asked: word()?,
            answered: word()?,
            sums: Pinned::new(cuda, sums_elements).context(locked)?,
        })
    }
}

impl BridgeMemory for CudaBridgeMemory {
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

#[derive(Debug)]
pub(in crate::workers) struct CudaBridge {
    bridge: Bridge<CudaBridgeMemory>,
    invocation: Invocation,
}

impl CudaBridge {
    /// Uses `invocation` if the slab is registered, else the native one.
    pub(in crate::workers) fn new(bridge: Bridge<CudaBridgeMemory>, invocation: Invocation) -> Self {
        let is_registered = bridge.wire().slab.is_registered();
        Self { bridge, invocation: if is_registered { invocation } else { Invocation::Native } }
    }
}

impl DeviceAssist for CudaBridge {
    fn begin_pass(&mut self) {
        self.bridge.begin_pass();
    }

    fn end_pass(&mut self) -> Result<(), CudaError> {
        let ended = self.bridge.end_pass();
        // A stream that gave up continued without the sums.
        self.bridge.wire().answered.take_fault().and(ended)
    }

    fn post(&mut self, job: AssistJob) -> u32 {
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

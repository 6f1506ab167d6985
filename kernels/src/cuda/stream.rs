//! Streams: queues of work on a device, executed in order.

use std::{fmt, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUstream, CUstream_flags};

use super::{Cuda, CudaError, CudaEvent, error::check};

/// A stream; clones refer to the same stream.
#[derive(Clone)]
pub struct CudaStream(Arc<StreamHandle>);

struct StreamHandle {
    cuda: Arc<Cuda>,
    raw: CUstream,
}

// SAFETY: the driver takes calls for one stream from any thread and serializes them.
unsafe impl Send for StreamHandle {}
// SAFETY: the driver takes calls for one stream from any thread and serializes them.
unsafe impl Sync for StreamHandle {}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.0.cuda.info().ordinal).finish_non_exhaustive()
    }
}

impl CudaStream {
    /// Creates a stream that does not synchronize with other streams.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        cuda.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the call writes the stream, which is destroyed when this is dropped.
        let result = unsafe { sys::cuStreamCreate(&mut raw, CUstream_flags::CU_STREAM_NON_BLOCKING as u32) };
        check("make a stream", result)?;
        Ok(Self(Arc::new(StreamHandle { cuda: Arc::clone(cuda), raw })))
    }

    /// Returns the device of the stream.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.0.cuda
    }

    pub(super) fn raw(&self) -> CUstream {
        self.0.raw
    }

    /// Waits until all work enqueued so far is done.
    ///
    /// # Errors
    /// Fails if some of the work failed: the device is lost.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.0.cuda.bind()?;
        // SAFETY: this object owns the stream.
        check("finish its work", unsafe { sys::cuStreamSynchronize(self.0.raw) })
    }

    /// Makes later work of this stream wait for `event` of another stream.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn wait(&self, event: &CudaEvent) -> Result<(), CudaError> {
        self.0.cuda.bind()?;
        // SAFETY: stream and event are alive; the driver keeps its own reference to the event's state.
        check("wait for an event", unsafe { sys::cuStreamWaitEvent(self.0.raw, event.raw(), 0) })
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // Work in flight is finished first, so that no memory is freed before its last use.
            // SAFETY: this object owns the stream and does not use it again.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.raw);
                let _ = sys::cuStreamDestroy_v2(self.raw);
            }
        }
    }
}

//! A queue of work on a device: each piece begins when the one before has ended.

use std::{fmt, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUstream, CUstream_flags};

use super::{Cuda, CudaError, CudaEvent, error::check};

/// A queue of work. Clones are the same queue.
#[derive(Clone)]
pub struct CudaStream(Arc<StreamHandle>);

struct StreamHandle {
    cuda: Arc<Cuda>,
    raw: CUstream,
}

// SAFETY: the driver takes calls for one stream from any thread, one after the other.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.0.cuda.info().ordinal).finish_non_exhaustive()
    }
}

impl CudaStream {
    /// A new queue, which waits for no other.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        cuda.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the stream is written by the call and destroyed when this is dropped.
        let result = unsafe { sys::cuStreamCreate(&mut raw, CUstream_flags::CU_STREAM_NON_BLOCKING as u32) };
        check("make a stream", result)?;
        Ok(Self(Arc::new(StreamHandle { cuda: Arc::clone(cuda), raw })))
    }

    /// The device.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.0.cuda
    }

    pub(super) fn raw(&self) -> CUstream {
        self.0.raw
    }

    /// Waits until everything enqueued so far is done.
    ///
    /// # Errors
    ///
    /// Some of it failed: the device is lost.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.0.cuda.bind()?;
        // SAFETY: the stream is ours.
        check("finish its work", unsafe { sys::cuStreamSynchronize(self.0.raw) })
    }

    /// Has this stream wait, from here on, for what `event` marks on another.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn wait(&self, event: &CudaEvent) -> Result<(), CudaError> {
        self.0.cuda.bind()?;
        // SAFETY: both are alive; the driver keeps what it needs of the event.
        check("wait for an event", unsafe { sys::cuStreamWaitEvent(self.0.raw, event.raw(), 0) })
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // What is under way is finished first, so that nobody's memory is gone before its use.
            // SAFETY: the stream is ours, and not used again.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.raw);
                let _ = sys::cuStreamDestroy_v2(self.raw);
            }
        }
    }
}

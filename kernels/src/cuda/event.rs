//! Marks in a stream.

use std::{fmt, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};

use super::{Cuda, CudaError, error::check, stream::CudaStream};

/// A mark in a stream: reached when everything before it is done.
pub struct CudaEvent {
    cuda: Arc<Cuda>,
    raw: CUevent,
}

// SAFETY: the driver takes calls for events from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

impl CudaEvent {
    /// A mark that nothing has set yet.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Self::with(cuda, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// A mark that knows when it was reached, for measurements.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn timed(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Self::with(cuda, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(cuda: &Arc<Cuda>, flags: CUevent_flags) -> Result<Self, CudaError> {
        cuda.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the event is written by the call and destroyed when this is dropped.
        check("make an event", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(Self { cuda: Arc::clone(cuda), raw })
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }

    /// Sets the mark behind all that is enqueued on `stream` now.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn record(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.cuda.bind()?;
        // SAFETY: both are alive and of one device.
        check("mark a place", unsafe { sys::cuEventRecord(self.raw, stream.raw()) })
    }

    /// Whether the mark was reached; true if it was never set.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        self.cuda.bind()?;
        // SAFETY: the event is ours.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("say how far it is", result).map(|()| true),
        }
    }

    /// Waits until the mark is reached.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.cuda.bind()?;
        // SAFETY: the event is ours.
        check("reach a mark", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Milliseconds from `earlier` to this mark; both are timed and have been reached.
    ///
    /// # Errors
    ///
    /// One of them is not timed or was not reached.
    pub fn ms_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        self.cuda.bind()?;
        let mut ms = 0.0;
        // SAFETY: the time is written by the call.
        check("measure time", unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.raw, self.raw) })?;
        Ok(ms)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // SAFETY: the event is ours and not used again; the driver keeps what is under way.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

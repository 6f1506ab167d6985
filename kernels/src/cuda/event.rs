//! Events in a stream.

use std::{fmt, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};

use super::{Cuda, CudaError, error::check, stream::CudaStream};

/// An event in a stream, reached when all earlier work of the stream is done.
pub struct CudaEvent {
    cuda: Arc<Cuda>,
    raw: CUevent,
}

// SAFETY: the driver takes calls for events from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: the driver takes calls for events from any thread.
unsafe impl Sync for CudaEvent {}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

impl CudaEvent {
    /// Creates an event that is not recorded yet.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Self::with(cuda, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event that stores its time, for measurements.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn timed(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Self::with(cuda, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(cuda: &Arc<Cuda>, flags: CUevent_flags) -> Result<Self, CudaError> {
        cuda.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the call writes the event, which is destroyed when this is dropped.
        check("make an event", unsafe { sys::cuEventCreate(&mut raw, flags as u32) })?;
        Ok(Self { cuda: Arc::clone(cuda), raw })
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }

    /// Records the event after all work that is enqueued on `stream` now.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn record(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.cuda.bind()?;
        // SAFETY: event and stream are alive and of one device.
        check("mark a place", unsafe { sys::cuEventRecord(self.raw, stream.raw()) })
    }

    /// True if the event was reached or was never recorded.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        self.cuda.bind()?;
        // SAFETY: this object owns the event.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("say how far it is", result).map(|()| true),
        }
    }

    /// Waits until the event is reached.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.cuda.bind()?;
        // SAFETY: this object owns the event.
        check("reach a mark", unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Returns the milliseconds from `earlier` to this event; both must be timed and reached.
    ///
    /// # Errors
    /// Fails if one of the events is not timed or was not reached.
    pub fn ms_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        self.cuda.bind()?;
        let mut ms = 0.0;
        // SAFETY: the call writes the time.
        check("measure time", unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.raw, self.raw) })?;
        Ok(ms)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // SAFETY: this object owns the event and does not use it again; the driver keeps it alive for pending work.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

//! A queue of work on a device: each piece begins when the one before has ended.

use std::{fmt, ptr, sync::Arc};

use cudarc::driver::sys::{self, CUstream, CUstream_flags};

use super::{
    Cuda, CudaError, Event,
    error::check,
    memory::{DeviceVec, Pinned, Plain},
};

/// A queue of work. Clones are the same queue.
#[derive(Clone)]
pub struct Stream(Arc<Queue>);

struct Queue {
    cuda: Arc<Cuda>,
    raw: CUstream,
}

// SAFETY: the driver takes calls for one stream from any thread, one after the other.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.0.cuda.info().ordinal).finish_non_exhaustive()
    }
}

impl Stream {
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
        Ok(Self(Arc::new(Queue { cuda: Arc::clone(cuda), raw })))
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
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.0.cuda.bind()?;
        // SAFETY: both are alive; the driver keeps what it needs of the event.
        check("wait for an event", unsafe { sys::cuStreamWaitEvent(self.0.raw, event.raw(), 0) })
    }

    /// Copies `from` to elements `at..` of `to`. The host's memory may be reused at once.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If `to` has no room.
    pub fn upload<T: Plain>(&self, from: &[T], to: &mut DeviceVec<T>, at: usize) -> Result<(), CudaError> {
        assert!(at + from.len() <= to.len(), "what is uploaded has room");
        if from.is_empty() {
            return Ok(());
        }
        self.0.cuda.bind()?;
        // SAFETY: 1. Both ranges exist. 2. `from` is ordinary memory, which the driver copies before it returns: page-locked
        // memory is never seen as a slice here (`Pinned`, `HostMapping`).
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address_of(at), from.as_ptr().cast(), size_of_val(from), self.0.raw)
        };
        check("copy from the host", result)
    }

    /// Copies the first `bytes` bytes of page-locked memory to the beginning of `to`, without waiting for it. What the host
    /// writes there meanwhile may or may not be copied.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If either has fewer bytes.
    pub fn upload_pinned(
        &self,
        from: &Pinned<u8>,
        bytes: usize,
        to: &mut DeviceVec<u8>,
    ) -> Result<(), CudaError> {
        assert!(bytes <= from.len() && bytes <= to.len(), "what is uploaded exists, and has room");
        if bytes == 0 {
            return Ok(());
        }
        self.0.cuda.bind()?;
        // SAFETY: 1. Both ranges exist. 2. Neither is given back before the device has finished: dropping either waits. 3. The
        // host never sees page-locked memory as a slice, so it may be read at any time.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address_of(0), from.host_address(), bytes, self.0.raw) };
        check("copy from the host", result)
    }

    /// Copies elements `at..` of `from` into `to`, and waits for that.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If `from` has fewer elements.
    pub fn download<T: Plain>(&self, from: &DeviceVec<T>, at: usize, to: &mut [T]) -> Result<(), CudaError> {
        assert!(at + to.len() <= from.len(), "what is downloaded exists");
        if to.is_empty() {
            return Ok(());
        }
        self.0.cuda.bind()?;
        // SAFETY: both ranges exist, and `to` is borrowed until the copy is done, which is waited for.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                to.as_mut_ptr().cast(),
                from.address_of(at),
                size_of_val(to),
                self.0.raw,
            )
        };
        check("copy to the host", result)?;
        self.synchronize()
    }

    /// Copies `count` elements from `at` of `from` to `to_at` of `to`, on the device.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If either has fewer elements.
    pub fn copy<T: Plain>(
        &self,
        from: &DeviceVec<T>,
        at: usize,
        to: &mut DeviceVec<T>,
        to_at: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        assert!(at + count <= from.len() && to_at + count <= to.len(), "what is copied exists, and has room");
        if count == 0 {
            return Ok(());
        }
        self.0.cuda.bind()?;
        // SAFETY: both ranges exist and are different allocations.
        let result = unsafe {
            sys::cuMemcpyDtoDAsync_v2(
                to.address_of(to_at),
                from.address_of(at),
                count * size_of::<T>(),
                self.0.raw,
            )
        };
        check("copy on the device", result)
    }
}

impl Drop for Queue {
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

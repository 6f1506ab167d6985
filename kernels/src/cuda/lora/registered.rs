//! Read-only host memory that the device copies from directly.

use std::{ffi::c_void, fmt, sync::Arc};

use cudarc::driver::sys;

use crate::{
    cuda::{Cuda, CudaError, error::check},
    lora::SharedBytes,
};

/// An adapter's image on the host, locked and registered with the device, so that copies need no CPU.
pub struct RegisteredBytes {
    cuda: Arc<Cuda>,
    /// Keeps the memory mapped.
    _mapped: SharedBytes,
    start: *const u8,
    len: usize,
}

// SAFETY: the memory is only read, and the driver takes calls from any thread.
unsafe impl Send for RegisteredBytes {}
// SAFETY: the memory is only read, and the driver takes calls from any thread.
unsafe impl Sync for RegisteredBytes {}

impl fmt::Debug for RegisteredBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegisteredBytes({})", self.len)
    }
}

impl RegisteredBytes {
    /// Registers all of `bytes`, which must be a mapping of its own and may be read-only. Registration locks
    /// the pages, which takes long for large images: the caller registers once per image, not per copy.
    ///
    /// # Errors
    /// Fails if the device cannot read such memory or the memory cannot be locked; copies are then staged.
    pub fn new(cuda: &Arc<Cuda>, bytes: &SharedBytes) -> Result<Self, CudaError> {
        cuda.bind()?;
        let mapped = Arc::clone(bytes);
        let slice = (*mapped).as_ref();
        let (start, len) = (slice.as_ptr(), slice.len());
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the memory is mapped until `mapped` is dropped, which is after it is unregistered; the device only
        // reads it.
        let result =
            unsafe { sys::cuMemHostRegister_v2(start.cast_mut().cast::<c_void>(), len.max(1), flags) };
        check("register an adapter's memory", result)?;
        Ok(Self { cuda: Arc::clone(cuda), _mapped: mapped, start, len })
    }

    /// Returns the bytes of the image.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the image has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True if `range` lies within the registered memory.
    pub(super) fn contains(&self, range: &[u8]) -> bool {
        let begin = self.start.addr();
        range.as_ptr().addr() >= begin && range.as_ptr().addr() + range.len() <= begin + self.len
    }
}

impl Drop for RegisteredBytes {
    fn drop(&mut self) {
        if self.cuda.bind().is_ok() {
            // SAFETY: `new` has registered the memory, which is still mapped because `_mapped` is dropped later. Copies
            // hold `self` until they are done, so no copy in flight reads it.
            let _ = unsafe { sys::cuMemHostUnregister(self.start.cast_mut().cast::<c_void>()) };
        }
    }
}

//! Copies between host and device, and on the device, in the order of a stream.

use cudarc::driver::sys;

use super::{
    CudaError, CudaStream,
    error::check,
    memory::{DeviceVec, Pinned, PlainNumber},
};

impl CudaStream {
    /// Sets the first `count` elements of `to` to zero.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `to` has fewer elements.
    pub fn clear<T: PlainNumber>(&self, to: &mut DeviceVec<T>, count: usize) -> Result<(), CudaError> {
        assert!(count <= to.len(), "what is cleared exists");
        if count == 0 {
            return Ok(());
        }
        self.cuda().bind()?;
        // SAFETY: the range exists and is borrowed exclusively.
        let result = unsafe { sys::cuMemsetD8Async(to.address_of(0), 0, count * size_of::<T>(), self.raw()) };
        check("clear memory", result)
    }

    /// Copies `from` to the elements of `to` from `at` on. The host's memory may be reused at once.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `from` exceeds the elements of `to`.
    pub fn upload<T: PlainNumber>(
        &self,
        from: &[T],
        to: &mut DeviceVec<T>,
        at: usize,
    ) -> Result<(), CudaError> {
        assert!(at + from.len() <= to.len(), "what is uploaded has room");
        if from.is_empty() {
            return Ok(());
        }
        self.cuda().bind()?;
        // SAFETY: 1. Both ranges exist. 2. `from` is pageable memory, which the driver copies before it returns: this
        // crate never borrows page-locked memory as a slice (`Pinned`, `HostMapping`).
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address_of(at), from.as_ptr().cast(), size_of_val(from), self.raw())
        };
        check("copy from the host", result)
    }

    /// Copies `from` to the start of `to`. If `to` is too small, it is replaced and its contents are lost.
    ///
    /// # Errors
    /// Fails if the device is lost or has no free memory.
    pub fn write<T: PlainNumber>(&self, from: &[T], to: &mut DeviceVec<T>) -> Result<(), CudaError> {
        if to.len() < from.len() {
            *to = DeviceVec::new(self.cuda(), from.len().next_power_of_two())?;
        }
        self.upload(from, to, 0)
    }

    /// Copies the first `bytes` bytes of page-locked memory to the start of `to`, without waiting. Concurrent
    /// writes of the host may or may not be copied.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `from` or `to` has fewer bytes.
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
        self.cuda().bind()?;
        // SAFETY: 1. Both ranges exist. 2. Dropping either memory waits for the device, so neither is freed early. 3.
        // The host never borrows page-locked memory as a slice, so it may be read at any time.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address_of(0), from.host_address(), bytes, self.raw()) };
        check("copy from the host", result)
    }

    /// Copies the elements of `from` from `at` on into `to`, and waits for the copy.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `from` has fewer elements.
    pub fn download<T: PlainNumber>(
        &self,
        from: &DeviceVec<T>,
        at: usize,
        to: &mut [T],
    ) -> Result<(), CudaError> {
        assert!(at + to.len() <= from.len(), "what is downloaded exists");
        if to.is_empty() {
            return Ok(());
        }
        self.cuda().bind()?;
        // SAFETY: both ranges exist, and `to` is borrowed until `synchronize` below has waited for the copy.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                to.as_mut_ptr().cast(),
                from.address_of(at),
                size_of_val(to),
                self.raw(),
            )
        };
        check("copy to the host", result)?;
        self.synchronize()
    }

    /// Copies `count` elements from index `at` of `from` to index `to_at` of `to`, on the device.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `from` or `to` has fewer elements.
    pub fn copy<T: PlainNumber>(
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
        self.cuda().bind()?;
        // SAFETY: both ranges exist and are different allocations.
        let result = unsafe {
            sys::cuMemcpyDtoDAsync_v2(
                to.address_of(to_at),
                from.address_of(at),
                count * size_of::<T>(),
                self.raw(),
            )
        };
        check("copy on the device", result)
    }
}

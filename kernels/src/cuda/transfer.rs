//! Copies between the host and a device, and on the device, in the order of a stream.

use cudarc::driver::sys;

use super::{
    CudaError, CudaStream,
    error::check,
    memory::{DeviceVec, Pinned, PlainNumber},
};

impl CudaStream {
    /// Writes zeroes to the first `count` elements of `to`.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    pub fn clear<T: PlainNumber>(&self, to: &mut DeviceVec<T>, count: usize) -> Result<(), CudaError> {
        assert!(count <= to.len(), "what is cleared exists");
        if count == 0 {
            return Ok(());
        }
        self.cuda().bind()?;
        // SAFETY: the range exists, and is borrowed exclusively.
        let result = unsafe { sys::cuMemsetD8Async(to.address_of(0), 0, count * size_of::<T>(), self.raw()) };
        check("clear memory", result)
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
        // SAFETY: 1. Both ranges exist. 2. `from` is ordinary memory, which the driver copies before it returns: page-locked
        // memory is never seen as a slice here (`Pinned`, `HostMapping`).
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to.address_of(at), from.as_ptr().cast(), size_of_val(from), self.raw())
        };
        check("copy from the host", result)
    }

    /// Copies `from` to the beginning of `to`, which grows if it must: what it held is lost then.
    ///
    /// # Errors
    ///
    /// The device is lost, or has no room.
    pub fn write<T: PlainNumber>(&self, from: &[T], to: &mut DeviceVec<T>) -> Result<(), CudaError> {
        if to.len() < from.len() {
            *to = DeviceVec::new(self.cuda(), from.len().next_power_of_two())?;
        }
        self.upload(from, to, 0)
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
        self.cuda().bind()?;
        // SAFETY: 1. Both ranges exist. 2. Neither is given back before the device has finished: dropping either waits. 3. The
        // host never sees page-locked memory as a slice, so it may be read at any time.
        let result =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.address_of(0), from.host_address(), bytes, self.raw()) };
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
        // SAFETY: both ranges exist, and `to` is borrowed until the copy is done, which is waited for.
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

    /// Copies `count` elements from `at` of `from` to `to_at` of `to`, on the device.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If either has fewer elements.
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

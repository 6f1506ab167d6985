//! Memory of a device, and host memory that the device reaches.

use std::{
    ffi::c_void,
    fmt,
    marker::PhantomData,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::{self, CUdeviceptr, CUresult};

use super::{Cuda, CudaError, error::check, stream::CudaStream};

/// Numbers for which every bit pattern is a value.
pub trait PlainNumber: Copy + Default + Send + Sync + 'static + sealed::Sealed {}

mod sealed {
    /// Prevents implementations outside this module.
    pub trait Sealed {}
}

macro_rules! plain {
    ($($number:ty),*) => { $(impl PlainNumber for $number {} impl sealed::Sealed for $number {})* };
}

plain!(u8, i8, u16, u32, i32, u64, f32);

/// Device memory; freeing it waits for the device.
struct DeviceMemory {
    cuda: Arc<Cuda>,
    address: CUdeviceptr,
}

impl DeviceMemory {
    fn new(cuda: &Arc<Cuda>, bytes: usize) -> Result<Self, CudaError> {
        cuda.bind()?;
        let mut address = 0;
        // SAFETY: the call writes the address, which is freed when this is dropped.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                Err(CudaError::OutOfMemory { bytes, free_bytes: cuda.free_bytes()? })
            }
            result => check("take memory", result).map(|()| Self { cuda: Arc::clone(cuda), address }),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.cuda.note_free();
        if self.cuda.bind().is_ok() {
            // SAFETY: `new` allocated the memory. The call waits for the device, so no work in flight still uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// An array of numbers on the device.
pub struct DeviceVec<T: PlainNumber> {
    memory: DeviceMemory,
    len: usize,
    numbers: PhantomData<T>,
}

impl<T: PlainNumber> fmt::Debug for DeviceVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceVec<{}>({})", std::any::type_name::<T>(), self.len)
    }
}

impl<T: PlainNumber> DeviceVec<T> {
    /// Allocates `len` numbers with unspecified values.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self, CudaError> {
        let Some(bytes) = len.checked_mul(size_of::<T>()) else {
            return Err(CudaError::OutOfMemory { bytes: usize::MAX, free_bytes: cuda.free_bytes()? });
        };
        Ok(Self { memory: DeviceMemory::new(cuda, bytes)?, len, numbers: PhantomData })
    }

    /// Allocates `len` zeros, written in the order of `stream`.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn zeroed(stream: &CudaStream, len: usize) -> Result<Self, CudaError> {
        let mut new = Self::new(stream.cuda(), len)?;
        stream.clear(&mut new, len)?;
        Ok(new)
    }

    /// Allocates a copy of `from`, written in the order of `stream`.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn from_slice(stream: &CudaStream, from: &[T]) -> Result<Self, CudaError> {
        let mut new = Self::new(stream.cuda(), from.len())?;
        stream.upload(from, &mut new, 0)?;
        Ok(new)
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the array has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of all elements.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.memory.cuda
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.memory.address
    }

    pub(super) fn address_of(&self, at: usize) -> CUdeviceptr {
        assert!(at <= self.len, "the number exists");
        self.memory.address + (at * size_of::<T>()) as u64
    }

    /// Copies all elements to the host after the stream's earlier work.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn to_vec(&self, stream: &CudaStream) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); self.len];
        stream.download(self, 0, &mut values)?;
        Ok(values)
    }
}

/// Page-locked numbers of the host that the device reads and writes directly.
///
/// The device may write at any time, so no slice is ever borrowed: callers copy numbers in and out.
pub struct Pinned<T: PlainNumber> {
    cuda: Arc<Cuda>,
    host: NonNull<T>,
    device: CUdeviceptr,
    len: usize,
}

// SAFETY: the memory is owned; it is accessed through atomics and copies alone, never borrowed as a slice.
unsafe impl<T: PlainNumber> Send for Pinned<T> {}
// SAFETY: the memory is owned; it is accessed through atomics and copies alone, never borrowed as a slice.
unsafe impl<T: PlainNumber> Sync for Pinned<T> {}

impl<T: PlainNumber> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned<{}>({})", std::any::type_name::<T>(), self.len)
    }
}

impl<T: PlainNumber> Pinned<T> {
    /// Allocates `len` page-locked zeros.
    ///
    /// # Errors
    /// Fails if the host cannot lock the memory.
    pub fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self, CudaError> {
        cuda.bind()?;
        let bytes = len.saturating_mul(size_of::<T>()).max(1);
        let mut host: *mut c_void = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the call writes the address, which is freed when this is dropped.
        match unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(CudaError::NoLockedMemory { bytes }),
            result => check("lock memory of the host", result)?,
        }
        let mut device = 0;
        // SAFETY: the memory was just allocated, mapped for the device.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
        let Some(start) = NonNull::new(host.cast::<T>()) else {
            return Err(CudaError::NoLockedMemory { bytes });
        };
        let new = Self { cuda: Arc::clone(cuda), host: start, device, len };
        check("reach memory of the host", result)?;
        // SAFETY: the range is the allocation, which no other thread knows yet.
        unsafe { ptr::write_bytes(host.cast::<u8>(), 0, bytes) };
        Ok(new)
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies elements from `at` on into `to`. Concurrent writes of the device may or may not be seen.
    ///
    /// # Panics
    /// Panics if there are too few elements.
    pub fn read(&self, at: usize, to: &mut [T]) {
        assert!(at + to.len() <= self.len, "what is read exists");
        for (index, value) in to.iter_mut().enumerate() {
            // SAFETY: the element exists, and any bits are a value. Volatile: the device may write it.
            *value = unsafe { self.host.add(at + index).read_volatile() };
        }
    }

    /// Copies `from` to the elements from `at` on. The device sees them after the host notifies it.
    ///
    /// # Panics
    /// Panics if `from` exceeds the memory.
    pub fn write(&self, at: usize, from: &[T]) {
        assert!(at + from.len() <= self.len, "what is written has room");
        // SAFETY: the range exists and does not overlap `from`, because page-locked memory is never borrowed as a
        // slice. The device reads the range only after a notification; an earlier read yields unspecified values.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.host.as_ptr().add(at), from.len()) };
    }

    pub(super) fn address_of(&self, at: usize) -> CUdeviceptr {
        assert!(at <= self.len, "the number exists");
        self.device + (at * size_of::<T>()) as u64
    }
}

impl Pinned<u8> {
    /// Returns the host address of the first byte, for copies by the driver.
    pub(super) fn host_address(&self) -> *const c_void {
        self.host.as_ptr().cast_const().cast()
    }
}

impl Pinned<u32> {
    /// Returns element `at`, which device and host both change.
    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at < self.len, "the number exists");
        // SAFETY: the element lives as long as `self`, is aligned, and the host changes it through atomics alone.
        unsafe { AtomicU32::from_ptr(self.host.add(at).as_ptr()) }
    }

    /// Loads element `at` with acquire ordering: the writes before its store are visible.
    #[must_use]
    pub fn load(&self, at: usize) -> u32 {
        self.word(at).load(Ordering::Acquire)
    }

    /// Stores element `at` with release ordering: a load of the value sees the earlier writes.
    pub fn store(&self, at: usize, value: u32) {
        self.word(at).store(value, Ordering::Release);
    }
}

impl<T: PlainNumber> Drop for Pinned<T> {
    fn drop(&mut self) {
        self.cuda.note_free();
        if self.cuda.bind().is_ok() {
            self.cuda.synchronize();
            // SAFETY: `new` allocated the memory. All work of the device is finished, so none still reaches it.
            let _ = unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) };
        }
    }
}

/// Words of memory with another owner, shared also with other processes; accessed through atomics alone.
pub type HostWords = Arc<dyn AsRef<[AtomicU32]> + Send + Sync>;

/// Shared host memory that is registered with the device, which then accesses it directly.
pub struct HostMapping {
    cuda: Arc<Cuda>,
    /// Keeps the memory mapped.
    words: HostWords,
    /// `None` if the memory is not registered.
    device: Option<CUdeviceptr>,
}

impl fmt::Debug for HostMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMapping({})", self.len())
    }
}

impl HostMapping {
    /// Registers `words`, which begin at a page boundary; the whole last page is registered.
    ///
    /// # Errors
    /// Fails if the driver refuses: the memory is already registered, or cannot be locked.
    pub fn register(cuda: &Arc<Cuda>, words: HostWords) -> Result<Self, CudaError> {
        cuda.bind()?;
        let all = (*words).as_ref();
        let start = all.as_ptr().cast_mut().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the words are mapped until `words` is dropped, which is after they are unregistered; they are
        // atomics, so any thread may change them at any time.
        match unsafe { sys::cuMemHostRegister_v2(start, size_of_val(all).max(1), flags) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                return Err(CudaError::NoLockedMemory { bytes: size_of_val(all) });
            }
            result => check("register shared memory", result)?,
        }
        let mut device = 0;
        // SAFETY: the range was just registered, mapped for the device.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, start, 0) };
        let new = Self { cuda: Arc::clone(cuda), words, device: Some(device) };
        check("reach shared memory", result)?;
        Ok(new)
    }

    /// Wraps `words` without registration, which a driver may refuse: only the host and copies reach them.
    #[must_use]
    pub fn unregistered(cuda: &Arc<Cuda>, words: HostWords) -> Self {
        Self { cuda: Arc::clone(cuda), words, device: None }
    }

    /// Whether kernels reach the memory.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.device.is_some()
    }

    /// Returns the number of words.
    #[must_use]
    pub fn len(&self) -> usize {
        (*self.words).as_ref().len()
    }

    /// True if there are no words.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the host address of word `at`, for copies by the driver.
    pub(super) fn host_address_of(&self, at: usize) -> *mut c_void {
        (*self.words).as_ref()[at..].as_ptr().cast_mut().cast()
    }

    pub(super) fn address_of(&self, at: usize) -> CUdeviceptr {
        assert!(at <= self.len(), "the word exists");
        self.device.expect("kernels are given registered memory alone") + (at * size_of::<u32>()) as u64
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        if self.device.is_none() {
            return;
        }
        self.cuda.note_free();
        if self.cuda.bind().is_ok() {
            let start = (*self.words).as_ref().as_ptr().cast_mut().cast::<c_void>();
            self.cuda.synchronize();
            // SAFETY: `register` has registered the memory. All work of the device is finished, so none still reaches
            // it.
            let _ = unsafe { sys::cuMemHostUnregister(start) };
        }
    }
}

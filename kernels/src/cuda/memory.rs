//! Memory of a device, and memory of the host where the device reaches it.

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

/// Numbers that any bit pattern is a value of.
pub trait PlainNumber: Copy + Default + Send + Sync + 'static + sealed::Sealed {}

mod sealed {
    /// Nobody else knows which types these are.
    pub trait Sealed {}
}

macro_rules! plain {
    ($($number:ty),*) => { $(impl PlainNumber for $number {} impl sealed::Sealed for $number {})* };
}

plain!(u8, i8, u16, u32, i32, u64, f32);

/// Memory on the device. Giving it back waits for the device.
struct DeviceMemory {
    cuda: Arc<Cuda>,
    address: CUdeviceptr,
}

impl DeviceMemory {
    fn new(cuda: &Arc<Cuda>, bytes: usize) -> Result<Self, CudaError> {
        cuda.bind()?;
        let mut address = 0;
        // SAFETY: the address is written by the call and freed when this is dropped.
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
            // SAFETY: taken in `new`. The call waits for the device, so nothing under way still uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Numbers on the device.
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
    /// Room for `len` numbers, whose values are unspecified.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self, CudaError> {
        let Some(bytes) = len.checked_mul(size_of::<T>()) else {
            return Err(CudaError::OutOfMemory { bytes: usize::MAX, free_bytes: cuda.free_bytes()? });
        };
        Ok(Self { memory: DeviceMemory::new(cuda, bytes)?, len, numbers: PhantomData })
    }

    /// `len` zeroes, written in the order of `stream`.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn zeroed(stream: &CudaStream, len: usize) -> Result<Self, CudaError> {
        let mut new = Self::new(stream.cuda(), len)?;
        stream.clear(&mut new, len)?;
        Ok(new)
    }

    /// A copy of `from`, made in the order of `stream`.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn from_slice(stream: &CudaStream, from: &[T]) -> Result<Self, CudaError> {
        let mut new = Self::new(stream.cuda(), from.len())?;
        stream.upload(from, &mut new, 0)?;
        Ok(new)
    }

    /// How many numbers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of all of them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device.
    #[must_use]
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.memory.cuda
    }

    /// Where they begin on the device.
    pub(super) fn address(&self) -> CUdeviceptr {
        self.memory.address
    }

    /// Where number `at` lies on the device.
    pub(super) fn address_of(&self, at: usize) -> CUdeviceptr {
        assert!(at <= self.len, "the number exists");
        self.memory.address + (at * size_of::<T>()) as u64
    }

    /// All of them, copied to the host once `stream` has come so far.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn to_vec(&self, stream: &CudaStream) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); self.len];
        stream.download(self, 0, &mut values)?;
        Ok(values)
    }
}

/// Page-locked numbers of the host that the device reads and writes where they lie.
///
/// The device may write them at any time, so they are never seen as a slice: they are copied in and out, by the word.
pub struct Pinned<T: PlainNumber> {
    cuda: Arc<Cuda>,
    host: NonNull<T>,
    device: CUdeviceptr,
    len: usize,
}

// SAFETY: the memory is owned; it is touched through atomics and copies alone, never seen as a slice.
unsafe impl<T: PlainNumber> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T: PlainNumber> Sync for Pinned<T> {}

impl<T: PlainNumber> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned<{}>({})", std::any::type_name::<T>(), self.len)
    }
}

impl<T: PlainNumber> Pinned<T> {
    /// `len` zeroes.
    ///
    /// # Errors
    ///
    /// The host has no room that may be locked.
    pub fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self, CudaError> {
        cuda.bind()?;
        let bytes = len.saturating_mul(size_of::<T>()).max(1);
        let mut host: *mut c_void = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the address is written by the call and freed when this is dropped.
        match unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(CudaError::NoLockedMemory { bytes }),
            result => check("lock memory of the host", result)?,
        }
        let mut device = 0;
        // SAFETY: the memory was just taken, mapped for the device.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
        let Some(start) = NonNull::new(host.cast::<T>()) else {
            return Err(CudaError::NoLockedMemory { bytes });
        };
        let new = Self { cuda: Arc::clone(cuda), host: start, device, len };
        check("reach memory of the host", result)?;
        // SAFETY: the range is the allocation, and nobody else knows it yet.
        unsafe { ptr::write_bytes(host.cast::<u8>(), 0, bytes) };
        Ok(new)
    }

    /// How many numbers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies numbers `at..` into `to`. What the device writes meanwhile may or may not be among them.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    pub fn read(&self, at: usize, to: &mut [T]) {
        assert!(at + to.len() <= self.len, "what is read exists");
        for (index, value) in to.iter_mut().enumerate() {
            // SAFETY: the number exists, and any bits are a value. Volatile: the device may write it.
            *value = unsafe { self.host.add(at + index).read_volatile() };
        }
    }

    /// Copies `from` to numbers `at..`. The device sees them once it is told, in whatever order it is told.
    ///
    /// # Panics
    ///
    /// If there is no room.
    pub fn write(&self, at: usize, from: &[T]) {
        assert!(at + from.len() <= self.len, "what is written has room");
        // SAFETY: the range exists and is not `from`: page-locked memory is never seen as a slice. If the device reads it
        // meanwhile, it reads what it was not told of.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.host.as_ptr().add(at), from.len()) };
    }

    /// Where number `at` lies for the device.
    pub(super) fn address_of(&self, at: usize) -> CUdeviceptr {
        assert!(at <= self.len, "the number exists");
        self.device + (at * size_of::<T>()) as u64
    }
}

impl Pinned<u8> {
    /// Where it begins for the host, for copies by the driver.
    pub(super) fn host_address(&self) -> *const c_void {
        self.host.as_ptr().cast_const().cast()
    }
}

impl Pinned<u32> {
    /// Number `at`, which device and host both change.
    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at < self.len, "the number exists");
        // SAFETY: the number exists for as long as `self`, is aligned, and the host changes it through atomics alone.
        unsafe { AtomicU32::from_ptr(self.host.add(at).as_ptr()) }
    }

    /// Loads number `at`: what whoever stored it wrote before is seen.
    #[must_use]
    pub fn load(&self, at: usize) -> u32 {
        self.word(at).load(Ordering::Acquire)
    }

    /// Stores number `at`: whoever loads it sees what was written before.
    pub fn store(&self, at: usize, value: u32) {
        self.word(at).store(value, Ordering::Release);
    }
}

impl<T: PlainNumber> Drop for Pinned<T> {
    fn drop(&mut self) {
        self.cuda.note_free();
        if self.cuda.bind().is_ok() {
            self.cuda.synchronize();
            // SAFETY: taken in `new`. All work of the device is finished: none still reaches this memory.
            let _ = unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) };
        }
    }
}

/// Words of memory that somebody else owns and shares, other processes too: atomics alone.
pub type HostWords = Arc<dyn AsRef<[AtomicU32]> + Send + Sync>;

/// Shared memory of the host that was registered with the device, which then reads and writes it where it lies.
pub struct HostMapping {
    cuda: Arc<Cuda>,
    /// Keeps the memory mapped.
    words: HostWords,
    /// `None`: it is not registered.
    device: Option<CUdeviceptr>,
}

impl fmt::Debug for HostMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMapping({})", self.len())
    }
}

impl HostMapping {
    /// Registers `words`, which begin at a page; their last page is registered whole.
    ///
    /// # Errors
    ///
    /// The driver refuses: the memory is registered already, or may not be locked.
    pub fn register(cuda: &Arc<Cuda>, words: HostWords) -> Result<Self, CudaError> {
        cuda.bind()?;
        let all = (*words).as_ref();
        let start = all.as_ptr().cast_mut().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the words are mapped until `words` is dropped, which is after they are unregistered; they are atomics,
        // so anybody may change them at any time.
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

    /// `words` where the driver registers no memory of others: only the host reaches it, and the driver's copies.
    #[must_use]
    pub fn unregistered(cuda: &Arc<Cuda>, words: HostWords) -> Self {
        Self { cuda: Arc::clone(cuda), words, device: None }
    }

    /// Whether kernels reach it.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.device.is_some()
    }

    /// How many words there are.
    #[must_use]
    pub fn len(&self) -> usize {
        (*self.words).as_ref().len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where word `at` lies for the host, for copies by the driver.
    pub(super) fn host_address_of(&self, at: usize) -> *mut c_void {
        (*self.words).as_ref()[at..].as_ptr().cast_mut().cast()
    }

    /// Where word `at` lies for the device.
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
            // SAFETY: registered in `register`. All work of the device is finished: none still reaches it.
            let _ = unsafe { sys::cuMemHostUnregister(start) };
        }
    }
}

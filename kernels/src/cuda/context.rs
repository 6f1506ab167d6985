//! A device opened for this process: its context, its properties, and the loaded kernels.

use std::{
    cell::Cell,
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::Path,
    ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUfunction, CUjit_option, CUmodule, CUresult,
};

use super::{
    cubins::{self, CubinError, Cubins, KernelCode},
    error::{CudaError, check, reason},
    modules::{KernelEntry, MODULES, entries, text_for},
};

/// Minimum compute capability of the kernels.
const LEAST_CAPABILITY: (u32, u32) = (8, 0);

/// Maximum bytes of the compiler's error log.
const LOG_BYTES: usize = 4096;

/// Maximum number of threads that compile modules.
const MAX_COMPILERS: usize = 8;

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Ordinal of the device, from 0.
    pub ordinal: u32,
    /// Product name of the device.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Total memory in bytes.
    pub memory_bytes: usize,
    /// Maximum bytes of shared memory per block (opt-in).
    pub shared_bytes: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: usize,
    /// CUDA version of the driver, major and minor.
    pub driver: (u32, u32),
}

pub(super) struct Function {
    pub(super) raw: CUfunction,
    pub(super) parameters: Vec<u32>,
    /// Whether the kernel may start before earlier work of its stream has ended, because it waits itself.
    pub(super) begins_early: bool,
    /// Bytes of dynamic shared memory that were allowed so far.
    pub(super) allowed_shared: AtomicU32,
}

// SAFETY: a function's handle is a constant of its context, which any thread may use.
unsafe impl Send for Function {}
// SAFETY: a function's handle is a constant of its context; the one mutable field is atomic.
unsafe impl Sync for Function {}

struct CudaModule {
    raw: CUmodule,
    functions: Vec<(&'static str, Function)>,
    /// Reason of the driver for refusing the machine code of the module, whose PTX it then compiled.
    refused: Option<String>,
}

// SAFETY: a module's handle is a constant of its context, which any thread may use.
unsafe impl Send for CudaModule {}

/// A device's primary context with all kernels loaded.
pub struct Cuda {
    device: CUdevice,
    context: CUcontext,
    /// Number of this opening. Unlike a context's address, the number is never reused.
    opening: u64,
    info: DeviceInfo,
    functions: HashMap<&'static str, Function>,
    modules: Vec<CUmodule>,
    code: KernelCode,
    /// Number of frees so far; each free invalidates recorded launches.
    frees: AtomicU64,
    /// Held while a CUDA graph is recorded and while a thread waits for the whole device: such a wait
    /// invalidates all recordings, those of other threads too.
    recording: Mutex<()>,
}

// SAFETY: any thread may use the driver's objects while this context is current, which `bind` ensures.
unsafe impl Send for Cuda {}
// SAFETY: any thread may use the objects while this context is current; mutable fields are atomic or locked.
unsafe impl Sync for Cuda {}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.fmt(f)
    }
}

static OPENINGS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Opening whose context `bind` last made current in this thread; 0 for none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };

    static IS_RECORDING: Cell<bool> = const { Cell::new(false) };
}

impl Cuda {
    /// Opens device `ordinal` and loads the kernels: from the machine code beside the program if there is a
    /// file for this device, otherwise from PTX. To compile PTX takes seconds the first time; then the driver
    /// caches the result.
    ///
    /// # Errors
    /// Fails if there is no driver or no such device, or if the device or the driver is too old.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        Self::open_with_cubins(ordinal, cubins::folder().as_deref())
    }

    /// Opens device `ordinal` like [`open`](Self::open), with machine code from `folder`. A file that cannot
    /// be used is no error: [`kernel_code`](Self::kernel_code) says why PTX was compiled instead.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_with_cubins(ordinal: u32, folder: Option<&Path>) -> Result<Arc<Self>, CudaError> {
        // SAFETY: looking for the library runs only its initialisers.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        start_driver()?;
        let device = device(ordinal)?;
        let info = info(device, ordinal)?;
        let (major, minor) = info.capability;
        if info.capability < LEAST_CAPABILITY {
            return Err(CudaError::TooOld { ordinal, name: info.name, major, minor });
        }
        let mut context = ptr::null_mut();
        // SAFETY: the device exists; the context is released when this is dropped.
        match unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) } {
            CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => return Err(CudaError::Taken { ordinal }),
            result => check("be opened", result)?,
        }
        let opening = OPENINGS.fetch_add(1, Ordering::Relaxed) + 1;
        let (functions, modules, frees) = (HashMap::new(), Vec::new(), AtomicU64::new(0));
        let (recording, code) = (Mutex::new(()), KernelCode::Ptx);
        let mut cuda = Self { device, context, opening, info, functions, modules, code, frees, recording };
        cuda.bind()?;
        let cubins = cuda.find_cubins(folder);
        for ((name, _), module) in MODULES.iter().zip(cuda.load_all(cubins.as_ref())) {
            cuda.keep(name, module?);
        }
        Ok(Arc::new(cuda))
    }

    /// Reads the machine code for this device, and notes where the kernels come from.
    fn find_cubins(&mut self, folder: Option<&Path>) -> Option<Cubins> {
        let found = Cubins::read(folder?, self.info.capability, MODULES);
        self.code = match &found {
            Ok(None) => KernelCode::Ptx,
            Ok(Some(cubins)) => KernelCode::Cubins(cubins.path.clone()),
            Err(error) => KernelCode::PtxInstead(error.clone()),
        };
        found.ok().flatten()
    }

    fn keep(&mut self, module: &'static str, loaded: CudaModule) {
        let CudaModule { raw, functions, refused } = loaded;
        if let Some(reason) = refused {
            self.code = KernelCode::PtxInstead(CubinError::Refused { module, reason });
        }
        self.modules.push(raw);
        for (name, function) in functions {
            let known = self.functions.insert(name, function);
            assert!(known.is_none(), "two kernels are called {name}");
        }
    }

    /// Returns where the machine code of the kernels came from.
    #[must_use]
    pub fn kernel_code(&self) -> &KernelCode {
        &self.code
    }

    /// Returns the properties of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns the bytes that are now free on the device.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call writes both values.
        check("say how much memory is free", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free)
    }

    pub(super) fn frees(&self) -> u64 {
        self.frees.load(Ordering::Acquire)
    }

    pub(super) fn note_free(&self) {
        self.frees.fetch_add(1, Ordering::Release);
    }

    /// Calls `record` while no thread waits for the whole device.
    pub(super) fn recording<R>(&self, record: impl FnOnce() -> R) -> R {
        let _alone = self.lock();
        IS_RECORDING.set(true);
        let recorded = catch_unwind(AssertUnwindSafe(record));
        IS_RECORDING.set(false);
        recorded.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Waits until the device has finished all enqueued work.
    pub(super) fn synchronize(&self) {
        // A thread that frees memory while it records invalidates its own recording, which then reports an error.
        let _alone = (!IS_RECORDING.get()).then(|| self.lock());
        // SAFETY: the caller has bound the context. An error here cannot be handled.
        let _ = unsafe { sys::cuCtxSynchronize() };
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes this device's context current in this thread; every driver call requires that.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        CURRENT.with(|current| {
            if current.get() != self.opening {
                // SAFETY: the context is retained while `self` lives.
                check("be used by this thread", unsafe { sys::cuCtxSetCurrent(self.context) })?;
                current.set(self.opening);
            }
            Ok(())
        })
    }

    /// Returns the kernel `name`.
    ///
    /// # Panics
    /// Panics if there is no such kernel: launchers name only kernels of their own source.
    pub(super) fn function(&self, name: &str) -> &Function {
        self.functions.get(name).unwrap_or_else(|| panic!("no kernel is called {name}"))
    }

    /// Loads all modules in several threads, because to compile one takes seconds the first time. The result
    /// is in the order of [`MODULES`].
    fn load_all(&self, cubins: Option<&Cubins>) -> Vec<Result<CudaModule, CudaError>> {
        let mut order: Vec<usize> = (0..MODULES.len()).collect();
        // The longest come first, so that the last modules to start are short.
        order.sort_by_key(|&index| std::cmp::Reverse(MODULES[index].1.len()));
        let (next, loaded) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(MODULES.len())));
        let compile = || {
            while let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                let (name, ptx) = MODULES[index];
                let cubin = cubins.and_then(|cubins| cubins.image(name));
                let module = self.bind().and_then(|()| load(name, ptx, cubin, self.info.capability));
                loaded.lock().unwrap_or_else(PoisonError::into_inner).push((index, module));
            }
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 1..cores.min(MAX_COMPILERS) {
                // If no thread can be started, this thread compiles all modules.
                let _ = thread::Builder::new().name("cuda-compiler".to_owned()).spawn_scoped(scope, compile);
            }
            compile();
        });
        let mut loaded = loaded.into_inner().unwrap_or_else(PoisonError::into_inner);
        loaded.sort_by_key(|&(index, _)| index);
        loaded.into_iter().map(|(_, module)| module).collect()
    }
}

/// Loads a module from its machine code, or from PTX if there is none or the driver refuses it.
fn load(
    name: &'static str,
    ptx: &'static str,
    cubin: Option<&[u8]>,
    capability: (u32, u32),
) -> Result<CudaModule, CudaError> {
    let mut text = text_for(ptx, capability).into_bytes();
    // The driver expects a zero-terminated text.
    text.push(0);
    match cubin.map(|image| load_image(name, image, ptx, capability)) {
        None => load_image(name, &text, ptx, capability),
        Some(Ok(module)) => Ok(module),
        Some(Err(error)) => {
            let module = load_image(name, &text, ptx, capability)?;
            let reason = match error {
                CudaError::Module { reason, .. } => reason,
                error => error.to_string(),
            };
            Ok(CudaModule { refused: Some(reason), ..module })
        }
    }
}

/// Loads an image that ends in a zero: a whole cubin, or PTX.
fn load_image(
    name: &'static str,
    image: &[u8],
    ptx: &'static str,
    capability: (u32, u32),
) -> Result<CudaModule, CudaError> {
    let mut log = [0u8; LOG_BYTES];
    let mut options =
        [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES)];
    let mut raw = ptr::null_mut();
    // SAFETY: 1. The image ends in a zero: text, or a cubin whose hash is that which was written beside it.
    // 2. There are two options with a value each, of the types that the driver documents: a buffer, and its size in
    // the pointer itself. 3. All of it outlives the call.
    let result = unsafe {
        sys::cuModuleLoadDataEx(&mut raw, image.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
    };
    if result != CUresult::CUDA_SUCCESS {
        let said = CStr::from_bytes_until_nul(&log).map_or_else(|_| "".into(), CStr::to_string_lossy);
        let reason = format!("{} {}", reason(result), said.trim());
        return Err(CudaError::Module { module: name, reason: reason.trim_end().to_owned() });
    }
    let kernel = |entry: KernelEntry| {
        let KernelEntry { name: kernel, parameters, begins_early } = entry;
        let raw = find(raw, name, kernel)?;
        Ok((kernel, Function { raw, parameters, begins_early, allowed_shared: AtomicU32::new(0) }))
    };
    let functions = entries(ptx, capability).map(kernel).collect::<Result<_, CudaError>>();
    functions.map(|functions| CudaModule { raw, functions, refused: None }).inspect_err(|_| {
        // SAFETY: the module was loaded above, and none of its functions is used.
        let _ = unsafe { sys::cuModuleUnload(raw) };
    })
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            for module in self.modules.drain(..) {
                // SAFETY: the module was loaded by `open`, and every user of its kernels holds `self`.
                let _ = unsafe { sys::cuModuleUnload(module) };
            }
        }
        // SAFETY: `open` has retained the context. An error here cannot be handled.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn find(module: CUmodule, name: &'static str, entry: &str) -> Result<CUfunction, CudaError> {
    let mut text = entry.as_bytes().to_vec();
    text.push(0);
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded, the name ends in a zero.
    let mut result =
        unsafe { sys::cuModuleGetFunction(&mut function, module, text.as_ptr().cast::<c_char>()) };
    if result == CUresult::CUDA_SUCCESS {
        // SAFETY: the function was just found. Drivers that accept these modules have the call, which came with CUDA
        // 12.4. Without the call, the driver may load a kernel lazily at its first launch and then wait for the whole
        // device. That wait would include streams that wait for the host, and would invalidate a recording.
        result = unsafe { sys::cuFuncLoad(function) };
    }
    if result == CUresult::CUDA_SUCCESS {
        return Ok(function);
    }
    Err(CudaError::Module { module: name, reason: format!("{entry}: {}", reason(result)) })
}

fn start_driver() -> Result<(), CudaError> {
    // SAFETY: the library is loaded; `cuInit` may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(CudaError::NoDevice { ordinal: 0, found: 0 }),
        result => Err(CudaError::Driver { reason: reason(result) }),
    }
}

fn device(ordinal: u32) -> Result<CUdevice, CudaError> {
    let mut found: c_int = 0;
    // SAFETY: the call writes the count.
    check("count devices", unsafe { sys::cuDeviceGetCount(&mut found) })?;
    let found = u32::try_from(found).unwrap_or(0);
    let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < found);
    let Some(number) = number else { return Err(CudaError::NoDevice { ordinal, found }) };
    let mut device = 0;
    // SAFETY: the device is one of those counted.
    check("be found", unsafe { sys::cuDeviceGet(&mut device, number) })?;
    Ok(device)
}

fn info(device: CUdevice, ordinal: u32) -> Result<DeviceInfo, CudaError> {
    use CUdevice_attribute as A;
    let attribute = |which| {
        let mut value: c_int = 0;
        // SAFETY: the device exists; the call writes the value.
        check("describe itself", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0 as c_char; 128];
    // SAFETY: the driver writes at most `name.len()` bytes, the last of them a zero.
    check("name itself", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device) })?;
    // SAFETY: the driver has written a zero-terminated string.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0;
    // SAFETY: the device exists; the call writes the size.
    check("measure its memory", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
    let mut version: c_int = 0;
    // SAFETY: the call writes the version.
    check("say its driver's version", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    let version = u32::try_from(version).unwrap_or(0);
    Ok(DeviceInfo {
        ordinal,
        name,
        capability: (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes,
        shared_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        driver: (version / 1000, version % 1000 / 10),
    })
}

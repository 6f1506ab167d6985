//! A device, opened for this process: its context, its facts, the kernels loaded.

use std::{
    cell::Cell,
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
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
    error::{CudaError, check, reason},
    modules::{KernelEntry, MODULES, entries, text_for},
};

/// The oldest compute capability that the kernels run on.
const LEAST_CAPABILITY: (u32, u32) = (8, 0);

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 4096;

/// Most threads that have the driver compile.
const MAX_COMPILERS: usize = 8;

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// All of its memory.
    pub memory_bytes: usize,
    /// Bytes of shared memory that a block may ask for.
    pub shared_bytes: u32,
    /// Bytes of its second-level cache.
    pub l2_bytes: usize,
    /// CUDA version that the driver speaks, major and minor.
    pub driver: (u32, u32),
}

/// A loaded kernel.
pub(super) struct Function {
    pub(super) raw: CUfunction,
    /// Bytes of each of its parameters.
    pub(super) parameters: Vec<u32>,
    /// Whether it may begin before what is in front of it in its stream has ended: it waits itself.
    pub(super) begins_early: bool,
    /// Bytes of dynamic shared memory that it was allowed so far.
    pub(super) allowed_shared: AtomicU32,
}

// SAFETY: a function's handle is a constant of its context, which any thread may use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A loaded module and its kernels.
struct CudaModule {
    raw: CUmodule,
    functions: Vec<(&'static str, Function)>,
}

// SAFETY: a module's handle is a constant of its context, which any thread may use.
unsafe impl Send for CudaModule {}

/// A device's primary context with all kernels loaded.
pub struct Cuda {
    device: CUdevice,
    context: CUcontext,
    /// Which opening of a device this is. A context's address may come again, this does not.
    opening: u64,
    info: DeviceInfo,
    functions: HashMap<&'static str, Function>,
    modules: Vec<CUmodule>,
    /// How often memory was given back: records of launches are worth nothing from then on.
    frees: AtomicU64,
    /// Held while a record is made, and while somebody waits for the whole device: such a wait spoils all records that are
    /// being made, other threads' too.
    recording: Mutex<()>,
}

// SAFETY: the driver's objects may be used from any thread whose current context is ours, which `bind` sees to.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.fmt(f)
    }
}

/// How often a device was opened.
static OPENINGS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The opening whose context is current in this thread, as far as we made it so; 0: none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };

    /// Whether this thread makes a record.
    static IS_RECORDING: Cell<bool> = const { Cell::new(false) };
}

impl Cuda {
    /// Opens device `ordinal` and has the driver compile the kernels for it, which takes seconds the first time: the
    /// driver keeps what it compiled.
    ///
    /// # Errors
    ///
    /// There is no driver or no such device, it is too old, or the driver is.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
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
        let recording = Mutex::new(());
        let mut cuda = Self { device, context, opening, info, functions, modules, frees, recording };
        cuda.bind()?;
        let loaded = cuda.load_all();
        for module in loaded {
            let CudaModule { raw, functions } = module?;
            cuda.modules.push(raw);
            for (name, function) in functions {
                let known = cuda.functions.insert(name, function);
                assert!(known.is_none(), "two kernels are called {name}");
            }
        }
        Ok(Arc::new(cuda))
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Bytes that are free on the device now.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written by the call.
        check("say how much memory is free", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free)
    }

    /// How often memory was given back.
    pub(super) fn frees(&self) -> u64 {
        self.frees.load(Ordering::Acquire)
    }

    /// Memory is given back.
    pub(super) fn note_free(&self) {
        self.frees.fetch_add(1, Ordering::Release);
    }

    /// Calls `record`, during which nobody waits for the whole device.
    pub(super) fn recording<R>(&self, record: impl FnOnce() -> R) -> R {
        let _alone = self.lock();
        IS_RECORDING.set(true);
        let recorded = catch_unwind(AssertUnwindSafe(record));
        IS_RECORDING.set(false);
        recorded.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Waits until the device has done all that it was given.
    pub(super) fn synchronize(&self) {
        // Who drops memory while it makes a record spoils that record, which says so.
        let _alone = (!IS_RECORDING.get()).then(|| self.lock());
        // SAFETY: the caller has bound the context. What fails here cannot be helped.
        let _ = unsafe { sys::cuCtxSynchronize() };
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes this device's context the current one of this thread; every call into the driver needs that.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        CURRENT.with(|current| {
            if current.get() != self.opening {
                // SAFETY: the context is retained for as long as `self` lives.
                check("be used by this thread", unsafe { sys::cuCtxSetCurrent(self.context) })?;
                current.set(self.opening);
            }
            Ok(())
        })
    }

    /// The kernel of this name.
    ///
    /// # Panics
    ///
    /// If there is none: launchers name what their own source defines.
    pub(super) fn function(&self, name: &str) -> &Function {
        self.functions.get(name).unwrap_or_else(|| panic!("no kernel is called {name}"))
    }

    /// Has the driver compile and load all modules, in several threads: the first time takes seconds of each. In the
    /// order of [`MODULES`].
    fn load_all(&self) -> Vec<Result<CudaModule, CudaError>> {
        let mut order: Vec<usize> = (0..MODULES.len()).collect();
        // The longest first: what is begun last should be done soon.
        order.sort_by_key(|&index| std::cmp::Reverse(MODULES[index].1.len()));
        let (next, loaded) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(MODULES.len())));
        let compile = || {
            while let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                let (name, ptx) = MODULES[index];
                let module = self.bind().and_then(|()| load(name, ptx, self.info.capability));
                loaded.lock().unwrap_or_else(PoisonError::into_inner).push((index, module));
            }
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 1..cores.min(MAX_COMPILERS) {
                // Without another thread, this one does it all.
                let _ = thread::Builder::new().name("cuda-compiler".to_owned()).spawn_scoped(scope, compile);
            }
            compile();
        });
        let mut loaded = loaded.into_inner().unwrap_or_else(PoisonError::into_inner);
        loaded.sort_by_key(|&(index, _)| index);
        loaded.into_iter().map(|(_, module)| module).collect()
    }
}

/// Loads a module into this thread's context.
fn load(name: &'static str, ptx: &'static str, capability: (u32, u32)) -> Result<CudaModule, CudaError> {
    let mut image = text_for(ptx, capability).into_bytes();
    // The driver wants the text to end in a zero.
    image.push(0);
    let mut log = [0u8; LOG_BYTES];
    let mut options =
        [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES)];
    let mut raw = ptr::null_mut();
    // SAFETY: 1. The image is text that ends in a zero. 2. There are two options with a value each, of the types the
    // driver documents: a buffer, and its size in the pointer itself. 3. All of it outlives the call.
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
    functions.map(|functions| CudaModule { raw, functions }).inspect_err(|_| {
        // SAFETY: it was loaded here, and nothing of it is used.
        let _ = unsafe { sys::cuModuleUnload(raw) };
    })
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            for module in self.modules.drain(..) {
                // SAFETY: it was loaded here, and whoever launches from it holds `self`.
                let _ = unsafe { sys::cuModuleUnload(module) };
            }
        }
        // SAFETY: retained in `open`. What fails here cannot be helped.
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
        // By itself the driver may bring a kernel to the device at its first launch, and wait for the whole device then:
        // for streams that wait for the host, too, and in the middle of a record.
        // SAFETY: the function was just found. Drivers that take these modules have the call, which came with CUDA 12.4.
        result = unsafe { sys::cuFuncLoad(function) };
    }
    if result == CUresult::CUDA_SUCCESS {
        return Ok(function);
    }
    Err(CudaError::Module { module: name, reason: format!("{entry}: {}", reason(result)) })
}

fn start_driver() -> Result<(), CudaError> {
    // SAFETY: the library is there; its initialisation may be called any number of times.
    match unsafe { sys::cuInit(0) } {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(CudaError::NoDevice { ordinal: 0, found: 0 }),
        result => Err(CudaError::Driver { reason: reason(result) }),
    }
}

fn device(ordinal: u32) -> Result<CUdevice, CudaError> {
    let mut found: c_int = 0;
    // SAFETY: the count is written by the call.
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
        // SAFETY: the device exists; the value is written by the call.
        check("describe itself", unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) })?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0 as c_char; 128];
    // SAFETY: the driver writes at most so many bytes, the last of them a zero.
    check("name itself", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device) })?;
    // SAFETY: the driver has written a string.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0;
    // SAFETY: the device exists; the size is written by the call.
    check("measure its memory", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
    let mut version: c_int = 0;
    // SAFETY: the version is written by the call.
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

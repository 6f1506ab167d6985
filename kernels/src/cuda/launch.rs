//! The only module that launches kernels.

use std::{ffi::c_void, sync::atomic::Ordering};

use cudarc::driver::sys::{
    self, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig,
};

use super::{
    context::Function,
    error::{CudaError, check},
    stream::CudaStream,
};

/// Bytes of dynamic shared memory that every kernel may use without an explicit attribute.
const SHARED_BYTES: u32 = 48 << 10;

const MAX_ARGUMENTS: usize = 40;

#[derive(Debug, Clone, Copy)]
pub(super) enum Arg {
    /// A pointer to memory that the device reaches; 0 for none.
    Ptr(u64),
    /// An `unsigned` of 32 bits.
    U32(u32),
    /// `unsigned long long` or `size_t`.
    U64(u64),
    /// A `float` of 32 bits.
    F32(f32),
}

impl Arg {
    /// Returns the number of bytes that the driver copies.
    fn bytes(self) -> u32 {
        match self {
            Self::Ptr(_) | Self::U64(_) => 8,
            Self::U32(_) | Self::F32(_) => 4,
        }
    }

    /// Returns the address of the value itself, which the driver expects.
    fn address(&mut self) -> *mut c_void {
        match self {
            Self::Ptr(value) | Self::U64(value) => std::ptr::from_mut(value).cast(),
            Self::U32(value) => std::ptr::from_mut(value).cast(),
            Self::F32(value) => std::ptr::from_mut(value).cast(),
        }
    }
}

/// Grid, threads per block, and shared memory of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchShape {
    /// Number of blocks; y and z at most 65,535.
    pub(super) grid: [u32; 3],
    /// Threads per block, at most 1,024.
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    /// Whether the launch starts only after all earlier work, even if the kernel may begin early.
    pub(super) in_order: bool,
}

impl LaunchShape {
    pub(super) fn line(blocks: usize, threads: u32) -> Self {
        Self { grid: [count(blocks), 1, 1], threads, shared_bytes: 0, in_order: false }
    }

    pub(super) fn plane(x: usize, y: usize, threads: u32) -> Self {
        Self { grid: [count(x), count(y), 1], threads, shared_bytes: 0, in_order: false }
    }

    /// Disables the early start, for launches that read output of the previous kernel before their own wait.
    pub(super) fn in_order(self) -> Self {
        Self { in_order: true, ..self }
    }

    pub(super) fn sharing(self, bytes: usize) -> Self {
        Self { shared_bytes: count(bytes), ..self }
    }
}

/// Converts a size to a kernel argument.
///
/// # Panics
/// Panics if the size exceeds 32 bits; shapes are bounded far below.
pub(super) fn count(of: usize) -> u32 {
    u32::try_from(of).expect("shapes fit 32 bits")
}

/// Enqueues kernel `name` on `stream`; a grid without blocks launches nothing. A kernel that waits itself for
/// earlier work (`await_front` in `common.cuh`) begins early, unless its shape is
/// [`in_order`](LaunchShape::in_order).
///
/// # Errors
/// Fails if the driver refuses the launch or the device is lost.
///
/// # Safety
/// 1. The arguments match the kernel's declaration in number, order and type.
/// 2. Each pointer refers to memory of the stream's device, or memory registered with it. The memory is as
///    large as the kernel expects and stays valid until the kernel has run.
/// 3. Other work writes the kernel's inputs, or reads or writes its outputs, only in the order of the stream.
/// 4. Data that an early kernel reads before its wait is not produced by the preceding kernel.
pub(super) unsafe fn launch(
    stream: &CudaStream,
    name: &str,
    shape: LaunchShape,
    arguments: &[Arg],
) -> Result<(), CudaError> {
    if shape.grid.contains(&0) {
        return Ok(());
    }
    let cuda = stream.cuda();
    cuda.bind()?;
    let function = cuda.function(name);
    allow_shared(function, shape.shared_bytes)?;
    assert!(arguments.len() <= MAX_ARGUMENTS, "{name} has too many arguments");
    // The driver does not know the number and sizes of the arguments; it would copy any bytes at these addresses.
    debug_assert!(
        arguments.iter().map(|argument| argument.bytes()).eq(function.parameters.iter().copied()),
        "{name} is not declared with such arguments"
    );
    let mut values = [Arg::U32(0); MAX_ARGUMENTS];
    let values = &mut values[..arguments.len()];
    values.copy_from_slice(arguments);
    let mut addresses = [std::ptr::null_mut(); MAX_ARGUMENTS];
    for (address, value) in addresses.iter_mut().zip(values) {
        *address = value.address();
    }
    let [x, y, z] = shape.grid;
    let mut attributes = [begins_early()];
    let config = CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: shape.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared_bytes,
        hStream: stream.raw(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: u32::from(function.begins_early && !shape.in_order),
    };
    let parameters = addresses.as_mut_ptr();
    // SAFETY: the caller guarantees the arguments; the driver copies them and the attributes before it returns.
    let result = unsafe { sys::cuLaunchKernelEx(&config, function.raw, parameters, std::ptr::null_mut()) };
    check("launch a kernel", result)
}

/// Returns the launch attribute that lets a kernel begin while the preceding kernel still runs.
fn begins_early() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

/// Raises a kernel's limit of dynamic shared memory, as the driver requires once per kernel above the
/// default.
fn allow_shared(function: &Function, bytes: u32) -> Result<(), CudaError> {
    if bytes <= SHARED_BYTES || bytes <= function.allowed_shared.load(Ordering::Relaxed) {
        return Ok(());
    }
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function is loaded; the driver refuses a size beyond the device's limit.
    let result = unsafe { sys::cuFuncSetAttribute(function.raw, attribute, bytes.cast_signed()) };
    check("give a kernel more shared memory", result)?;
    function.allowed_shared.store(bytes, Ordering::Relaxed);
    Ok(())
}

/// Appends the suffix of an element kind to a kernel's name: `by_kind!("add_norm", kind)`.
macro_rules! by_kind {
    ($name:literal, $kind:expr) => {
        match $kind {
            $crate::lora::ElementKind::F32 => concat!($name, "_f32"),
            $crate::lora::ElementKind::F16 => concat!($name, "_f16"),
            $crate::lora::ElementKind::Bf16 => concat!($name, "_bf16"),
        }
    };
}
pub(super) use by_kind;

//! The one place that launches kernels.

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

/// Bytes of dynamic shared memory that a kernel may have without being allowed more.
const SHARED_BYTES: u32 = 48 << 10;

/// Most arguments of a kernel.
const MAX_ARGUMENTS: usize = 40;

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) enum Arg {
    /// A pointer to memory that the device reaches; 0 where there is none.
    Ptr(u64),
    /// `unsigned`.
    U32(u32),
    /// `unsigned long long`, `size_t`.
    U64(u64),
    /// `float`.
    F32(f32),
}

impl Arg {
    /// Bytes that the driver copies of it.
    fn bytes(self) -> u32 {
        match self {
            Self::Ptr(_) | Self::U64(_) => 8,
            Self::U32(_) | Self::F32(_) => 4,
        }
    }

    /// Where the value itself lies, which is all the driver wants to know.
    fn address(&mut self) -> *mut c_void {
        match self {
            Self::Ptr(value) | Self::U64(value) => std::ptr::from_mut(value).cast(),
            Self::U32(value) => std::ptr::from_mut(value).cast(),
            Self::F32(value) => std::ptr::from_mut(value).cast(),
        }
    }
}

/// How many blocks of how many threads, and what each block shares.
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchShape {
    /// Blocks; y and z at most 65,535.
    pub(super) grid: [u32; 3],
    /// Threads of a block, at most 1,024.
    pub(super) threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(super) shared_bytes: u32,
    /// Whether it begins only when what is in front of it has ended, whatever the kernel may.
    pub(super) in_order: bool,
}

impl LaunchShape {
    /// `blocks` blocks of `threads` threads in a row.
    pub(super) fn line(blocks: usize, threads: u32) -> Self {
        Self { grid: [count(blocks), 1, 1], threads, shared_bytes: 0, in_order: false }
    }

    /// A grid of two dimensions.
    pub(super) fn plane(x: usize, y: usize, threads: u32) -> Self {
        Self { grid: [count(x), count(y), 1], threads, shared_bytes: 0, in_order: false }
    }

    /// For a kernel that is given what the one in front of it makes where it reads before it waits.
    pub(super) fn in_order(self) -> Self {
        Self { in_order: true, ..self }
    }

    /// With so much dynamic shared memory for each block.
    pub(super) fn sharing(self, bytes: usize) -> Self {
        Self { shared_bytes: count(bytes), ..self }
    }
}

/// A size as kernels take it.
///
/// # Panics
///
/// If it does not fit 32 bits: shapes are bounded far below.
pub(super) fn count(of: usize) -> u32 {
    u32::try_from(of).expect("shapes fit 32 bits")
}

/// Enqueues kernel `name` on `stream`. A grid without blocks is no launch. A kernel that waits itself for what is in front of it
/// (`await_front` in `common.cuh`) begins before that has ended, unless its shape is [`in_order`](LaunchShape::in_order).
///
/// # Errors
///
/// The driver refuses it, or the device is lost.
///
/// # Safety
///
/// The arguments are those the kernel is declared with, in number, order and type; what pointers point to is memory of
/// the stream's device (or registered with it), as large as the kernel takes it to be, and stays so until the kernel
/// has run; nobody else writes what it reads or reads what it writes except in the order of the stream. What a kernel that
/// begins early reads before it waits is not made by the one in front.
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
    // The driver knows neither how many there are nor how long they are: it would copy whatever lies there.
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
    // SAFETY: the arguments are the kernel's (the caller's promise); the driver copies them and the attributes before it
    // returns.
    let result = unsafe { sys::cuLaunchKernelEx(&config, function.raw, parameters, std::ptr::null_mut()) };
    check("launch a kernel", result)
}

/// What lets a kernel begin while the one in front of it still runs.
fn begins_early() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

/// More shared memory than usual has to be asked for, once for each kernel.
fn allow_shared(function: &Function, bytes: u32) -> Result<(), CudaError> {
    if bytes <= SHARED_BYTES || bytes <= function.allowed_shared.load(Ordering::Relaxed) {
        return Ok(());
    }
    let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: the function is loaded; a size beyond the device's is refused.
    let result = unsafe { sys::cuFuncSetAttribute(function.raw, attribute, bytes.cast_signed()) };
    check("give a kernel more shared memory", result)?;
    function.allowed_shared.store(bytes, Ordering::Relaxed);
    Ok(())
}

/// The name of a kernel's form for numbers of a kind: `by_kind!("add_norm", kind)`.
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

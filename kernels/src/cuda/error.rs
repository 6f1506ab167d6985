//! Errors of a GPU, with messages that say what to do.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

/// Reason why a GPU cannot be used, or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The machine has no NVIDIA driver.
    #[error("this machine has no NVIDIA driver (libcuda.so.1 is missing); install one, or use --device cpu")]
    NoDriver,
    /// The driver is installed but cannot be used.
    #[error("cannot use the NVIDIA driver: {reason}; check the output of nvidia-smi, or use --device cpu")]
    Driver {
        /// Description from the driver.
        reason: String,
    },
    /// No device has the requested ordinal.
    #[error(
        "there is no cuda:{ordinal}: the driver reports {found} GPUs; choose one of them, or use --device cpu"
    )]
    NoDevice {
        /// Ordinal that was requested.
        ordinal: u32,
        /// Number of devices that the driver reports.
        found: u32,
    },
    /// The device's compute capability is below 8.0.
    #[error(
        "cuda:{ordinal} ({name}) has compute capability {major}.{minor}, but 8.0 or newer is needed; use --device cpu"
    )]
    TooOld {
        /// Ordinal of the device.
        ordinal: u32,
        /// Product name of the device.
        name: String,
        /// Major number of the compute capability.
        major: u32,
        /// Minor number of the compute capability.
        minor: u32,
    },
    /// The device is in exclusive or prohibited compute mode.
    #[error(
        "cuda:{ordinal} accepts no further program: its compute mode is exclusive or prohibited (see \
         nvidia-smi -q -d COMPUTE); end the program that uses it, or use --device cpu"
    )]
    Taken {
        /// Ordinal of the device.
        ordinal: u32,
    },
    /// The driver rejects the compiled kernels.
    #[error(
        "the driver does not accept the kernels of `{module}`: {reason}; install driver 570 or newer, or \
         use --device cpu"
    )]
    Module {
        /// Name of the kernel source, without its extension.
        module: &'static str,
        /// Description from the driver's compiler.
        reason: String,
    },
    /// An allocation exceeds the free memory of the device.
    #[error(
        "the GPU has less than {bytes} bytes free ({free_bytes} bytes); lower --kv-bytes or \
         --device-adapter-bytes, or end other programs on the GPU"
    )]
    OutOfMemory {
        /// Bytes that were requested.
        bytes: usize,
        /// Bytes free on the device.
        free_bytes: usize,
    },
    /// The host cannot lock enough memory.
    #[error(
        "the host cannot lock {bytes} bytes for the GPU; free host memory, or raise the limit of locked \
         memory"
    )]
    NoLockedMemory {
        /// Bytes that were requested.
        bytes: usize,
    },
    /// A driver call found no memory, on the device or in the driver.
    #[error(
        "the GPU has no memory left to {what}; lower --kv-bytes or --device-adapter-bytes, or end other \
         programs on the GPU"
    )]
    NoMemoryTo {
        /// Operation that was attempted.
        what: &'static str,
    },
    /// The device is lost for this process: every later call fails.
    #[error("the GPU failed to {what}: {reason}; restart the process")]
    Lost {
        /// Operation that was attempted.
        what: &'static str,
        /// Description from the driver.
        reason: String,
    },
    /// One driver call failed; the device still works.
    #[error("the GPU refused to {what}: {reason}")]
    Refused {
        /// Operation that was attempted.
        what: &'static str,
        /// Description from the driver.
        reason: String,
    },
    /// CPU workers did not signal before the stream's wait timed out.
    #[error("CPU workers did not answer the GPU in time; the requests that needed them fail")]
    Unanswered,
}

impl CudaError {
    /// True if the device is lost for this process.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// True if memory was short: smaller requests may still succeed, and this one may succeed later.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::NoLockedMemory { .. } | Self::NoMemoryTo { .. })
    }
}

/// Returns `Ok` for success, else an error with the attempted operation and the driver's description.
pub(crate) fn check(what: &'static str, result: CUresult) -> Result<(), CudaError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(CudaError::NoMemoryTo { what }),
        // After these errors every call fails: the context is broken (CUDA driver API, "sticky" errors).
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUresult::CUDA_ERROR_UNKNOWN
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => Err(CudaError::Lost { what, reason: reason(result) }),
        _ => Err(CudaError::Refused { what, reason: reason(result) }),
    }
}

/// Returns the driver's description of a result.
pub(crate) fn reason(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: a result exists, so the driver is loaded; it writes a pointer to a static string.
    let known = unsafe { sys::cuGetErrorString(result, &mut text) } == CUresult::CUDA_SUCCESS;
    if !known || text.is_null() {
        return format!("error {}", result as u32);
    }
    // SAFETY: the driver reported success, so the pointer is one of its strings.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} (error {})", text.to_string_lossy(), result as u32)
}

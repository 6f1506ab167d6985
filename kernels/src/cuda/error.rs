//! What can go wrong with a GPU, in words that say what to do.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};

/// Why a GPU cannot be used, or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The machine has no driver.
    #[error(
        "this machine has no NVIDIA driver (libcuda.so.1 is not to be found); install one, or use --device cpu"
    )]
    NoDriver,
    /// The driver does not work.
    #[error("the NVIDIA driver cannot be used: {reason}; see whether nvidia-smi works, or use --device cpu")]
    Driver {
        /// What it says.
        reason: String,
    },
    /// There is no such device.
    #[error(
        "there is no cuda:{ordinal}: the driver shows {found} GPUs; name one of them, or use --device cpu"
    )]
    NoDevice {
        /// The one asked for.
        ordinal: u32,
        /// How many there are.
        found: u32,
    },
    /// The device lacks what the kernels are made of.
    #[error(
        "cuda:{ordinal} ({name}) has compute capability {major}.{minor}, but 8.0 or newer is needed; use --device cpu"
    )]
    TooOld {
        /// Its number.
        ordinal: u32,
        /// Its name.
        name: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// Somebody else has it for himself.
    #[error(
        "cuda:{ordinal} takes no further program: its compute mode gives it to one at a time, or forbids them (nvidia-smi -q -d COMPUTE shows it); end what uses it, or use --device cpu"
    )]
    Taken {
        /// Its number.
        ordinal: u32,
    },
    /// The driver does not take the compiled kernels.
    #[error(
        "the driver does not take the kernels of `{module}`: {reason}; driver 570 or newer is needed, or use --device cpu"
    )]
    Module {
        /// Name of the source they are compiled from, without its ending.
        module: &'static str,
        /// What it says.
        reason: String,
    },
    /// The device has no room.
    #[error(
        "the GPU has no {bytes} bytes free ({free_bytes} are); lower --kv-bytes or --device-adapter-bytes, or end what else uses the GPU"
    )]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
        /// What there is.
        free_bytes: usize,
    },
    /// The host has no memory that may be locked.
    #[error(
        "the host has no {bytes} bytes that may be locked for the GPU; free memory of the host, or raise the limit on locked memory"
    )]
    NoLockedMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// A call found no memory, on the device or in the driver.
    #[error(
        "the GPU has no memory left to {what}; lower --kv-bytes or --device-adapter-bytes, or end what else uses the GPU"
    )]
    NoMemoryTo {
        /// What was attempted.
        what: &'static str,
    },
    /// The device is gone for this process: nothing on it works any more.
    #[error("the GPU failed while it was to {what}: {reason}; the process must start anew")]
    Lost {
        /// What was attempted.
        what: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// One call failed.
    #[error("the GPU refused to {what}: {reason}")]
    Refused {
        /// What was attempted.
        what: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// Nobody answered what the stream waited for.
    #[error("CPU workers did not answer the GPU in time; the requests that needed them fail")]
    Unanswered,
}

impl CudaError {
    /// True if nothing on the device works any more in this process.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }

    /// True if memory was lacking: less may still work, and the same once memory is there again.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::NoLockedMemory { .. } | Self::NoMemoryTo { .. })
    }
}

/// `Ok` for success, else what was attempted with what the driver says.
pub(crate) fn check(what: &'static str, result: CUresult) -> Result<(), CudaError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(CudaError::NoMemoryTo { what }),
        // After these every call fails: the context is broken (CUDA driver API, "sticky" errors).
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

/// The driver's own words.
pub(crate) fn reason(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, or there would be no result; it writes a pointer to a string that lives for ever.
    let known = unsafe { sys::cuGetErrorString(result, &mut text) } == CUresult::CUDA_SUCCESS;
    if !known || text.is_null() {
        return format!("error {}", result as u32);
    }
    // SAFETY: the driver said that it is one of its strings.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} (error {})", text.to_string_lossy(), result as u32)
}

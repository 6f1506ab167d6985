//! cuBLASLt: NVIDIA's matrix products, which reach the matrix units' peak rate. Optional, loaded at run time.
//!
//! cuBLASLt is column-major, this crate row-major. A row-major `[r, c]` matrix is a column-major matrix of
//! `c` rows and `r` columns, so the library computes the transposed product:
//!
//! ```text
//! ours  out  [rows, columns]  =  x  [rows, inner]   ·  Wᵀ                W is [columns, inner]
//! its   outᵀ [columns x rows] =  op(A) [columns x inner] · xᵀ [inner x rows]
//!
//! Weights::Transposed   A = W as it lies: inner x columns, leading dimension inner;    op = T
//! Weights::Plain        out = x · W, W is [inner, columns]: columns x inner, ld columns; op = N
//! ```
//!
//! The library's heuristics run once for each shape, alignment and kind. Products that it refuses are left to
//! `gemm.cu`. Sums have 32 bits and f32 stays f32: the compute type is `32F`, never TF32.

mod library;
mod plan;

use std::{collections::HashMap, fmt, ptr, sync::Arc};

use cudarc::cublaslt::{
    result,
    sys::{self, cublasLtHandle_t},
};

use super::{Cuda, CudaError, CudaStream, DeviceVec};
use crate::lora::ElementKind;
use plan::{BlasPlan, BlasShape};

/// Workspace bytes for the library's algorithms; NVIDIA advises 32 MiB for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Maximum number of cached plans, by shape of product; prompts have many lengths. A plan takes less than 1
/// KB, and a fraction of 1 ms to make.
const MAX_PLANS: usize = 4096;

/// Reason why cuBLASLt is unavailable. Products of many rows then take a slower path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlasError {
    /// The library was not found.
    #[error(
        "cuBLASLt (libcublasLt.so.13 or .12) is missing; install it, or set HOLOBIONT_CUDA_LIBRARIES to \
         its folder: prefill is faster with it"
    )]
    NotFound,
    /// The library lacks a function.
    #[error(
        "the installed cuBLASLt has no {symbol}; install that of CUDA 12 or 13, or set \
         HOLOBIONT_CUDA_LIBRARIES to its folder"
    )]
    TooOld {
        /// Name of the missing function.
        symbol: String,
    },
    /// The library could not be initialized.
    #[error("cuBLASLt does not start ({reason}); install the version that belongs to the driver")]
    Refused {
        /// Status that the library returned.
        reason: String,
    },
    /// The device failed during initialization.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WeightLayout {
    /// `[columns, inner]`: `out = x · Wᵀ`.
    Transposed,
    /// `[inner, columns]`: `out = x · W`.
    Plain,
}

/// `out = x · Wᵀ` or `out = x · W`, or `out +=` that. Addresses on the device, sizes and strides in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlasProduct {
    pub(super) weights: u64,
    pub(super) weights_are: WeightLayout,
    pub(super) x: u64,
    pub(super) out: u64,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) inner: usize,
    pub(super) x_stride: usize,
    pub(super) out_stride: usize,
    /// Element kind of x and W.
    pub(super) kind: ElementKind,
    pub(super) out_kind: ElementKind,
    /// Whether the product is added to `out`.
    pub(super) accumulate: bool,
}

/// cuBLASLt, initialized on one device.
pub struct Blas {
    handle: cublasLtHandle_t,
    cuda: Arc<Cuda>,
    workspace: DeviceVec<u8>,
    /// `None` for shapes that the library refuses.
    plans: HashMap<BlasShape, Option<BlasPlan>>,
}

// SAFETY: the library may be called from any thread; `&mut self` serializes the calls.
unsafe impl Send for Blas {}

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blas").field("plans", &self.plans.len()).finish_non_exhaustive()
    }
}

impl Blas {
    /// Loads and initializes the library. Searches the folders of `HOLOBIONT_CUDA_LIBRARIES` (separated as in
    /// `PATH`), then those of a CUDA installation, then the loader's paths.
    ///
    /// # Errors
    /// Fails if the library is missing or cannot be initialized; the caller then continues without it.
    pub fn open(cuda: &Arc<Cuda>) -> Result<Self, BlasError> {
        library::load()?;
        cuda.bind()?;
        let handle = result::create_handle();
        let handle = handle.map_err(|error| BlasError::Refused { reason: format!("{:?}", error.0) })?;
        let started = DeviceVec::new(cuda, WORKSPACE_BYTES);
        let started = started.inspect_err(|_| {
            // SAFETY: the handle was just made and is not used again.
            let _ = unsafe { result::destroy_handle(handle) };
        });
        Ok(Self { handle, cuda: Arc::clone(cuda), workspace: started?, plans: HashMap::new() })
    }

    /// Returns the number of product shapes that the library computes.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.plans.values().flatten().count()
    }

    /// Returns the number of product shapes that the library refused and our own kernels compute.
    #[must_use]
    pub fn refused(&self) -> usize {
        self.plans.len() - self.taken()
    }

    /// Enqueues `product`. Returns false, with nothing enqueued, if the library refuses it.
    pub(super) fn multiply(&mut self, stream: &CudaStream, product: &BlasProduct) -> Result<bool, CudaError> {
        self.cuda.bind()?;
        let shape = BlasShape::of(product);
        if !self.plans.contains_key(&shape) {
            if self.plans.len() >= MAX_PLANS {
                self.plans.clear();
            }
            let plan = BlasPlan::new(self.handle, &shape, self.workspace.len());
            self.plans.insert(shape, plan);
        }
        let Some(Some(plan)) = self.plans.get(&shape) else { return Ok(false) };
        let workspace = (self.workspace.address(), self.workspace.len());
        // SAFETY: 1. The plan was made by this handle for this shape and alignment. 2. The maker of the product has
        // checked the operands. 3. One stream uses the workspace, in its order.
        match unsafe { plan.run(self.handle, product, workspace, stream) } {
            Ok(()) => Ok(true),
            Err(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
                | sys::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
            ) => {
                self.plans.insert(shape, None);
                Ok(false)
            }
            Err(status) => {
                Err(CudaError::Refused { what: "multiply matrices", reason: format!("{status:?}") })
            }
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.plans.clear();
        if self.cuda.bind().is_ok() {
            // SAFETY: this object owns the handle and does not use it again. Work in flight keeps its own resources.
            let _ = unsafe { result::destroy_handle(std::mem::replace(&mut self.handle, ptr::null_mut())) };
        }
    }
}

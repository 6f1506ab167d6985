//! cuBLASLt: NVIDIA's products of matrices, which reach the rate of the matrix units. Optional, and loaded at run time.
//!
//! It thinks in columns, we in rows. A row-major matrix of `[r, c]` is to it a matrix of `c` rows and `r` columns, so it is asked
//! for the transposed product:
//!
//! ```text
//! ours  out  [rows, columns]  =  x  [rows, inner]   ·  Wᵀ                W is [columns, inner]
//! its   outᵀ [columns x rows] =  op(A) [columns x inner] · xᵀ [inner x rows]
//!
//! Weights::Transposed   A = W as it lies: inner x columns, leading dimension inner;    op = T
//! Weights::Plain        out = x · W, W is [inner, columns]: columns x inner, ld columns; op = N
//! ```
//!
//! Its heuristics are asked once for each shape, alignment and kind. What it refuses is left to `gemm.cu`. Sums are in 32
//! bits and f32 stays f32: the compute type is `32F`, never TF32.

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

/// Bytes that its algorithms may use beside the operands; NVIDIA advises 32 MiB for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Plans that are kept. Prompts have many lengths; a plan takes under a kilobyte and a fraction of a millisecond to make.
const MAX_PLANS: usize = 4096;

/// Why there is no cuBLASLt. Products of many rows then take a slower way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlasError {
    /// It is not there.
    #[error(
        "cuBLASLt (libcublasLt.so.13 or .12) is not to be found; install it, or name its folder in \
         HOLOBIONT_CUDA_LIBRARIES: prompts are read faster with it"
    )]
    NotFound,
    /// It lacks a function.
    #[error(
        "the cuBLASLt found has no {symbol}; install that of CUDA 12 or 13, or name its folder in HOLOBIONT_CUDA_LIBRARIES"
    )]
    TooOld {
        /// Name of the function in the library.
        symbol: String,
    },
    /// It does not start.
    #[error("cuBLASLt does not start ({reason}); install the one that belongs to the driver")]
    Refused {
        /// What it says.
        reason: String,
    },
    /// The device failed meanwhile.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// How weights lie for a product.
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
    /// Of x and W.
    pub(super) kind: ElementKind,
    pub(super) out_kind: ElementKind,
    /// Adds to what `out` holds.
    pub(super) accumulate: bool,
}

/// cuBLASLt, started on a device.
pub struct Blas {
    handle: cublasLtHandle_t,
    cuda: Arc<Cuda>,
    workspace: DeviceVec<u8>,
    /// `None` for what it refuses.
    plans: HashMap<BlasShape, Option<BlasPlan>>,
}

// SAFETY: the library may be called from any thread; `&mut self` sees to one at a time.
unsafe impl Send for Blas {}

impl fmt::Debug for Blas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blas").field("plans", &self.plans.len()).finish_non_exhaustive()
    }
}

impl Blas {
    /// Loads the library, from the folders of `HOLOBIONT_CUDA_LIBRARIES` (separated as in `PATH`), those of a CUDA
    /// installation, or wherever the loader looks, and starts it.
    ///
    /// # Errors
    ///
    /// It is not there or does not start: do without.
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

    /// How many shapes of products it has taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.plans.values().flatten().count()
    }

    /// How many shapes it has left to our own kernels.
    #[must_use]
    pub fn refused(&self) -> usize {
        self.plans.len() - self.taken()
    }

    /// Enqueues `product`. False, with nothing enqueued, if the library does not do it.
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
        // SAFETY: 1. The plan was made by this handle for this shape and alignment. 2. The operands are what the product's
        // maker has checked. 3. The workspace is used by one stream, in its order.
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
            // SAFETY: the handle is ours and not used again. What is under way keeps what it needs.
            let _ = unsafe { result::destroy_handle(std::mem::replace(&mut self.handle, ptr::null_mut())) };
        }
    }
}

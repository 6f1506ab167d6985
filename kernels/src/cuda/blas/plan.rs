//! Plans of cuBLASLt for products of one shape.

use std::{ffi::c_void, mem::size_of_val};

use cudarc::cublaslt::{
    result,
    sys::{
        self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
        cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreference_t,
        cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
        cublasLtReductionScheme_t, cublasStatus_t, cudaDataType,
    },
};

use super::{BlasProduct, WeightLayout};
use crate::{cuda::CudaStream, lora::ElementKind};

/// The largest alignment that makes a difference to the library.
const MAX_ALIGNMENT: u64 = 256;

/// The smallest alignment for the library: below it there are few algorithms, and calls may fail late.
const LEAST_ALIGNMENT: u32 = 16;

/// Split-K algorithms must join their partial sums in 32 bits. By default they may also round each part to
/// the output's kind, or add in that kind.
const JOINED_IN_32_BITS: u32 = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// `CUBLAS_OP_N` and `CUBLAS_OP_T` of `cublasOperation_t`.
const AS_IT_LIES: i32 = 0;
const TRANSPOSED: i32 = 1;

/// Properties of a product that its plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlasShape {
    weights_are: WeightLayout,
    rows: u64,
    columns: u64,
    inner: u64,
    x_stride: i64,
    out_stride: i64,
    kind: ElementKind,
    out_kind: ElementKind,
    /// Alignments in bytes of the addresses of W, x and out.
    alignments: [u32; 3],
}

impl BlasShape {
    pub(super) fn of(product: &BlasProduct) -> Self {
        let alignment = |address: u64| 1 << (address | MAX_ALIGNMENT).trailing_zeros();
        Self {
            weights_are: product.weights_are,
            rows: product.rows as u64,
            columns: product.columns as u64,
            inner: product.inner as u64,
            x_stride: product.x_stride.cast_signed() as i64,
            out_stride: product.out_stride.cast_signed() as i64,
            kind: product.kind,
            out_kind: product.out_kind,
            alignments: [product.weights, product.x, product.out].map(alignment),
        }
    }
}

/// A product's description with the algorithm chosen for it.
pub(super) struct BlasPlan {
    description: Description,
    weights: BlasLayout,
    x: BlasLayout,
    out: BlasLayout,
    algorithm: cublasLtMatmulAlgo_t,
}

impl BlasPlan {
    pub(super) fn new(handle: cublasLtHandle_t, shape: &BlasShape, workspace_bytes: usize) -> Option<Self> {
        if shape.alignments.iter().any(|&bytes| bytes < LEAST_ALIGNMENT) {
            return None;
        }
        let description = Description::new(shape.weights_are)?;
        let (rows, columns) = match shape.weights_are {
            WeightLayout::Transposed => (shape.inner, shape.columns),
            WeightLayout::Plain => (shape.columns, shape.inner),
        };
        let weights = BlasLayout::new(shape.kind, rows, columns, i64::try_from(rows).ok()?)?;
        let x = BlasLayout::new(shape.kind, shape.inner, shape.rows, shape.x_stride)?;
        let out = BlasLayout::new(shape.out_kind, shape.columns, shape.rows, shape.out_stride)?;
        let preference = Preferences::new(shape.alignments, workspace_bytes)?;
        // SAFETY: all of these objects were just made and are alive.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                handle,
                description.0,
                weights.0,
                x.0,
                out.0,
                out.0,
                preference.0,
            )
        };
        Some(Self { description, weights, x, out, algorithm: found.ok()?.algo })
    }

    /// Enqueues `product` with a workspace, given as address and bytes.
    ///
    /// # Safety
    /// The plan was made by `handle` for the product's shape. The operands exist. Other work uses the output
    /// or the workspace only in the order of the stream.
    pub(super) unsafe fn run(
        &self,
        handle: cublasLtHandle_t,
        product: &BlasProduct,
        (workspace, workspace_bytes): (u64, usize),
        stream: &CudaStream,
    ) -> Result<(), cublasStatus_t> {
        let (one, zero) = (1.0f32, 0.0f32);
        let beta = if product.accumulate { &one } else { &zero };
        // SAFETY: the caller upholds this function's contract; factors are f32, as described, and read before this
        // returns.
        let done = unsafe {
            result::matmul(
                handle,
                self.description.0,
                (&raw const one).cast(),
                std::ptr::from_ref(beta).cast(),
                pointer(product.weights),
                self.weights.0,
                pointer(product.x),
                self.x.0,
                pointer(product.out),
                self.out.0,
                pointer(product.out).cast_mut(),
                self.out.0,
                &raw const self.algorithm,
                pointer(workspace).cast_mut(),
                workspace_bytes,
                stream.raw().cast(),
            )
        };
        done.map_err(|error| error.0)
    }
}

/// Converts a device address to the pointer type of the library.
fn pointer(address: u64) -> *const c_void {
    std::ptr::without_provenance(address as usize)
}

fn data_type(kind: ElementKind) -> cudaDataType {
    match kind {
        ElementKind::F32 => cudaDataType::CUDA_R_32F,
        ElementKind::F16 => cudaDataType::CUDA_R_16F,
        ElementKind::Bf16 => cudaDataType::CUDA_R_16BF,
    }
}

struct Description(cublasLtMatmulDesc_t);

impl Description {
    /// Describes a product with sums and factors in f32 and the weights transposed or not.
    fn new(weights_are: WeightLayout) -> Option<Self> {
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let new = Self(result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F).ok()?);
        let operation = match weights_are {
            WeightLayout::Transposed => TRANSPOSED,
            WeightLayout::Plain => AS_IT_LIES,
        };
        let (value, bytes) = ((&raw const operation).cast(), size_of_val(&operation));
        // SAFETY: the description is alive; the attribute is an operation of this size.
        let set = unsafe {
            result::set_matmul_desc_attribute(new.0, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, value, bytes)
        };
        set.ok().map(|()| new)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: this object owns the description and does not use it again.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct BlasLayout(cublasLtMatrixLayout_t);

impl BlasLayout {
    /// Describes a column-major matrix with columns `stride` elements apart.
    fn new(kind: ElementKind, rows: u64, columns: u64, stride: i64) -> Option<Self> {
        result::create_matrix_layout(data_type(kind), rows, columns, stride).ok().map(Self)
    }
}

impl Drop for BlasLayout {
    fn drop(&mut self) {
        // SAFETY: this object owns the layout and does not use it again.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Preferences(cublasLtMatmulPreference_t);

impl Preferences {
    /// Sets the workspace and alignments that algorithms may rely on, and their reductions.
    fn new([weights, x, out]: [u32; 3], workspace_bytes: usize) -> Option<Self> {
        let new = Self(result::create_matmul_pref().ok()?);
        new.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(workspace_bytes as u64))?;
        new.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &JOINED_IN_32_BITS)?;
        new.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &weights)?;
        new.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &x)?;
        new.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out)?;
        new.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out)?;
        Some(new)
    }

    fn set<T>(&self, attribute: Preference, value: &T) -> Option<()> {
        let (value, bytes) = (std::ptr::from_ref(value).cast(), size_of_val(value));
        // SAFETY: the preferences are alive; the calls above pass a value of the attribute's type.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, bytes) }.ok()
    }
}

impl Drop for Preferences {
    fn drop(&mut self) {
        // SAFETY: this object owns the preferences and does not use them again.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

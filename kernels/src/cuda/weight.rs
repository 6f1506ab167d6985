//! Weights of linear layers and embedding tables on the device; `quant.cuh` describes their layout.

use super::{
    CudaError, CudaStream, DeviceVec,
    launch::{Arg, LaunchShape, count, launch},
};
use crate::{TensorType, lora::ElementKind};

mod uploader;
pub use uploader::WeightUploader;

/// Threads per block of the kernels that take an octet per thread.
const THREADS: u32 = 256;

/// Elements per thread of these kernels.
const OCTET: usize = 8;

/// Appends the suffix of a weight type to a kernel's name: `by_form!("dequantize", kind)`.
macro_rules! by_form {
    ($name:literal, $kind:expr) => {
        match $kind {
            $crate::TensorType::F32 => concat!($name, "_f32"),
            $crate::TensorType::F16 => concat!($name, "_f16"),
            $crate::TensorType::Bf16 => concat!($name, "_bf16"),
            $crate::TensorType::Q4_0 => concat!($name, "_q4_0"),
            $crate::TensorType::Q4_1 => concat!($name, "_q4_1"),
            $crate::TensorType::Q5_0 => concat!($name, "_q5_0"),
            $crate::TensorType::Q5_1 => concat!($name, "_q5_1"),
            $crate::TensorType::Q8_0 => concat!($name, "_q8_0"),
            $crate::TensorType::Q4K => concat!($name, "_q4_k"),
            $crate::TensorType::Q5K => concat!($name, "_q5_k"),
            $crate::TensorType::Q6K => concat!($name, "_q6_k"),
            $crate::TensorType::Mxfp4 => unreachable!("MXFP4 is not uploaded to a GPU"),
        }
    };
}
pub(super) use by_form;

/// A matrix of weights, `[rows, columns]`: a row is an output feature, or a token.
#[derive(Debug)]
pub struct Weight {
    kind: TensorType,
    rows: usize,
    columns: usize,
    bytes: DeviceVec<u8>,
}

impl Weight {
    /// Copies `bytes`, rows in the format of weight files, to the device. The copy, and for block formats the
    /// repacking, is enqueued on `stream`. A [`WeightUploader`] loads many without waiting for each.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    ///
    /// # Panics
    /// Panics if `bytes` is not `rows` rows of `columns` elements of `kind`.
    pub fn upload(
        stream: &CudaStream,
        kind: TensorType,
        bytes: &[u8],
        rows: usize,
        columns: usize,
    ) -> Result<Self, CudaError> {
        let mut weight = Self::unwritten(stream, kind, rows, columns)?;
        assert_eq!(bytes.len(), rows * weight.stored_row_bytes(), "{rows} rows of {columns} {kind:?}");
        if number_kind(kind).is_some() {
            stream.upload(bytes, &mut weight.bytes, 0)?;
        } else {
            let raw = DeviceVec::from_slice(stream, bytes)?;
            weight.repack(stream, &raw, 0, rows)?;
            // Dropping `raw` waits for the device.
        }
        Ok(weight)
    }

    fn unwritten(
        stream: &CudaStream,
        kind: TensorType,
        rows: usize,
        columns: usize,
    ) -> Result<Self, CudaError> {
        let bytes = DeviceVec::new(stream.cuda(), device_bytes(kind, rows, columns))?;
        Ok(Self { kind, rows, columns, bytes })
    }

    /// Returns the type of the stored elements.
    #[must_use]
    pub fn kind(&self) -> TensorType {
        self.kind
    }

    /// Returns the number of output features, or tokens.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of elements per row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the bytes on the device.
    #[must_use]
    pub fn device_bytes(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn address(&self) -> u64 {
        self.bytes.address()
    }

    fn stored_row_bytes(&self) -> usize {
        let bytes = self.kind.row_bytes(self.columns);
        bytes.unwrap_or_else(|| panic!("rows of {} are not whole blocks of {:?}", self.columns, self.kind))
    }

    /// Enqueues repacking `rows` stored rows into the rows from `first` on.
    fn repack(
        &mut self,
        stream: &CudaStream,
        raw: &DeviceVec<u8>,
        first: usize,
        rows: usize,
    ) -> Result<(), CudaError> {
        assert!(first + rows <= self.rows, "the rows exist");
        assert!(raw.len() >= rows * self.stored_row_bytes(), "all of them were uploaded");
        let arguments = [
            Arg::Ptr(raw.address()),
            Arg::U32(count(first)),
            Arg::U32(count(rows)),
            Arg::U32(count(self.rows)),
            Arg::U32(count(self.columns)),
            Arg::Ptr(self.address()),
        ];
        let octets = rows * self.columns / OCTET;
        // SAFETY: 1. The kernel is declared with these arguments. 2. `raw` holds the rows, as was checked; the weight
        // has the size that `quant.cuh` gives it, which `device_bytes` follows. 3. The output is borrowed exclusively.
        unsafe { launch(stream, by_repack(self.kind), octet_shape(octets), &arguments) }
    }
}

fn by_repack(kind: TensorType) -> &'static str {
    assert!(number_kind(kind).is_none(), "floats lie as they are stored");
    by_form!("repack", kind)
}

/// Returns a launch with one thread for each of `octets` octets.
pub(super) fn octet_shape(octets: usize) -> LaunchShape {
    LaunchShape::line(octets.div_ceil(THREADS as usize), THREADS)
}

/// Returns the element kind of a float type, `None` for block formats.
pub(super) fn number_kind(kind: TensorType) -> Option<ElementKind> {
    match kind {
        TensorType::F32 => Some(ElementKind::F32),
        TensorType::F16 => Some(ElementKind::F16),
        TensorType::Bf16 => Some(ElementKind::Bf16),
        _ => None,
    }
}

/// Enqueues dequantizing rows `first..first + rows` of `weight` to `kind`; `to` must have room for them.
pub(super) fn dequantize(
    stream: &CudaStream,
    weight: &Weight,
    (first, rows): (usize, usize),
    to: &mut DeviceVec<u8>,
    kind: ElementKind,
) -> Result<(), CudaError> {
    assert!(first + rows <= weight.rows, "the rows exist");
    assert!(to.len() >= rows * weight.columns * kind.bytes(), "they have room");
    let arguments = [
        Arg::Ptr(weight.address()),
        Arg::U32(count(weight.rows)),
        Arg::U32(count(weight.columns)),
        Arg::U32(count(first)),
        Arg::U32(count(rows)),
        Arg::Ptr(to.address()),
        Arg::U32(kind_number(kind)),
    ];
    let octets = (rows * weight.columns).div_ceil(OCTET);
    // SAFETY: 1. The kernel is declared with these arguments. 2. The rows exist and have room. 3. The output is
    // borrowed exclusively.
    unsafe { launch(stream, by_form!("dequantize", weight.kind), octet_shape(octets), &arguments) }
}

fn kind_number(kind: ElementKind) -> u32 {
    match kind {
        ElementKind::F32 => 0,
        ElementKind::F16 => 1,
        ElementKind::Bf16 => 2,
    }
}

/// Returns the bytes of a weight on the device: `planes` of `quant.cuh`.
///
/// # Panics
/// Panics if rows are not multiples of a block.
#[must_use]
pub fn device_bytes(kind: TensorType, rows: usize, columns: usize) -> usize {
    assert!(columns.is_multiple_of(kind.block_elements()), "rows are whole blocks");
    if let Some(kind) = number_kind(kind) {
        return rows * columns * kind.bytes();
    }
    let (octets, groups, blocks) = (rows * columns / 8, rows * columns / 32, rows * columns / 256);
    let (codes, high, scales, super_scales) = match kind {
        TensorType::Q4_0 => (4, 0, 2 * groups, 0),
        TensorType::Q4_1 => (4, 0, 4 * groups, 0),
        TensorType::Q5_0 => (4, 1, 2 * groups, 0),
        TensorType::Q5_1 => (4, 1, 4 * groups, 0),
        TensorType::Q8_0 => (8, 0, 2 * groups, 0),
        TensorType::Q4K => (4, 0, 16 * blocks, 0),
        TensorType::Q5K => (4, 1, 16 * blocks, 0),
        TensorType::Q6K => (4, 2, 2 * groups, 2 * blocks),
        TensorType::Mxfp4 => (4, 0, groups, 0),
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => unreachable!("floats were handled"),
    };
    let planes = [codes * octets, high * octets, scales, super_scales];
    planes.iter().map(|bytes| bytes.next_multiple_of(256)).sum()
}

//! Row-major matrices on the device.

use std::sync::Arc;

use half::{bf16, f16};

use super::{Cuda, CudaError, CudaStream, memory::DeviceVec};
use crate::lora::ElementKind;

/// A row-major matrix on the device. The memory is kept for reuse.
#[derive(Debug)]
pub struct Matrix {
    bytes: DeviceVec<u8>,
    rows: usize,
    width: usize,
    kind: ElementKind,
}

impl Matrix {
    /// Creates a matrix without rows.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn new(cuda: &Arc<Cuda>, kind: ElementKind) -> Result<Self, CudaError> {
        Ok(Self { bytes: DeviceVec::new(cuda, 0)?, rows: 0, width: 0, kind })
    }

    /// Resizes to `rows` rows of `width`. Growth beyond the capacity loses the contents; otherwise all bytes
    /// stay.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn reshape(&mut self, rows: usize, width: usize) -> Result<(), CudaError> {
        let needed = rows.saturating_mul(width).saturating_mul(self.kind.bytes());
        if needed > self.bytes.len() {
            self.replace(needed)?;
        }
        (self.rows, self.width) = (rows, width);
        Ok(())
    }

    /// Replaces the memory by at least `needed` bytes: twice the old size, so that a slowly growing batch
    /// does not allocate at each step, or exactly `needed` on a nearly full device. If that fails too, the
    /// old memory stays, so that smaller batches go on.
    fn replace(&mut self, needed: usize) -> Result<(), CudaError> {
        let cuda = Arc::clone(self.bytes.cuda());
        self.bytes = match DeviceVec::new(&cuda, needed.max(2 * self.bytes.len())) {
            Err(error) if error.is_out_of_memory() => DeviceVec::new(&cuda, needed)?,
            larger => larger?,
        };
        Ok(())
    }

    /// Resizes to `rows` rows; existing rows keep their contents.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn grow(&mut self, stream: &CudaStream, rows: usize) -> Result<(), CudaError> {
        let needed = rows.saturating_mul(self.width).saturating_mul(self.kind.bytes());
        if needed > self.bytes.len() {
            let mut larger = DeviceVec::new(stream.cuda(), needed.max(2 * self.bytes.len()))?;
            let kept = self.rows * self.width * self.kind.bytes();
            stream.copy(&self.bytes, 0, &mut larger, 0, kept)?;
            self.bytes = larger;
        }
        self.rows = rows;
        Ok(())
    }

    /// Drops all rows after the first `rows`; memory is kept for reuse.
    pub fn truncate(&mut self, rows: usize) {
        self.rows = self.rows.min(rows);
    }

    /// Fills this matrix with the leading rows of `from`.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `from` has fewer rows, or another width or kind.
    pub fn copy_head(&mut self, stream: &CudaStream, from: &Self) -> Result<(), CudaError> {
        assert_eq!((self.width, self.kind), (from.width, from.kind), "rows of one shape");
        assert!(self.rows <= from.rows, "the rows exist");
        stream.copy(&from.bytes, 0, &mut self.bytes, 0, self.rows * self.width * self.kind.bytes())
    }

    /// Sets all rows to zero.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn clear(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let bytes = self.rows * self.width * self.kind.bytes();
        stream.clear(&mut self.bytes, bytes)
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of elements per row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the element kind.
    #[must_use]
    pub fn kind(&self) -> ElementKind {
        self.kind
    }

    /// Returns the capacity in elements.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.len() / self.kind.bytes()
    }

    pub(super) fn address_of_row(&self, row: usize) -> u64 {
        assert!(row <= self.rows, "the row exists");
        self.bytes.address_of(row * self.width * self.kind.bytes())
    }

    pub(super) fn address(&self) -> u64 {
        self.bytes.address()
    }

    /// Writes rows from `first` on, rounded to the matrix's kind.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `values` is not a multiple of the width or exceeds the rows.
    pub fn upload(&mut self, stream: &CudaStream, first: usize, values: &[f32]) -> Result<(), CudaError> {
        assert!(values.len().is_multiple_of(self.width.max(1)), "whole rows of {}", self.width);
        assert!(first * self.width + values.len() <= self.rows * self.width, "the rows exist");
        let at = first * self.width * self.kind.bytes();
        stream.upload(&encode(self.kind, values), &mut self.bytes, at)
    }

    /// Reads rows from `first` on, after the stream's earlier work.
    ///
    /// # Errors
    /// Fails if the device is lost.
    ///
    /// # Panics
    /// Panics if `values` is not a multiple of the width or exceeds the rows.
    pub fn download(&self, stream: &CudaStream, first: usize, values: &mut [f32]) -> Result<(), CudaError> {
        assert!(values.len().is_multiple_of(self.width.max(1)), "whole rows of {}", self.width);
        assert!(first * self.width + values.len() <= self.rows * self.width, "the rows exist");
        let mut bytes = vec![0; values.len() * self.kind.bytes()];
        stream.download(&self.bytes, first * self.width * self.kind.bytes(), &mut bytes)?;
        decode(self.kind, &bytes, values);
        Ok(())
    }

    /// Reads all rows after the stream's earlier work.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn to_vec(&self, stream: &CudaStream) -> Result<Vec<f32>, CudaError> {
        let mut values = vec![0.0; self.rows * self.width];
        self.download(stream, 0, &mut values)?;
        Ok(values)
    }
}

fn encode(kind: ElementKind, values: &[f32]) -> Vec<u8> {
    match kind {
        ElementKind::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ElementKind::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        ElementKind::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
    }
}

fn decode(kind: ElementKind, bytes: &[u8], values: &mut [f32]) {
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match kind {
        ElementKind::F32 => {
            let words = bytes.chunks_exact(4).map(|word| [word[0], word[1], word[2], word[3]]);
            values.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_le_bytes(word));
        }
        ElementKind::F16 => {
            let halves = pairs().map(|pair| f16::from_le_bytes(pair).to_f32());
            values.iter_mut().zip(halves).for_each(|(value, half)| *value = half);
        }
        ElementKind::Bf16 => {
            let halves = pairs().map(|pair| bf16::from_le_bytes(pair).to_f32());
            values.iter_mut().zip(halves).for_each(|(value, half)| *value = half);
        }
    }
}

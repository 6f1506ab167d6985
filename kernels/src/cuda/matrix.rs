//! Rows of numbers on the device.

use std::sync::Arc;

use half::{bf16, f16};

use super::{Cuda, CudaError, CudaStream, memory::DeviceVec};
use crate::lora::ElementKind;

/// A matrix on the device, row after row. Its memory is kept for reuse.
#[derive(Debug)]
pub struct Matrix {
    bytes: DeviceVec<u8>,
    rows: usize,
    width: usize,
    kind: ElementKind,
}

impl Matrix {
    /// A matrix without rows.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn new(cuda: &Arc<Cuda>, kind: ElementKind) -> Result<Self, CudaError> {
        Ok(Self { bytes: DeviceVec::new(cuda, 0)?, rows: 0, width: 0, kind })
    }

    /// Makes it `rows` rows of `width`. If it must grow its contents are lost, else the memory keeps what it held.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn reshape(&mut self, rows: usize, width: usize) -> Result<(), CudaError> {
        let needed = rows.saturating_mul(width).saturating_mul(self.kind.bytes());
        if needed > self.bytes.len() {
            self.replace(needed)?;
        }
        (self.rows, self.width) = (rows, width);
        Ok(())
    }

    /// Takes memory of at least `needed` bytes in the place of what it has: twice as much as that, so that a slowly growing
    /// batch does not take memory at each step, or, on a device that is nearly full, no more than it must. Without even so
    /// much it keeps what it has: who needs no more goes on.
    fn replace(&mut self, needed: usize) -> Result<(), CudaError> {
        let cuda = Arc::clone(self.bytes.cuda());
        self.bytes = match DeviceVec::new(&cuda, needed.max(2 * self.bytes.len())) {
            Err(error) if error.is_out_of_memory() => DeviceVec::new(&cuda, needed)?,
            larger => larger?,
        };
        Ok(())
    }

    /// Makes it `rows` rows, of which those it had keep their contents.
    ///
    /// # Errors
    ///
    /// The device has no room.
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

    /// Drops all rows but the first `rows`; memory is kept for reuse.
    pub fn truncate(&mut self, rows: usize) {
        self.rows = self.rows.min(rows);
    }

    /// Copies as many rows as it has from the beginning of `from`.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If `from` has fewer rows, or others.
    pub fn copy_head(&mut self, stream: &CudaStream, from: &Self) -> Result<(), CudaError> {
        assert_eq!((self.width, self.kind), (from.width, from.kind), "rows of one shape");
        assert!(self.rows <= from.rows, "the rows exist");
        stream.copy(&from.bytes, 0, &mut self.bytes, 0, self.rows * self.width * self.kind.bytes())
    }

    /// Makes all its rows zeroes.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn clear(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let bytes = self.rows * self.width * self.kind.bytes();
        stream.clear(&mut self.bytes, bytes)
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Numbers of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// How numbers are kept.
    #[must_use]
    pub fn kind(&self) -> ElementKind {
        self.kind
    }

    /// Numbers there is room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.len() / self.kind.bytes()
    }

    /// Where row `row` begins on the device.
    pub(super) fn address_of_row(&self, row: usize) -> u64 {
        assert!(row <= self.rows, "the row exists");
        self.bytes.address_of(row * self.width * self.kind.bytes())
    }

    /// Where its numbers begin on the device.
    pub(super) fn address(&self) -> u64 {
        self.bytes.address()
    }

    /// Writes rows `first..`, rounded to the matrix's kind.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If these are not whole rows, or there are fewer.
    pub fn upload(&mut self, stream: &CudaStream, first: usize, values: &[f32]) -> Result<(), CudaError> {
        assert!(values.len().is_multiple_of(self.width.max(1)), "whole rows of {}", self.width);
        assert!(first * self.width + values.len() <= self.rows * self.width, "the rows exist");
        let at = first * self.width * self.kind.bytes();
        stream.upload(&encode(self.kind, values), &mut self.bytes, at)
    }

    /// Reads rows `first..` once the stream has come so far.
    ///
    /// # Errors
    ///
    /// The device is lost.
    ///
    /// # Panics
    ///
    /// If these are not whole rows, or there are fewer.
    pub fn download(&self, stream: &CudaStream, first: usize, values: &mut [f32]) -> Result<(), CudaError> {
        assert!(values.len().is_multiple_of(self.width.max(1)), "whole rows of {}", self.width);
        assert!(first * self.width + values.len() <= self.rows * self.width, "the rows exist");
        let mut bytes = vec![0; values.len() * self.kind.bytes()];
        stream.download(&self.bytes, first * self.width * self.kind.bytes(), &mut bytes)?;
        decode(self.kind, &bytes, values);
        Ok(())
    }

    /// All rows once the stream has come so far.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn to_vec(&self, stream: &CudaStream) -> Result<Vec<f32>, CudaError> {
        let mut values = vec![0.0; self.rows * self.width];
        self.download(stream, 0, &mut values)?;
        Ok(values)
    }
}

/// `values` as they are kept on the device.
fn encode(kind: ElementKind, values: &[f32]) -> Vec<u8> {
    match kind {
        ElementKind::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ElementKind::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        ElementKind::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
    }
}

/// What is kept on the device, as singles.
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

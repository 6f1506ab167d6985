//! Layout of a packed matrix, and packing of a stored tensor.

use std::ops::Range;

use half::f16;

use crate::{
    TensorType,
    activations::{ActivationForms, GROUP},
    quant::{DecodedRow, IntegerLayout, Offset, integer_form},
    simd::LANES,
};

/// Reason why a tensor cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The bytes are not `rows` rows of `columns` elements.
    #[error("{got} bytes are not {rows} rows of {columns} elements of {kind:?}")]
    Size {
        /// Type of the stored elements.
        kind: TensorType,
        /// Number of output features.
        rows: usize,
        /// Number of input features.
        columns: usize,
        /// Number of bytes that were passed.
        got: usize,
    },
    /// The memory for the packed form cannot be allocated.
    #[error("no memory for a packed {rows} x {columns} matrix")]
    Memory {
        /// Number of output features.
        rows: usize,
        /// Number of input features.
        columns: usize,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

/// Kind of panel, named after the bits of a code and its zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    F32,
    F16,
    Bf16,
    Four8,
    FourMinimum,
    FourE2m1,
    Five16,
    FiveMinimum,
    Six32Halves,
    Eight128,
}

/// Layout of a packed matrix `[rows, columns]` (output x input features), in panels of sixteen rows.
///
/// The layout gives the offset of each row, so rows can be packed, stored and loaded separately.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackedLayout {
    kind: TensorType,
    rows: usize,
    columns: usize,
    pub(super) packing: Packing,
    panel_bytes: usize,
    unit: f32,
}

impl PackedLayout {
    /// Alignment of separately packed rows: each range begins at a multiple of this, because gradients are
    /// summed over this many outputs at a time.
    pub const CUT_ROWS: usize = 64;

    /// Returns the layout of a stored tensor: `rows` rows of `columns` elements of `kind`, row-major.
    ///
    /// # Errors
    /// Fails if `data` does not have the size of these rows.
    pub fn of(kind: TensorType, data: &[u8], rows: usize, columns: usize) -> Result<Self, PackError> {
        let size = || PackError::Size { kind, rows, columns, got: data.len() };
        let row_bytes = kind.row_bytes(columns).filter(|&bytes| bytes > 0).ok_or_else(size)?;
        if row_bytes.checked_mul(rows) != Some(data.len()) {
            return Err(size());
        }
        let unit = if integer_form(kind).is_some() { common_unit(kind, data, row_bytes) } else { 1.0 };
        Self::known(kind, rows, columns, unit).ok_or_else(size)
    }

    /// Returns the layout of a tensor whose [unit](Self::unit) is known; `None` if there is no such tensor.
    #[must_use]
    pub fn known(kind: TensorType, rows: usize, columns: usize, unit: f32) -> Option<Self> {
        kind.row_bytes(columns).filter(|&bytes| bytes > 0)?;
        let (packing, panel_bytes) = layout(kind, columns);
        rows.div_ceil(LANES).checked_mul(panel_bytes)?;
        Some(Self { kind, rows, columns, packing, panel_bytes, unit })
    }

    /// Returns the number of output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of input features.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the power of two that all scales are relative to; 1 for floats.
    #[must_use]
    pub fn unit(&self) -> f32 {
        self.unit
    }

    /// Returns the bytes of all panels.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.panels() * self.panel_bytes
    }

    /// Returns the forms of activations that the matrix multiplies.
    #[must_use]
    pub fn forms(&self) -> ActivationForms {
        match self.packing {
            Packing::F32 | Packing::F16 => ActivationForms::default(),
            Packing::Bf16 => ActivationForms { bf16: true, ..ActivationForms::default() },
            _ => ActivationForms { bytes: true, ..ActivationForms::default() },
        }
    }

    /// True if activations enter unrounded, so that the layer is linear in them.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.forms() == ActivationForms::default()
    }

    /// Returns the byte offset of `row` in the panels; for [`rows`](Self::rows) the end of the panels.
    ///
    /// # Panics
    /// Panics unless `row` is a multiple of [`CUT_ROWS`](Self::CUT_ROWS), or the end.
    #[must_use]
    pub fn offset(&self, row: usize) -> usize {
        assert!(row.is_multiple_of(Self::CUT_ROWS) || row == self.rows, "panels are cut at row {row}");
        row.div_ceil(LANES) * self.panel_bytes
    }

    /// Returns the layout of a range of the rows, which must begin at a valid [`offset`](Self::offset).
    ///
    /// # Panics
    /// Panics if the rows do not exist.
    #[must_use]
    pub fn of_rows(&self, rows: &Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        Self { rows: rows.len(), ..*self }
    }

    pub(super) fn with_rows(&self, rows: usize) -> Self {
        Self { rows, ..*self }
    }

    pub(super) fn copy_lane(&self, (from, lane): (&[u8], usize), (to, to_lane): (&mut [u8], usize)) {
        // The first part of a panel has four bytes per lane, the second part two.
        let words = match self.packing.integer_form() {
            Some(form) => self.columns * LANES * form.bits / 8,
            None if self.packing == Packing::F16 => 0,
            None => self.panel_bytes,
        };
        let ((from, from_halves), (to, to_halves)) = (from.split_at(words), to.split_at_mut(words));
        copy_elements::<4>(from, lane, to, to_lane);
        copy_elements::<2>(from_halves, lane, to_halves, to_lane);
    }

    /// Packs the rows of `data`, in stored format, into `panels`.
    ///
    /// # Panics
    /// Panics if `data` or `panels` does not have the size of the rows.
    pub fn pack(&self, data: &[u8], panels: &mut [u8]) {
        let row_bytes = self.kind.row_bytes(self.columns).unwrap_or(0);
        assert!(data.len() == self.rows * row_bytes, "{} bytes of {} rows", data.len(), self.rows);
        assert_eq!(panels.len(), self.bytes(), "panels of {} rows", self.rows);
        // Missing rows of the last panel, and padding at the end of panels, are zero.
        panels.fill(0);
        match integer_form(self.kind) {
            Some(form) => self.pack_integers(form, data, row_bytes, panels),
            None => self.pack_floats(data, row_bytes, panels),
        }
    }

    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub(super) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    fn pack_floats(&self, data: &[u8], row_bytes: usize, packed: &mut [u8]) {
        let element = if self.packing == Packing::F32 { 4 } else { 2 };
        let bf16 = self.packing == Packing::Bf16;
        let panel_bytes = self.panel_bytes;
        for (row, values) in data.chunks_exact(row_bytes).enumerate() {
            let (panel, lane) = (&mut packed[row / LANES * panel_bytes..][..panel_bytes], row % LANES);
            for (k, value) in values.chunks_exact(element).enumerate() {
                let at =
                    if bf16 { (k / 2 * LANES + lane) * 4 + k % 2 * 2 } else { (k * LANES + lane) * element };
                panel[at..at + element].copy_from_slice(value);
            }
        }
    }

    fn pack_integers(&self, form: IntegerLayout, data: &[u8], row_bytes: usize, packed: &mut [u8]) {
        let (panel_bytes, code_bytes) = (self.panel_bytes, self.columns * LANES * form.bits / 8);
        let (inverse, lines) = (1.0 / self.unit, CodeLines::of(form.bits));
        let mut decoded = DecodedRow::default();
        for (row, bytes) in data.chunks_exact(row_bytes).enumerate() {
            decoded.decode(self.kind, bytes);
            let panel = &mut packed[row / LANES * panel_bytes..][..panel_bytes];
            let (codes, scales) = panel.split_at_mut(code_bytes);
            lines.put(codes, row % LANES, &decoded.codes);
            let numbers = if form.offset == Offset::Minimum { 2 } else { 1 };
            for (group, &scale) in decoded.scales.iter().enumerate() {
                put_half(scales, numbers * group * LANES + row % LANES, scale * inverse);
            }
            for (group, &minimum) in decoded.minima.iter().enumerate() {
                put_half(scales, (2 * group + 1) * LANES + row % LANES, minimum * inverse);
            }
        }
    }
}

impl Packing {
    pub(super) fn integer_form(self) -> Option<IntegerLayout> {
        let form = |bits, group, offset| Some(IntegerLayout { bits, group, offset });
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => None,
            Self::Four8 => form(4, GROUP, Offset::Zero(8)),
            Self::FourMinimum => form(4, GROUP, Offset::Minimum),
            Self::FourE2m1 => form(4, GROUP, Offset::E2m1),
            Self::Five16 => form(5, GROUP, Offset::Zero(16)),
            Self::FiveMinimum => form(5, GROUP, Offset::Minimum),
            Self::Six32Halves => form(6, GROUP / 2, Offset::Zero(32)),
            Self::Eight128 => form(8, GROUP, Offset::Zero(128)),
        }
    }
}

fn layout(kind: TensorType, columns: usize) -> (Packing, usize) {
    let Some(form) = integer_form(kind) else {
        return match kind {
            TensorType::F32 => (Packing::F32, columns * LANES * 4),
            TensorType::F16 => (Packing::F16, columns * LANES * 2),
            _ => (Packing::Bf16, columns.next_multiple_of(2) * LANES * 2),
        };
    };
    let packing = match (form.bits, form.offset) {
        (_, Offset::E2m1) => Packing::FourE2m1,
        (4, Offset::Zero(_)) => Packing::Four8,
        (4, Offset::Minimum) => Packing::FourMinimum,
        (5, Offset::Zero(_)) => Packing::Five16,
        (_, Offset::Minimum) => Packing::FiveMinimum,
        (6, Offset::Zero(_)) => Packing::Six32Halves,
        (_, Offset::Zero(_)) => Packing::Eight128,
    };
    let numbers = if form.offset == Offset::Minimum { 2 } else { 1 };
    let bytes = columns * LANES * form.bits / 8 + columns / form.group * numbers * LANES * 2;
    // Panels start at cache lines.
    (packing, bytes.next_multiple_of(64))
}

/// Returns the power of two relative to which a tensor's scales and minima are stored in 16 bits. The largest
/// magnitude becomes about 2^14, so values down to 2^-28 of it keep their eleven bits.
fn common_unit(kind: TensorType, data: &[u8], row_bytes: usize) -> f32 {
    let mut decoded = DecodedRow::default();
    let mut largest = 0.0f32;
    for bytes in data.chunks_exact(row_bytes) {
        decoded.decode_numbers(kind, bytes);
        largest = decoded.scales.iter().chain(&decoded.minima).fold(largest, |m, x| m.max(x.abs()));
    }
    if largest.is_normal() { 2.0f32.powi(largest.log2().floor() as i32 - 14) } else { 1.0 }
}

fn copy_elements<const N: usize>(from: &[u8], lane: usize, to: &mut [u8], to_lane: usize) {
    for (from, to) in from.chunks_exact(LANES * N).zip(to.chunks_exact_mut(LANES * N)) {
        to[to_lane * N..][..N].copy_from_slice(&from[lane * N..][..N]);
    }
}

/// Codes of a panel, in groups of 32 elements. The lower four bits of a code lie in a nibble, and a fifth and
/// a sixth bit in lines that follow the nibbles of the group; codes of eight bits are bytes.
///
/// ```text
/// step s: elements 4 s to 4 s + 3 of each lane, one byte each: a line of 64 bytes
/// 4 bits    4 lines: line s % 4 has steps s and s + 4, in low and high nibbles
/// 5 bits    these, and a line with the fifth bit of step s in bit s
/// 6 bits    these, and two lines: line s / 4 has the upper bits of step s from bit 2 (s % 4) on
/// 8 bits    8 lines, one for each step
/// ```
#[derive(Debug, Clone, Copy)]
pub(super) struct CodeLines {
    bits: usize,
}

/// Bytes of a step.
const LINE: usize = 4 * LANES;
/// Bytes of a group's nibbles.
pub(super) const NIBBLE_BYTES: usize = 4 * LINE;

impl CodeLines {
    pub(super) fn of(bits: usize) -> Self {
        Self { bits }
    }

    fn group_bytes(self) -> usize {
        GROUP * LANES * self.bits / 8
    }

    /// Reads a lane's code `k`.
    pub(super) fn read(self, panel: &[u8], lane: usize, k: usize) -> u8 {
        let (step, byte) = (k % GROUP / 4, 4 * lane + k % 4);
        let group = &panel[k / GROUP * self.group_bytes()..];
        if self.bits == 8 {
            return group[step * LINE + byte];
        }
        let nibble = group[step % 4 * LINE + byte] >> (step / 4 * 4) & 15;
        let (line, shift, mask) = self.upper(step);
        if mask == 0 {
            nibble
        } else {
            nibble | (group[NIBBLE_BYTES + line * LINE + byte] >> shift & mask) << 4
        }
    }

    /// Stores a lane's codes.
    fn put(self, panel: &mut [u8], lane: usize, codes: &[u8]) {
        for (codes, group) in codes.chunks_exact(GROUP).zip(panel.chunks_exact_mut(self.group_bytes())) {
            for (k, &code) in codes.iter().enumerate() {
                let (step, byte) = (k / 4, 4 * lane + k % 4);
                if self.bits == 8 {
                    group[step * LINE + byte] = code;
                    continue;
                }
                group[step % 4 * LINE + byte] |= (code & 15) << (step / 4 * 4);
                let (line, shift, mask) = self.upper(step);
                if mask != 0 {
                    group[NIBBLE_BYTES + line * LINE + byte] |= (code >> 4 & mask) << shift;
                }
            }
        }
    }

    /// Returns the line, the position and the mask of the bits above the nibble.
    fn upper(self, step: usize) -> (usize, usize, u8) {
        match self.bits {
            5 => (0, step, 1),
            6 => (step / 4, 2 * (step % 4), 3),
            _ => (0, 0, 0),
        }
    }
}

fn put_half(halves: &mut [u8], at: usize, value: f32) {
    halves[2 * at..2 * at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

//! From a stored tensor to panels.

use half::f16;

use crate::{
    TensorType,
    activations::{Forms, GROUP},
    buffer::{Arena, Buffer},
    quant::{DecodedRow, IntegerForm, Offset, integer_form},
    simd::{LANES, prefetch},
};

/// Why a tensor cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The bytes are not `rows` rows of `columns` elements.
    #[error("{got} bytes are not {rows} rows of {columns} elements of {kind:?}")]
    Size {
        /// The encoding.
        kind: TensorType,
        /// Output features.
        rows: usize,
        /// Input features.
        columns: usize,
        /// Bytes given.
        got: usize,
    },
    /// The operating system has no memory for the packed form.
    #[error("no memory for a packed {rows} x {columns} matrix")]
    Memory {
        /// Output features.
        rows: usize,
        /// Input features.
        columns: usize,
        /// Cause.
        source: std::io::Error,
    },
}

/// Which tile computes the matrix. Named after bits and zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    F32,
    F16,
    Bf16,
    Four8,
    FourMinimum,
    Eight128,
    EightMinimum,
    Eight128Halves,
}

/// A weight matrix `[rows, columns]` (output x input features) in panels of sixteen rows.
///
/// A panel of integers is its codes, group after group, then its scales (and minima) in 16 bits, group after group.
#[derive(Debug)]
pub struct PackedMatrix {
    rows: usize,
    columns: usize,
    pub(super) packing: Packing,
    panel_bytes: usize,
    unit: f32,
    data: Buffer<u8>,
}

impl PackedMatrix {
    /// Packs a stored tensor: `rows` rows of `columns` elements of `kind`, row after row.
    ///
    /// # Errors
    ///
    /// The sizes do not fit together, or there is no memory.
    pub fn pack(kind: TensorType, data: &[u8], rows: usize, columns: usize) -> Result<Self, PackError> {
        Self::pack_in(&Arena::new(0), kind, data, rows, columns)
    }

    /// As [`PackedMatrix::pack`], with memory from `arena`.
    ///
    /// # Errors
    ///
    /// As [`PackedMatrix::pack`].
    pub fn pack_in(
        arena: &Arena,
        kind: TensorType,
        data: &[u8],
        rows: usize,
        columns: usize,
    ) -> Result<Self, PackError> {
        let size = PackError::Size { kind, rows, columns, got: data.len() };
        let row_bytes = kind.row_bytes(columns).filter(|&bytes| bytes > 0);
        let Some(row_bytes) = row_bytes.filter(|bytes| bytes.checked_mul(rows) == Some(data.len())) else {
            return Err(size);
        };
        let (packing, panel_bytes) = layout(kind, columns);
        let bytes = rows.div_ceil(LANES).checked_mul(panel_bytes).ok_or(size)?;
        let buffer = arena.zeroed(bytes).map_err(|source| PackError::Memory { rows, columns, source })?;
        let mut matrix = Self { rows, columns, packing, panel_bytes, unit: 1.0, data: buffer };
        match integer_form(kind) {
            Some(form) => matrix.pack_integers(kind, form, data, row_bytes),
            None => matrix.pack_floats(data, row_bytes),
        }
        Ok(matrix)
    }

    /// Output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// The forms of activations it is multiplied with.
    #[must_use]
    pub fn forms(&self) -> Forms {
        match self.packing {
            Packing::F32 | Packing::F16 => Forms::default(),
            Packing::Bf16 => Forms { bf16: true, ..Forms::default() },
            _ => Forms { bytes: true, ..Forms::default() },
        }
    }

    /// True if activations enter unrounded, so that the layer is linear in them.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.forms() == Forms::default()
    }

    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub(super) fn unit(&self) -> f32 {
        self.unit
    }

    pub(super) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.panels());
        // SAFETY: `pack` has made room for this many panels.
        unsafe { self.data.as_ptr().add(panel * self.panel_bytes) }
    }

    /// Asks for `bytes` from `at` on in a panel, which need not exist.
    #[inline(always)]
    pub(super) fn prefetch(&self, panel: usize, at: usize, bytes: usize) {
        let start = self.data.as_ptr().wrapping_add(panel * self.panel_bytes + at);
        let mut line = 0;
        while line < bytes {
            prefetch(start.wrapping_add(line));
            line += 64;
        }
    }

    /// Writes row `row` as floats to `out`, for the token embedding that shares its weights with the head.
    ///
    /// # Panics
    ///
    /// If there is no such row or `out` is not as long as a row.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.columns, "row {row} of {} elements", out.len());
        let (panel, lane) = (row / LANES, row % LANES);
        let panel = &self.data.as_slice()[panel * self.panel_bytes..][..self.panel_bytes];
        match self.packing {
            Packing::F32 => read_lane(out, |k| {
                let at = (k * LANES + lane) * 4;
                f32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
            }),
            Packing::F16 => read_lane(out, |k| half_at(panel, k * LANES + lane)),
            Packing::Bf16 => read_lane(out, |k| {
                let at = (k / 2 * LANES + lane) * 4 + k % 2 * 2;
                f32::from_bits(u32::from_le_bytes([0, 0, panel[at], panel[at + 1]]))
            }),
            _ => self.read_integer_lane(panel, lane, out),
        }
    }

    fn read_integer_lane(&self, panel: &[u8], lane: usize, out: &mut [f32]) {
        let form = self.packing.integer_form().expect("float packings were handled");
        let (codes, scales) = panel.split_at(self.columns * LANES * form.bits / 8);
        read_lane(out, |k| {
            let (byte, shift) = code_position(form.bits, lane, k);
            let code = if form.bits == 4 { (codes[byte] >> shift) & 15 } else { codes[byte] };
            let group = k / form.group;
            let value = match form.offset {
                Offset::Zero(zero) => {
                    half_at(scales, group * LANES + lane) * (f32::from(code) - f32::from(zero))
                }
                Offset::Minimum => {
                    half_at(scales, 2 * group * LANES + lane) * f32::from(code)
                        + half_at(scales, (2 * group + 1) * LANES + lane)
                }
            };
            value * self.unit
        });
    }

    fn pack_floats(&mut self, data: &[u8], row_bytes: usize) {
        let element = if self.packing == Packing::F32 { 4 } else { 2 };
        let bf16 = self.packing == Packing::Bf16;
        let panel_bytes = self.panel_bytes;
        let packed = self.data.as_mut_slice();
        for (row, values) in data.chunks_exact(row_bytes).enumerate() {
            let (panel, lane) = (&mut packed[row / LANES * panel_bytes..][..panel_bytes], row % LANES);
            for (k, value) in values.chunks_exact(element).enumerate() {
                let at =
                    if bf16 { (k / 2 * LANES + lane) * 4 + k % 2 * 2 } else { (k * LANES + lane) * element };
                panel[at..at + element].copy_from_slice(value);
            }
        }
    }

    fn pack_integers(&mut self, kind: TensorType, form: IntegerForm, data: &[u8], row_bytes: usize) {
        self.unit = common_unit(kind, data, row_bytes);
        let (panel_bytes, code_bytes) = (self.panel_bytes, self.columns * LANES * form.bits / 8);
        let inverse = 1.0 / self.unit;
        let packed = self.data.as_mut_slice();
        let mut decoded = DecodedRow::default();
        for (row, bytes) in data.chunks_exact(row_bytes).enumerate() {
            decoded.decode(kind, bytes);
            let panel = &mut packed[row / LANES * panel_bytes..][..panel_bytes];
            let (codes, scales) = panel.split_at_mut(code_bytes);
            put_codes(codes, form.bits, row % LANES, &decoded.codes);
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
    fn integer_form(self) -> Option<IntegerForm> {
        let form = |bits, group, offset| Some(IntegerForm { bits, group, offset });
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => None,
            Self::Four8 => form(4, GROUP, Offset::Zero(8)),
            Self::FourMinimum => form(4, GROUP, Offset::Minimum),
            Self::Eight128 => form(8, GROUP, Offset::Zero(128)),
            Self::EightMinimum => form(8, GROUP, Offset::Minimum),
            Self::Eight128Halves => form(8, GROUP / 2, Offset::Zero(128)),
        }
    }
}

/// The packing of `kind` and the bytes of its panels.
fn layout(kind: TensorType, columns: usize) -> (Packing, usize) {
    let Some(form) = integer_form(kind) else {
        return match kind {
            TensorType::F32 => (Packing::F32, columns * LANES * 4),
            TensorType::F16 => (Packing::F16, columns * LANES * 2),
            _ => (Packing::Bf16, columns.next_multiple_of(2) * LANES * 2),
        };
    };
    let packing = match (form.bits, form.group, form.offset) {
        (4, _, Offset::Zero(_)) => Packing::Four8,
        (4, _, Offset::Minimum) => Packing::FourMinimum,
        (_, 16, _) => Packing::Eight128Halves,
        (_, _, Offset::Zero(_)) => Packing::Eight128,
        (_, _, Offset::Minimum) => Packing::EightMinimum,
    };
    let numbers = if form.offset == Offset::Minimum { 2 } else { 1 };
    let bytes = columns * LANES * form.bits / 8 + columns / form.group * numbers * LANES * 2;
    // Panels start at cache lines.
    (packing, bytes.next_multiple_of(64))
}

/// The power of two relative to which the scales and minima of a tensor are stored in 16 bits. The largest
/// magnitude comes out near 2^14, so numbers down to 2^-28 of it keep their eleven bits.
fn common_unit(kind: TensorType, data: &[u8], row_bytes: usize) -> f32 {
    let mut decoded = DecodedRow::default();
    let mut largest = 0.0f32;
    for bytes in data.chunks_exact(row_bytes) {
        decoded.decode(kind, bytes);
        largest = decoded.scales.iter().chain(&decoded.minima).fold(largest, |m, x| m.max(x.abs()));
    }
    if largest.is_normal() { 2.0f32.powi(largest.log2().floor() as i32 - 14) } else { 1.0 }
}

/// Byte and bit shift of a lane's code `k` within a panel's codes.
fn code_position(bits: usize, lane: usize, k: usize) -> (usize, u32) {
    let (group, step, byte) = (k / GROUP, k % GROUP / 4, k % 4);
    match bits {
        4 => (group * 256 + step % 4 * 64 + lane * 4 + byte, if step < 4 { 0 } else { 4 }),
        _ => (group * 512 + step * 64 + lane * 4 + byte, 0),
    }
}

fn put_codes(panel: &mut [u8], bits: usize, lane: usize, codes: &[u8]) {
    for (k, &code) in codes.iter().enumerate() {
        let (byte, shift) = code_position(bits, lane, k);
        panel[byte] |= code << shift;
    }
}

fn put_half(halves: &mut [u8], at: usize, value: f32) {
    halves[2 * at..2 * at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

fn half_at(halves: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([halves[2 * at], halves[2 * at + 1]]).to_f32()
}

fn read_lane(out: &mut [f32], value: impl Fn(usize) -> f32) {
    for (k, out) in out.iter_mut().enumerate() {
        *out = value(k);
    }
}

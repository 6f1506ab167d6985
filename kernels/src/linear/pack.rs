//! Packed matrices: made from a stored tensor, or views of bytes that were packed before.

use std::ops::Range;

use half::f16;

use super::form::{CodeLines, PackError, PackedLayout, Packing};
use crate::{
    TensorType,
    activations::ActivationForms,
    buffer::{Arena, PageSlab, View},
    quant::{E2M1, Offset},
    simd::{LANES, prefetch},
};

/// A weight matrix `[rows, columns]` (output x input features) in panels of sixteen rows.
///
/// A panel of integers holds its codes, group after group, then its scales (and minima) in 16 bits, group
/// after group. A clone shares the bytes.
#[derive(Debug, Clone)]
pub struct PackedMatrix {
    form: PackedLayout,
    data: View,
}

impl PackedMatrix {
    /// Packs a stored tensor: `rows` rows of `columns` elements of `kind`, row-major.
    ///
    /// # Errors
    /// Fails if the sizes do not match or the memory cannot be allocated.
    pub fn pack(kind: TensorType, data: &[u8], rows: usize, columns: usize) -> Result<Self, PackError> {
        Self::pack_in(&Arena::new(0), kind, data, rows, columns)
    }

    /// Packs a stored tensor like [`PackedMatrix::pack`], with memory from `arena`.
    ///
    /// # Errors
    /// Fails under the conditions of [`PackedMatrix::pack`].
    pub fn pack_in(
        arena: &Arena,
        kind: TensorType,
        data: &[u8],
        rows: usize,
        columns: usize,
    ) -> Result<Self, PackError> {
        Self::pack_rows_in(arena, kind, data, [rows, columns], 0..rows)
    }

    /// Packs the rows `range` of a stored tensor of `[rows, columns]` elements, with memory from `arena`. The
    /// bits of products equal those of the whole matrix; of gradients, if the range begins at a multiple of
    /// [`PackedLayout::CUT_ROWS`].
    ///
    /// # Errors
    /// Fails under the conditions of [`PackedMatrix::pack`].
    ///
    /// # Panics
    /// Panics if the rows do not exist.
    pub fn pack_rows_in(
        arena: &Arena,
        kind: TensorType,
        data: &[u8],
        [rows, columns]: [usize; 2],
        range: Range<usize>,
    ) -> Result<Self, PackError> {
        // The unit of the scales is that of the whole tensor.
        let form = PackedLayout::of(kind, data, rows, columns)?.of_rows(&range);
        let memory = |source| PackError::Memory { rows: range.len(), columns, source };
        let mut buffer = arena.zeroed(form.bytes()).map_err(memory)?;
        let row_bytes = data.len() / rows.max(1);
        form.pack(&data[range.start * row_bytes..range.end * row_bytes], buffer.as_mut_slice());
        Ok(Self { form, data: buffer.into() })
    }

    /// Returns the matrix of layout `form` whose panels begin at byte `at` of `slab`, or `None` if they
    /// exceed the slab. The slab is not refilled while the matrix or a clone exists.
    #[must_use]
    pub fn within(slab: &PageSlab, at: usize, form: PackedLayout) -> Option<Self> {
        Some(Self { form, data: slab.view(at, form.bytes())? })
    }

    /// Copies `count` rows of other matrices into a new matrix. `of` returns the source matrix and row of
    /// each row. The sources must have one layout except for their rows, as parts of one matrix have.
    ///
    /// # Errors
    /// Fails if the memory cannot be allocated.
    ///
    /// # Panics
    /// Panics if the rows do not exist, or their matrices differ in layout.
    pub fn gathered<'a>(count: usize, of: impl Fn(usize) -> (&'a Self, usize)) -> Result<Self, PackError> {
        assert!(count > 0, "there are rows to gather");
        let form = of(0).0.form.with_rows(count);
        let memory = |source| PackError::Memory { rows: count, columns: form.columns(), source };
        let mut buffer = Arena::new(0).zeroed::<u8>(form.bytes()).map_err(memory)?;
        let (panels, bytes) = (buffer.as_mut_slice(), form.panel_bytes());
        for row in 0..count {
            let (from, source) = of(row);
            assert!(
                from.form.with_rows(count) == form && source < from.rows(),
                "row {source} is of the form"
            );
            let panel = &from.data.as_slice()[source / LANES * bytes..][..bytes];
            form.copy_lane(
                (panel, source % LANES),
                (&mut panels[row / LANES * bytes..][..bytes], row % LANES),
            );
        }
        Ok(Self { form, data: buffer.into() })
    }

    /// Returns the number of output features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.form.rows()
    }

    /// Returns the number of input features.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.form.columns()
    }

    /// Returns the bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// Returns the forms of activations that the matrix multiplies.
    #[must_use]
    pub fn forms(&self) -> ActivationForms {
        self.form.forms()
    }

    /// True if activations enter unrounded, so that the layer is linear in them.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.form.is_exact()
    }

    #[inline(always)]
    pub(super) fn packing(&self) -> Packing {
        self.form.packing
    }

    pub(super) fn panels(&self) -> usize {
        self.form.panels()
    }

    pub(super) fn unit(&self) -> f32 {
        self.form.unit()
    }

    #[inline(always)]
    pub(super) fn panel_bytes(&self) -> usize {
        self.form.panel_bytes()
    }

    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.panels());
        // SAFETY: `pack` has made room for all panels.
        unsafe { self.data.as_ptr().add(panel * self.panel_bytes()) }
    }

    pub(super) fn panel_slice(&self, panel: usize) -> &[u8] {
        &self.data.as_slice()[panel * self.panel_bytes()..][..self.panel_bytes()]
    }

    /// Prefetches `bytes` from `at` on in a panel, which need not exist.
    #[inline(always)]
    pub(super) fn prefetch(&self, panel: usize, at: usize, bytes: usize) {
        let start = self.data.as_ptr().wrapping_add(panel * self.panel_bytes() + at);
        let mut line = 0;
        while line < bytes {
            prefetch(start.wrapping_add(line));
            line += 64;
        }
    }

    /// Writes row `row` as floats to `out`, for token embeddings that share their weights with the head.
    ///
    /// # Panics
    /// Panics if there is no such row or `out` is not as long as a row.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows() && out.len() == self.columns(), "row {row} of {} elements", out.len());
        let (panel, lane) = (self.panel_slice(row / LANES), row % LANES);
        match self.packing() {
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
        let form = self.packing().integer_form().expect("float packings were handled");
        let (codes, scales) = panel.split_at(self.columns() * LANES * form.bits / 8);
        let lines = CodeLines::of(form.bits);
        read_lane(out, |k| {
            let code = lines.read(codes, lane, k);
            let group = k / form.group;
            let value = match form.offset {
                Offset::Zero(zero) => {
                    half_at(scales, group * LANES + lane) * (f32::from(code) - f32::from(zero))
                }
                Offset::Minimum => {
                    half_at(scales, 2 * group * LANES + lane) * f32::from(code)
                        + half_at(scales, (2 * group + 1) * LANES + lane)
                }
                Offset::E2m1 => {
                    half_at(scales, group * LANES + lane) * (f32::from(E2M1[usize::from(code)]) - 128.0)
                }
            };
            value * self.unit()
        });
    }
}

fn half_at(halves: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([halves[2 * at], halves[2 * at + 1]]).to_f32()
}

fn read_lane(out: &mut [f32], value: impl Fn(usize) -> f32) {
    for (k, out) in out.iter_mut().enumerate() {
        *out = value(k);
    }
}

//! Unit of work of a thread in a linear layer.

use super::{out_panels::OutPanels, part::LinearPart};
use crate::{activations::Activations, isa::MatrixUnit};

/// Panels `first..last` of one part, for all rows.
#[derive(Clone, Copy)]
pub(super) struct PanelChunk<'a> {
    pub(super) x: &'a Activations,
    pub(super) part: LinearPart<'a>,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) matrix_unit: MatrixUnit,
    pub(super) out: OutPanels<'a>,
}

//! Shapes of sites for pads.

use kernels::Modulus;
use shmproto::layer::{SiteOp, control::Site};

use crate::{masking::Direction, session::calls::modular_range};

/// The shape of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PadShape {
    /// Number of input features.
    pub columns: u32,
    /// Number of output features of all parts.
    pub outputs: u32,
    /// Modulus of the values, forward and backward.
    pub moduli: [Modulus; 2],
}

impl PadShape {
    /// Returns the shape of an executor's site; `None` if the site has no modular path.
    pub(super) fn of(site: &Site) -> Option<Self> {
        let modulus = |op| modular_range(site, op).map(|range| range.modulus);
        Some(Self {
            columns: site.columns,
            outputs: site.parts.iter().map(|part| part.rows).sum(),
            moduli: [modulus(SiteOp::Forward)?, modulus(SiteOp::Backward)?],
        })
    }

    /// Returns the number of 32-bit words of a row, and of the row's answer.
    pub(super) fn words(self, direction: Direction) -> (usize, usize) {
        let modulus = self.moduli[direction as usize];
        let (columns, outputs) = (modulus.words(self.columns as usize), modulus.words(self.outputs as usize));
        match direction {
            Direction::Forward => (columns, outputs),
            Direction::Backward => (outputs, columns),
        }
    }
}

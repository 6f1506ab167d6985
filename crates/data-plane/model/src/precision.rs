//! Arithmetic of a pass's linear layers on a CPU.
//!
//! `docs/performance/accuracy.md` measures the errors on SmolLM2-135M in Q4_1. A quantization group's error
//! grows with its largest magnitude, and a few groups of each row cause nearly all of it. A second byte for
//! these groups removes most of the error for a tenth of the products.

use kernels::Rounding;

use crate::{
    linear_sites::{Arithmetic, Site},
    shape::layout::LinearGroup,
};

/// Precision of linear layers. Each value gives its own result bits, by every route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Activations of 8 bits.
    Int8,
    /// 15 bits for groups with large errors at 8 bits, 8 bits for the others.
    #[default]
    Mixed,
    /// Activations of 15 bits.
    Int15,
    /// Activations and weights of bf16, summed in 32 bits in the order of the matrix unit.
    Bf16,
    /// Activations are never rounded, even for 16-bit weights, as in `tune --precision exact`.
    Exact,
}

impl Precision {
    /// Returns the arithmetic of a linear layer; `group` is unknown for unknown architectures.
    fn arithmetic(self, group: Option<LinearGroup>) -> Arithmetic {
        match self {
            Self::Int8 => Arithmetic::Quantized(Rounding::INT8),
            Self::Mixed => Arithmetic::Quantized(Rounding::wide_above(mixed(group))),
            Self::Int15 => Arithmetic::Quantized(Rounding::INT15),
            Self::Bf16 => Arithmetic::Bf16,
            Self::Exact => Arithmetic::Unrounded,
        }
    }

    /// Sets this precision on `sites`; `groups` names their linear groups if the architecture is known.
    pub(crate) fn apply(self, sites: &mut [Site], groups: &[LinearGroup]) {
        for (number, site) in sites.iter_mut().enumerate() {
            site.arithmetic = self.arithmetic(groups.get(number).copied());
            match site.arithmetic {
                Arithmetic::Unrounded => site.fast_is_linear = true,
                Arithmetic::Bf16 => site.fast_is_linear = false,
                Arithmetic::Quantized(_) => {}
            }
        }
    }
}

/// Threshold above which a quantization group gets two bytes, in means of its row. The threshold is lower
/// where errors show more in the logits and products cost less time.
const fn mixed(group: Option<LinearGroup>) -> f32 {
    match group {
        Some(LinearGroup::Head) => 0.5,
        Some(LinearGroup::Qkv) => 1.0,
        Some(_) | None => 2.0,
    }
}

//! How finely the activations of a pass are rounded where they meet integer weights on a CPU.
//!
//! Where errors come from, on SmolLM2-135M in Q4_1: `docs/performance/accuracy.md`. A group's error goes with its largest
//! magnitude, and a few groups of each row have nearly all of it; a second byte for these takes most of the error away, for a
//! tenth of the products.

use kernels::Rounding;

use crate::{linear_sites::Site, shape::layout::LinearGroup};

/// What an answer is computed with. Each has bits of its own, by every route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Activations of 8 bits.
    Int8,
    /// Of 15 bits where the error of 8 would matter, of 8 elsewhere.
    #[default]
    Mixed,
    /// Of 15 bits.
    Int15,
    /// Not rounded: what adapters of `tune --precision exact` were trained over. Weights of 16 bits do not round them either then.
    Exact,
}

impl Precision {
    /// How the inputs of a linear layer are rounded, of a group if that is known; `None`: they are not.
    fn rounding(self, group: Option<LinearGroup>) -> Option<Rounding> {
        match self {
            Self::Int8 => Some(Rounding::INT8),
            Self::Mixed => Some(Rounding::wide_above(mixed(group))),
            Self::Int15 => Some(Rounding::INT15),
            Self::Exact => None,
        }
    }

    /// Has `sites` compute with it, which are these `groups` if the architecture is known.
    pub(crate) fn apply(self, sites: &mut [Site], groups: &[LinearGroup]) {
        for (number, site) in sites.iter_mut().enumerate() {
            site.rounding = self.rounding(groups.get(number).copied());
            site.fast_is_linear |= site.rounding.is_none();
        }
    }
}

/// From what on a group is worth two bytes, in means of its row: the less, the more a layer's error shows in the logits, and
/// the less its products take of the time.
const fn mixed(group: Option<LinearGroup>) -> f32 {
    match group {
        Some(LinearGroup::Head) => 0.5,
        Some(LinearGroup::Qkv) => 1.0,
        Some(_) | None => 2.0,
    }
}

//! Arithmetic of a pass's linear layers on a CPU.
//!
//! `docs/performance/accuracy.md` measures the errors on SmolLM2-135M in Q4_1. A quantization group's error
//! grows with its largest magnitude, and a few groups of each row cause nearly all of it. A second byte for
//! these groups removes most of the error for a tenth of the products.

use kernels::{Isa, Rounding, attention::KvPrecision, lora::LoraPrecision};

use crate::{
    linear_sites::{Arithmetic, Site},
    shape::layout::LinearGroup,
};

/// Minimum number of weights of a model that is too large for a cache.
const LARGE_WEIGHTS: usize = 1 << 28;

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
    /// Returns the precision that suits layers on a processor with the set `isa`. `sites` have the default
    /// precision.
    ///
    /// | Weights | with a matrix unit for bf16 | other processors |
    /// |---|---|---|
    /// | bf16, or integers of 4 to 8 bits, 2^28 or more | `Bf16` | `Mixed` |
    /// | fewer | `Mixed` | `Mixed` |
    /// | any layer in f32 or f16 | `Mixed` | `Mixed` |
    ///
    /// The table was made from `docs/performance/kernels.md`. No start measures anything, so equal hosts
    /// always choose alike. A small model lies in a cache, where one stream waits for unpacking, not for
    /// memory. Rounding to bf16 would lose bits of f32 and f16 weights.
    pub(crate) fn suitable(isa: Isa, sites: &[Site]) -> Self {
        let loses_none = sites.iter().all(|site| !site.fast_is_linear);
        let of_site = |site: &Site| site.columns * site.parts.iter().map(|part| part.rows).sum::<usize>();
        let is_large = sites.iter().map(of_site).sum::<usize>() >= LARGE_WEIGHTS;
        if loses_none && is_large && isa.is_fast_at_bf16() { Self::Bf16 } else { Self::default() }
    }

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

/// Rounding of a base's layers, which decides the data types of its adapters and its KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaseNumerics {
    /// No layer rounds activations.
    Exact,
    /// Layers round activations to integers, or to 16 bits on a GPU.
    Rounded,
    /// All layers compute in bf16, in the order of the matrix unit.
    Bf16,
}

impl BaseNumerics {
    /// Returns the rounding of these layers.
    #[must_use]
    pub fn of(sites: &[Site]) -> Self {
        if sites.iter().all(|site| site.fast_is_linear) {
            Self::Exact
        } else if sites.iter().all(|site| site.arithmetic == Arithmetic::Bf16) {
            Self::Bf16
        } else {
            Self::Rounded
        }
    }

    /// Returns the element precision of adapters.
    #[must_use]
    pub fn adapters(self) -> LoraPrecision {
        match self {
            Self::Exact => LoraPrecision::Exact,
            Self::Rounded | Self::Bf16 => LoraPrecision::Compact,
        }
    }

    /// Returns the element type of the KV cache: as `chosen`, else the one that suits the layers.
    #[must_use]
    pub fn kv(self, chosen: Option<KvPrecision>) -> KvPrecision {
        chosen.unwrap_or(match self {
            Self::Exact => KvPrecision::F32,
            Self::Rounded => KvPrecision::F16,
            Self::Bf16 => KvPrecision::Bf16,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear_sites::SitePart;

    /// Sites that are a large model together.
    fn sites(floats: &[bool]) -> Vec<Site> {
        let site = |&fast_is_linear: &bool| Site {
            columns: LARGE_WEIGHTS / 2,
            parts: vec![SitePart { name: String::new(), rows: 1, has_bias: false }],
            fast_is_linear,
            arithmetic: Arithmetic::Unrounded,
            ring: None,
        };
        let mut sites: Vec<_> = floats.iter().map(site).collect();
        Precision::default().apply(&mut sites, &[]);
        sites
    }

    #[test]
    fn a_matrix_unit_for_bf16_decides_unless_a_model_is_small_or_would_lose_bits() {
        let best = Isa::best();
        let with_unit = if best.is_fast_at_bf16() { Precision::Bf16 } else { Precision::Mixed };
        assert_eq!(Precision::suitable(best, &sites(&[false, false])), with_unit);
        assert_eq!(Precision::suitable(Isa::Portable, &sites(&[false, false])), Precision::Mixed);
        assert_eq!(Precision::suitable(best, &sites(&[false, true])), Precision::Mixed);
        assert_eq!(Precision::suitable(best, &sites(&[false])), Precision::Mixed);
    }

    #[test]
    fn adapters_and_keys_have_types_that_suit_the_layers() {
        let mut sites = sites(&[false, true]);
        assert_eq!(BaseNumerics::of(&sites), BaseNumerics::Rounded);
        for (precision, numerics, kv) in [
            (Precision::Bf16, BaseNumerics::Bf16, KvPrecision::Bf16),
            (Precision::Exact, BaseNumerics::Exact, KvPrecision::F32),
        ] {
            precision.apply(&mut sites, &[]);
            assert_eq!(BaseNumerics::of(&sites), numerics);
            assert_eq!(numerics.kv(None), kv);
            assert_eq!(numerics.kv(Some(KvPrecision::F16)), KvPrecision::F16);
        }
        assert_eq!(BaseNumerics::Rounded.kv(None), KvPrecision::F16);
        assert_eq!(BaseNumerics::Bf16.adapters(), LoraPrecision::Compact);
    }
}

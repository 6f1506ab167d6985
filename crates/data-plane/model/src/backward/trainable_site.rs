//! Places in a pass where adapter weights learn.

use crate::{adapter::MethodWeights, forward::LinearGroup, shape::source::Target};

/// A place where adapter weights learn, ordered as in the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TrainableSite(usize);

impl TrainableSite {
    const STEPS: usize = 5;

    /// Returns the place of keys and values, between their linear layers and attention.
    pub(super) fn keys_and_values(layer: usize) -> Self {
        Self(layer * Self::STEPS + 1)
    }

    pub(super) fn of(layer: usize, group: LinearGroup) -> Self {
        let step = match group {
            LinearGroup::Qkv => 0,
            LinearGroup::O => 2,
            LinearGroup::GateUp => 3,
            LinearGroup::Down => 4,
            LinearGroup::ExpertGateUp(_) | LinearGroup::ExpertDown(_) => {
                unreachable!("nothing learns in an expert")
            }
            LinearGroup::Head => return Self(usize::MAX),
        };
        Self(layer * Self::STEPS + step)
    }

    pub(super) fn of_target(layer: usize, target: Target) -> Self {
        Self::of(
            layer,
            match target {
                Target::Q | Target::K | Target::V => LinearGroup::Qkv,
                Target::O => LinearGroup::O,
                Target::Gate | Target::Up => LinearGroup::GateUp,
                Target::Down => LinearGroup::Down,
                Target::LmHead => LinearGroup::Head,
                Target::Expert(..) => unreachable!("nothing learns in an expert"),
            },
        )
    }

    /// Returns the first place where `adapter` learns; the reverse pass ends there.
    pub(super) fn first(adapter: &MethodWeights) -> Self {
        let of = |(layer, target)| Self::of_target(layer, target);
        let first = match adapter {
            MethodWeights::Lora(modules) | MethodWeights::Activated(modules, _) => {
                modules.iter().map(|module| of((module.layer, module.target))).min()
            }
            MethodWeights::Ia3(scales) => {
                scales.vectors().iter().map(|vector| of((vector.layer, vector.target))).min()
            }
            MethodWeights::Prefix(_) => Some(Self::keys_and_values(0)),
            MethodWeights::Prompt(_) => None,
        };
        first.unwrap_or(Self(usize::MAX))
    }

    pub(super) fn layer(self) -> Option<usize> {
        (self.0 != usize::MAX).then_some(self.0 / Self::STEPS)
    }
}

//! Weights in memory, streamed or of a device group, as the operator configures.

use std::sync::Arc;

use kernels::Activations;

use crate::{
    cpu::Compute,
    linear_sites::{Site, SiteCall},
    precision::Precision,
    shape::config::ModelConfig,
    weight_stream_stats::WeightStreamStats,
    weights::{
        ResidentLayers,
        device_group::leader::GroupLayers,
        host::{HostLayers, WaitCallback},
        streamed::{StreamedLayers, WeightReadError},
    },
};

/// Weights of a served base.
#[derive(Debug)]
pub enum ServedLayers {
    /// All weights are in memory.
    Resident(Box<ResidentLayers>),
    /// A part of the weights is in memory.
    Streamed(Box<StreamedLayers>),
    /// Several processes hold the weights together.
    Grouped(Box<GroupLayers>),
}

impl HostLayers for ServedLayers {
    type Error = WeightReadError;

    fn config(&self) -> &ModelConfig {
        match self {
            Self::Resident(layers) => layers.config(),
            Self::Streamed(layers) => layers.config(),
            Self::Grouped(layers) => layers.config(),
        }
    }

    fn sites(&self) -> &[Site] {
        match self {
            Self::Resident(layers) => layers.sites().sites(),
            Self::Streamed(layers) => layers.sites(),
            Self::Grouped(layers) => layers.sites(),
        }
    }

    fn set_precision(&mut self, precision: Precision) {
        match self {
            Self::Resident(layers) => layers.set_precision(precision),
            Self::Streamed(layers) => layers.set_precision(precision),
            Self::Grouped(layers) => layers.set_precision(precision),
        }
    }

    fn commit(&mut self, compute: &mut Compute) {
        match self {
            Self::Resident(layers) => layers.commit(compute),
            Self::Streamed(layers) => layers.commit(compute),
            Self::Grouped(layers) => layers.commit(compute),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Resident(layers) => layers.bytes(),
            Self::Streamed(layers) => layers.bytes(),
            Self::Grouped(layers) => layers.bytes(),
        }
    }

    fn evaluate(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
        meanwhile: WaitCallback<'_>,
    ) -> Result<(), WeightReadError> {
        match self {
            Self::Resident(layers) => {
                Ok(HostLayers::evaluate(&mut **layers, compute, call, x, out, meanwhile)?)
            }
            Self::Streamed(layers) => layers.evaluate(compute, call, x, out, meanwhile),
            Self::Grouped(layers) => Ok(layers.evaluate(compute, call, x, out, meanwhile)?),
        }
    }

    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) -> Result<(), WeightReadError> {
        match self {
            Self::Resident(layers) => Ok(HostLayers::embed(&**layers, tokens, out)?),
            Self::Streamed(layers) => layers.embed(tokens, out),
            Self::Grouped(layers) => Ok(layers.embed(tokens, out)?),
        }
    }

    fn floors(&self) -> Option<Vec<u32>> {
        match self {
            Self::Resident(_) | Self::Grouped(_) => None,
            Self::Streamed(layers) => layers.floors(),
        }
    }

    fn sweep_bytes(&self) -> u64 {
        match self {
            Self::Resident(_) | Self::Grouped(_) => 0,
            Self::Streamed(layers) => layers.sweep_bytes(),
        }
    }

    fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        match self {
            Self::Resident(_) | Self::Grouped(_) => None,
            Self::Streamed(layers) => layers.sweep_figures(),
        }
    }
}

//! What of adapters is no matrix, on the device: vectors that scale (IA3), keys and values of virtual tokens.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use kernels::cuda::{CudaError, CudaStream, DeviceVec};

use crate::{
    adapter::{Prefix, ScaledSide, Scales},
    deltas::prepared::PreparedAdapter,
    shape::source::Target,
};

/// The small parts of one adapter.
#[derive(Debug)]
pub(super) struct DirectCopy {
    of: Weak<PreparedAdapter>,
    /// By layer, then target, as in the adapter.
    scales: Vec<Scale>,
    /// `[layers, tokens, 2, width]`: rows of a layer follow each other.
    prefix: Option<DevicePrefix>,
}

#[derive(Debug)]
struct Scale {
    place: (usize, Target),
    side: ScaledSide,
    factors: DeviceVec<f32>,
}

/// Keys and values of virtual tokens.
#[derive(Debug)]
pub(super) struct DevicePrefix {
    pub(super) values: DeviceVec<f32>,
    tokens: usize,
    /// Elements of keys and values of a token in a layer.
    pub(super) width: usize,
}

impl DevicePrefix {
    fn upload(stream: &CudaStream, prefix: &Prefix) -> Result<Self, CudaError> {
        let rows = (0..prefix.layers).flat_map(|layer| (0..prefix.tokens).map(move |token| (token, layer)));
        let values: Vec<f32> =
            rows.flat_map(|(token, layer)| prefix.keys_and_values(token, layer).iter().copied()).collect();
        let (tokens, width) = (prefix.tokens, 2 * prefix.width);
        Ok(Self { values: DeviceVec::from_slice(stream, &values)?, tokens, width })
    }

    /// Element at which a token's keys begin.
    pub(super) fn at(&self, token: usize, layer: usize) -> usize {
        (layer * self.tokens + token) * self.width
    }
}

impl DirectCopy {
    fn upload(stream: &CudaStream, adapter: &Arc<PreparedAdapter>) -> Result<Self, CudaError> {
        let vectors = adapter.scales().map_or(&[][..], Scales::vectors);
        // A DoRA over a layer with a bias has some, and needs a base in the host's memory.
        assert!(!adapter.scales().is_some_and(Scales::have_offsets), "offsets are not added on a device");
        let scale = |vector: &crate::adapter::ScaleVector| {
            let factors = DeviceVec::from_slice(stream, &vector.values)?;
            Ok(Scale { place: (vector.layer, vector.target), side: vector.side, factors })
        };
        let prefix = adapter.prefix().map(|prefix| DevicePrefix::upload(stream, prefix));
        Ok(Self {
            of: Arc::downgrade(adapter),
            scales: vectors.iter().map(scale).collect::<Result<_, CudaError>>()?,
            prefix: prefix.transpose()?,
        })
    }

    /// What scales this side of a linear layer.
    pub(super) fn factors(&self, layer: usize, target: Target, side: ScaledSide) -> Option<&DeviceVec<f32>> {
        let at = self.scales.binary_search_by_key(&(layer, target), |scale| scale.place).ok()?;
        let scale = self.scales.get(at)?;
        (scale.side == side).then_some(&scale.factors)
    }

    /// Keys and values of its virtual tokens.
    pub(super) fn prefix(&self) -> Option<&DevicePrefix> {
        self.prefix.as_ref()
    }
}

/// The small parts of all adapters that were used lately.
#[derive(Debug, Default)]
pub(super) struct DirectCopies {
    /// By the adapter's address, which stays its own while it is known here.
    copies: HashMap<usize, DirectCopy>,
}

/// What an adapter is called while anybody, be it weakly, refers to it.
fn name(adapter: &Arc<PreparedAdapter>) -> usize {
    Arc::as_ptr(adapter).addr()
}

impl DirectCopies {
    /// Sees to it that the adapter's small parts are on the device, and forgets those of adapters that are gone.
    pub(super) fn load(
        &mut self,
        stream: &CudaStream,
        adapter: &Arc<PreparedAdapter>,
    ) -> Result<(), CudaError> {
        if adapter.scales().is_none() && adapter.prefix().is_none() {
            return Ok(());
        }
        if !self.copies.contains_key(&name(adapter)) {
            self.copies.retain(|_, copy| copy.of.strong_count() > 0);
            self.copies.insert(name(adapter), DirectCopy::upload(stream, adapter)?);
        }
        Ok(())
    }

    /// Those of an adapter that was brought.
    pub(super) fn get(&self, adapter: &Arc<PreparedAdapter>) -> Option<&DirectCopy> {
        self.copies.get(&name(adapter))
    }
}

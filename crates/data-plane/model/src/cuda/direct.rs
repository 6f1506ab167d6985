//! Adapter parts on the device besides matrices: scaling vectors (IA3), keys and values of virtual tokens.

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

#[derive(Debug)]
pub(super) struct DirectCopy {
    of: Weak<PreparedAdapter>,
    /// Scales by layer, then target, as in the adapter.
    scales: Vec<Scale>,
    /// Prefix in the order `[layers, tokens, 2, width]`, so that rows of a layer are adjacent.
    prefix: Option<DevicePrefix>,
}

#[derive(Debug)]
struct Scale {
    place: (usize, Target),
    side: ScaledSide,
    factors: DeviceVec<f32>,
}

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

    /// Returns the index of the element where a token's keys begin.
    pub(super) fn at(&self, token: usize, layer: usize) -> usize {
        (layer * self.tokens + token) * self.width
    }
}

impl DirectCopy {
    fn upload(stream: &CudaStream, adapter: &Arc<PreparedAdapter>) -> Result<Self, CudaError> {
        let vectors = adapter.scales().map_or(&[][..], Scales::vectors);
        // Executors refuse biases, and a DoRA over a layer with a bias, where no base is in host memory.
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

    pub(super) fn factors(&self, layer: usize, target: Target, side: ScaledSide) -> Option<&DeviceVec<f32>> {
        let at = self.scales.binary_search_by_key(&(layer, target), |scale| scale.place).ok()?;
        let scale = self.scales.get(at)?;
        (scale.side == side).then_some(&scale.factors)
    }

    pub(super) fn prefix(&self) -> Option<&DevicePrefix> {
        self.prefix.as_ref()
    }
}

/// The small parts of recently used adapters.
#[derive(Debug, Default)]
pub(super) struct DirectCopies {
    /// Copies by the adapter's address, which stays unique because each copy holds a weak reference.
    copies: HashMap<usize, DirectCopy>,
}

/// Returns the adapter's address, unique while any reference exists, even a weak one.
fn name(adapter: &Arc<PreparedAdapter>) -> usize {
    Arc::as_ptr(adapter).addr()
}

impl DirectCopies {
    /// Uploads the adapter's small parts if they are missing, and drops those of freed adapters.
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

    pub(super) fn get(&self, adapter: &Arc<PreparedAdapter>) -> Option<&DirectCopy> {
        self.copies.get(&name(adapter))
    }
}

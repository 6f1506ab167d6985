//! The first layers of a served base, as a model of their own for draft adapters.
//!
//! The matrices share the base's memory, and nothing here reads a disk; of a streamed base, only pinned
//! weights can be shared. The head may be cut to a shortlist, whose rows are then copied.

use std::{convert::Infallible, sync::Arc};

use kernels::{Activations, PackError, PackedMatrix};

use crate::{
    adapter::DraftShape,
    cpu::Compute,
    linear_sites::{Site, SiteCall, SiteId},
    precision::Precision,
    shape::{config::ModelConfig, layout::block_groups, source::Target},
    sources::hf_names::module_name,
    weights::{
        device_group::leader::GroupWeights,
        host::{HostLayers, WaitCallback},
        sites::{Linear, SiteWeights},
    },
};

/// Reasons why the first layers of a base are not available.
#[derive(Debug, thiserror::Error)]
pub enum FirstLayersError {
    /// Some of the layers are on a disk.
    #[error(
        "the draft adapter computes {wanted} layers, but the base has only {in_memory} in memory; raise \
         --resident-weight-bytes, or use a draft adapter with fewer layers"
    )]
    NotInMemory {
        /// Number of layers that the draft computes.
        wanted: usize,
        /// Number of the base's first layers in memory.
        in_memory: usize,
    },
    /// The layers are in several processes.
    #[error(
        "a device group holds the base's layers in several processes, so a draft adapter cannot compute \
         them; use another drafter, or one device"
    )]
    Grouped,
    /// The embedding or the head is on a disk.
    #[error(
        "the draft adapter needs the base's {0} in memory, but it is streamed from the disk; raise or \
         remove --resident-weight-bytes"
    )]
    NoEnd(&'static str),
    /// Memory for the shortlist's rows of the head is missing.
    #[error("no memory for the head of the draft adapter")]
    Memory(#[from] PackError),
}

/// A matrix in pieces of equally many rows; the last piece may have fewer.
#[derive(Debug, Clone)]
pub(crate) struct PiecewiseMatrix(Vec<Arc<PackedMatrix>>);

impl PiecewiseMatrix {
    pub(crate) fn new(pieces: Vec<Arc<PackedMatrix>>) -> Option<Self> {
        (!pieces.is_empty()).then_some(Self(pieces))
    }

    /// Returns the piece with a row, and the row's index in the piece.
    pub(crate) fn of(&self, row: usize) -> (&PackedMatrix, usize) {
        let rows = self.0[0].rows();
        (&self.0[row / rows], row % rows)
    }

    fn linears(&self) -> Vec<Linear> {
        let name = || module_name(0, Target::LmHead);
        let linear =
            |matrix: &Arc<PackedMatrix>| Linear { name: name(), matrix: Arc::clone(matrix), bias: None };
        self.0.iter().map(linear).collect()
    }
}

/// Weights of a base in memory, to be shared.
#[derive(Debug, Clone)]
pub(crate) struct SharedLayers {
    /// Sites of the leading blocks in memory.
    pub(crate) blocks: Vec<Vec<Vec<Linear>>>,
    pub(crate) embedding: Option<PiecewiseMatrix>,
    pub(crate) head: Option<PiecewiseMatrix>,
    /// Weights of a device group, whose layers are in no process whole.
    pub(crate) group: Option<Arc<GroupWeights>>,
}

/// The first layers of a base, with its embedding and head.
#[derive(Debug)]
pub struct FirstLayers {
    sites: SiteWeights,
    embedding: PiecewiseMatrix,
    config: ModelConfig,
    /// Bytes that are not shared with the base.
    own_bytes: usize,
}

impl FirstLayers {
    /// Takes the layers of `shape` from a base with the configuration `base`.
    pub(crate) fn new(
        base: &ModelConfig,
        shared: &SharedLayers,
        shape: &DraftShape,
    ) -> Result<Self, FirstLayersError> {
        if shared.group.is_some() {
            return Err(FirstLayersError::Grouped);
        }
        let (wanted, in_memory) = (shape.layers, shared.blocks.len());
        let blocks = shared.blocks.get(..wanted);
        let blocks = blocks.ok_or(FirstLayersError::NotInMemory { wanted, in_memory })?;
        let end =
            |pieces: &Option<PiecewiseMatrix>, name| pieces.clone().ok_or(FirstLayersError::NoEnd(name));
        let (embedding, head) = (end(&shared.embedding, "token embedding")?, end(&shared.head, "head")?);
        let (head, own_bytes) = match &shape.shortlist {
            None => (head.linears(), 0),
            Some(ids) => {
                let rows = PackedMatrix::gathered(ids.len(), |row| head.of(ids[row] as usize))?;
                let bytes = rows.bytes();
                (PiecewiseMatrix(vec![Arc::new(rows)]).linears(), bytes)
            }
        };
        let sites = blocks.iter().flatten().cloned().chain([head]).collect();
        let config = shape.config(base);
        Ok(Self { sites: SiteWeights::new(sites, Some(&config)), embedding, config, own_bytes })
    }
}

impl HostLayers for FirstLayers {
    type Error = Infallible;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn sites(&self) -> &[Site] {
        self.sites.sites()
    }

    fn set_precision(&mut self, precision: Precision) {
        self.sites.set_precision(precision);
    }

    fn bytes(&self) -> usize {
        self.own_bytes
    }

    fn evaluate(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
        _: WaitCallback<'_>,
    ) -> Result<(), Infallible> {
        self.sites.evaluate(compute, call, x, out);
        Ok(())
    }

    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) -> Result<(), Infallible> {
        for (token, row) in tokens.zip(out.chunks_exact_mut(self.config.hidden_size)) {
            let (piece, at) = self.embedding.of(token as usize);
            piece.read_row(at, row);
        }
        Ok(())
    }
}

pub(crate) fn block_sites(config: &ModelConfig, block: usize) -> impl Iterator<Item = SiteId> {
    block_groups(config, block).map(move |group| SiteId::of(config, block, group))
}

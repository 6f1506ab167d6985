//! The first layers of a base that is served, as a model of their own: what a draft adapter computes with.
//!
//! Their matrices are the base's, in the same memory, and nothing here reads a disk: of a base that comes from one, what is pinned
//! can be shared. The head may be cut to some tokens; its rows are copied then.

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
        host::{HostLayers, WaitCallback},
        sites::{Linear, SiteWeights},
    },
};

/// Why the first layers of a base cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum FirstLayersError {
    /// They are on a disk.
    #[error(
        "the draft computes {wanted} layers, and the base has {in_memory} in memory: raise --resident-weight-bytes, or take a draft of \
         fewer layers"
    )]
    NotInMemory {
        /// What the draft computes.
        wanted: usize,
        /// Of the base's first layers so many are in memory.
        in_memory: usize,
    },
    /// So is what every pass begins or ends with.
    #[error(
        "the draft needs the base's {0} in memory, and it comes from the disk: raise --resident-weight-bytes or leave it out"
    )]
    NoEnd(&'static str),
    /// There is no memory for the shortlist's rows of the head.
    #[error("no memory for the head of the draft")]
    Memory(#[from] PackError),
}

/// A matrix that lies in pieces of equally many rows, the last of fewer.
#[derive(Debug, Clone)]
pub(crate) struct PiecewiseMatrix(Vec<Arc<PackedMatrix>>);

impl PiecewiseMatrix {
    /// Puts them together, if there are any.
    pub(crate) fn new(pieces: Vec<Arc<PackedMatrix>>) -> Option<Self> {
        (!pieces.is_empty()).then_some(Self(pieces))
    }

    /// The piece in which a row lies, and where there.
    pub(crate) fn of(&self, row: usize) -> (&PackedMatrix, usize) {
        let rows = self.0[0].rows();
        (&self.0[row / rows], row % rows)
    }

    /// As layers side by side.
    fn linears(&self) -> Vec<Linear> {
        let name = || module_name(0, Target::LmHead);
        let linear =
            |matrix: &Arc<PackedMatrix>| Linear { name: name(), matrix: Arc::clone(matrix), bias: None };
        self.0.iter().map(linear).collect()
    }
}

/// What of a base is in memory, to be shared.
#[derive(Debug, Clone)]
pub(crate) struct SharedLayers {
    /// The first blocks, as many as are there: their sites.
    pub(crate) blocks: Vec<Vec<Vec<Linear>>>,
    pub(crate) embedding: Option<PiecewiseMatrix>,
    pub(crate) head: Option<PiecewiseMatrix>,
}

/// See the module.
#[derive(Debug)]
pub struct FirstLayers {
    sites: SiteWeights,
    embedding: PiecewiseMatrix,
    config: ModelConfig,
    /// Bytes that are not the base's.
    own_bytes: usize,
}

impl FirstLayers {
    /// Those that `shape` names, of a base of shape `base`.
    pub(crate) fn new(
        base: &ModelConfig,
        shared: &SharedLayers,
        shape: &DraftShape,
    ) -> Result<Self, FirstLayersError> {
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

    /// Those that are not the base's.
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

/// The sites of a block, in the order of a pass.
pub(crate) fn block_sites(config: &ModelConfig, block: usize) -> impl Iterator<Item = SiteId> {
    block_groups(config, block).map(move |group| SiteId::of(config, block, group))
}

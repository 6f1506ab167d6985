//! A base of which only the linear layers are served: its clients run the rest of the pass, so that any architecture
//! will do.
//!
//! Of architectures that the resident engine knows, the sites are its groups; of others, in a safetensors directory,
//! every linear layer is a site of its own.

mod linear_files;

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use kernels::{Activations, Isa, PackError, ThreadPool};
use model_files::{model_files::ModelFiles, text_hash::TextHash};

pub use crate::weights::packing::LoadProgress;
pub use linear_files::{MAX_NAME_BYTES, MAX_SITES};

use crate::{
    cpu::Compute,
    linear_sites::{EvaluateError, EvaluateSites, Site, SiteCall},
    precision::Precision,
    shape::{
        identity::{HashedWeights, Identified as _},
        source::WeightSource,
    },
    sources::{
        open::{OpenError, weights},
        safetensors::SafetensorsSourceError,
    },
    weight_stream_stats::WeightStreamStats,
    weights::{
        ResidentLayers,
        host::{BorrowedSites, HostLayers},
        packing::ProgressCallback,
        sites::SiteWeights,
        streamed::{StreamError, StreamOptions, StreamedLayers},
        tensors::WeightsError,
    },
};
pub(crate) use linear_files::LinearFiles;

/// Why a model's linear layers cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SiteModelError {
    /// There is no model, or one that is broken.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The configuration is refused.
    #[error("{}: {reason}; use a model whose config.json names its model_type", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A linear layer is refused.
    #[error("{}: tensor `{tensor}` {reason}; convert the model again", path.display())]
    Tensor {
        /// The directory.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// There are none, or too many.
    #[error("{} has {found} linear layers, and 1 to {MAX_SITES} are served; is it a language model?", path.display())]
    Count {
        /// The directory.
        path: PathBuf,
        /// How many there are.
        found: usize,
    },
    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A tensor cannot be packed.
    #[error("cannot pack `{tensor}`; free memory or use a smaller model")]
    Pack {
        /// The tensor.
        tensor: String,
        /// Cause.
        source: PackError,
    },
    /// The weights cannot be streamed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The files were written to while they were read.
    #[error(
        "{} was written to while it was loaded, so its weights cannot be trusted; start again once it is whole",
        path.display()
    )]
    Changed {
        /// The file or directory.
        path: PathBuf,
    },
    /// The threads cannot be started.
    #[error("cannot start threads for cores {cores:?}; raise the limit of threads or name fewer cores")]
    Threads {
        /// The cores asked for.
        cores: Vec<usize>,
        /// Cause.
        source: io::Error,
    },
}

impl From<SafetensorsSourceError> for SiteModelError {
    fn from(error: SafetensorsSourceError) -> Self {
        Self::Open(error.into())
    }
}

/// What there is to say of a base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseFacts {
    /// Name of its file or directory.
    pub name: String,
    /// Its architecture, as its files say.
    pub architecture: String,
    /// What tells it from others: the resident engine's, where that knows the architecture.
    pub identity: [u8; 32],
    /// Longest sequence in tokens, where the architecture is known.
    pub context_length: Option<usize>,
}

/// The linear layers of a base, with the threads that compute them.
#[derive(Debug)]
pub struct SiteModel {
    weights: BaseWeights,
    compute: Compute,
    facts: BaseFacts,
}

/// Weights of a base.
#[derive(Debug)]
enum BaseWeights {
    /// Of any architecture, in memory.
    Sites(SiteWeights),
    /// Of a known one, from a disk.
    Streamed(Box<StreamedLayers>),
}

impl SiteModel {
    /// Reads and packs the linear layers of the model at `path` and starts a thread on each of `cores`; the thread that
    /// first evaluates is pinned to the first. Without cores there is one thread, not pinned.
    ///
    /// # Errors
    /// If there is no model, one that is broken or was written to meanwhile, or no memory or threads for it.
    pub fn open(path: &Path, cores: &[usize]) -> Result<Self, SiteModelError> {
        Self::open_telling(path, cores, &|_| {})
    }

    /// As [`open`](Self::open), and tells `told`, from any of the threads, how far it is.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_telling(
        path: &Path,
        cores: &[usize],
        told: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, SiteModelError> {
        Self::open_with(path, None, cores, told)
    }

    /// As [`open_telling`](Self::open_telling), with weights that come from a disk as the options say, of an architecture that
    /// is known.
    ///
    /// # Errors
    /// As [`open`](Self::open), or if they cannot be streamed.
    pub fn open_streamed(
        path: &Path,
        options: &StreamOptions,
        cores: &[usize],
        told: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, SiteModelError> {
        Self::open_with(path, Some(options), cores, told)
    }

    fn open_with(
        path: &Path,
        streamed: Option<&StreamOptions>,
        cores: &[usize],
        told: ProgressCallback<'_>,
    ) -> Result<Self, SiteModelError> {
        let files = ModelFiles::at(path).map_err(OpenError::from)?;
        let text = TextHash::of(&files).map_err(OpenError::from)?;
        let (weights, facts) = match weights(&files) {
            Ok(source) => {
                grouped(&HashedWeights::new(source), text, streamed, files.path(), cores.len(), told)?
            }
            Err(error) if streamed.is_some() => return Err(error.into()),
            Err(error) => match (error.is_of_configuration(), &files) {
                (true, ModelFiles::Directory(directory)) => each_its_own(directory, text, cores.len(), told)?,
                _ => return Err(error.into()),
            },
        };
        if TextHash::of(&files).map_err(OpenError::from)? != text {
            return Err(changed(files.path()));
        }
        let pool = ThreadPool::new(cores)
            .map_err(|source| SiteModelError::Threads { cores: cores.to_vec(), source })?;
        Ok(Self { weights, compute: Compute { pool, isa: Isa::best() }, facts })
    }

    /// Computes with `precision` instead of the default.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        match &mut self.weights {
            BaseWeights::Sites(weights) => weights.set_precision(precision),
            BaseWeights::Streamed(layers) => layers.set_precision(precision),
        }
        self
    }

    /// Gives every site a ring path whose weights are in memory and have one, and commits to these: once all weights are read and
    /// hashed. For those who serve clients that mask their rows.
    pub fn commit(&mut self) {
        match &mut self.weights {
            BaseWeights::Sites(weights) => weights.commit(&mut self.compute),
            BaseWeights::Streamed(layers) => layers.commit(&mut self.compute),
        }
    }

    /// What there is to say of it.
    #[must_use]
    pub fn facts(&self) -> &BaseFacts {
        &self.facts
    }

    /// Bytes of the packed weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.weights {
            BaseWeights::Sites(weights) => weights.bytes(),
            BaseWeights::Streamed(layers) => layers.bytes(),
        }
    }

    /// Of weights that come from a disk, what that costs.
    #[must_use]
    pub fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        match &self.weights {
            BaseWeights::Sites(_) => None,
            BaseWeights::Streamed(layers) => layers.sweep_figures(),
        }
    }

    /// True if every layer takes its activations unrounded.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.sites().iter().all(|site| site.fast_is_linear)
    }
}

impl EvaluateSites for SiteModel {
    fn sites(&self) -> &[Site] {
        match &self.weights {
            BaseWeights::Sites(weights) => weights.sites(),
            BaseWeights::Streamed(layers) => layers.sites(),
        }
    }

    fn floors(&self) -> Option<Vec<u32>> {
        match &self.weights {
            BaseWeights::Sites(_) => None,
            BaseWeights::Streamed(layers) => layers.floors(),
        }
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        self.sites()[call.site.0 as usize].check_ring(call)?;
        let compute = &mut self.compute;
        match &mut self.weights {
            BaseWeights::Sites(weights) => weights.evaluate(compute, call, x, out),
            BaseWeights::Streamed(layers) => {
                return BorrowedSites { layers: &mut **layers, compute }.evaluate(call, x, out);
            }
        }
        Ok(())
    }
}

/// The groups of a known architecture.
fn grouped(
    source: &HashedWeights<impl WeightSource + Sync>,
    text: TextHash,
    streamed: Option<&StreamOptions>,
    path: &Path,
    threads: usize,
    told: ProgressCallback<'_>,
) -> Result<(BaseWeights, BaseFacts), SiteModelError> {
    let weights = match streamed {
        None => BaseWeights::Sites(ResidentLayers::load(source, threads, told)?.into_sites()),
        Some(options) => {
            let layers = StreamedLayers::open(source, &source.identity(text), options, threads, told)?;
            BaseWeights::Streamed(Box::new(layers))
        }
    };
    let config = source.config();
    let facts = BaseFacts {
        name: name(path),
        architecture: config.architecture.clone(),
        identity: source.identity(text),
        context_length: Some(config.context_length),
    };
    if source.unchanged() { Ok((weights, facts)) } else { Err(changed(path)) }
}

/// Every linear layer of a directory.
fn each_its_own(
    directory: &Path,
    text: TextHash,
    threads: usize,
    told: ProgressCallback<'_>,
) -> Result<(BaseWeights, BaseFacts), SiteModelError> {
    let files = LinearFiles::open(directory)?;
    let weights = BaseWeights::Sites(files.pack(threads, told)?);
    let facts = BaseFacts {
        name: name(directory),
        architecture: files.architecture().to_owned(),
        identity: files.identity(text),
        context_length: None,
    };
    if files.shards().unchanged() { Ok((weights, facts)) } else { Err(changed(directory)) }
}

fn changed(path: &Path) -> SiteModelError {
    SiteModelError::Changed { path: path.to_path_buf() }
}

fn name(path: &Path) -> String {
    // A directory may be given as `.`.
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let named = if path.file_name().is_some() { path } else { &whole };
    named.file_name().map_or_else(|| "base".to_owned(), |name| name.display().to_string())
}

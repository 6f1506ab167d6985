//! A base that serves only its linear layers. Clients run the rest of the pass, so any architecture works.
//!
//! For architectures that the resident engine knows, sites are linear groups. For others, in a safetensors
//! directory, every linear layer is a site.

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
    precision::{BaseNumerics, Precision},
    shape::{
        identity::{HasIdentity as _, HashedWeights},
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

/// Reasons why a model's linear layers cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SiteModelError {
    /// The model is missing or broken.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The configuration is refused.
    #[error("{}: {reason}; use a model whose config.json names its model_type", path.display())]
    Config {
        /// Path of the configuration file.
        path: PathBuf,
        /// Reason for the refusal.
        reason: String,
    },
    /// A linear layer is refused.
    #[error("{}: tensor `{tensor}` {reason}; convert the model again", path.display())]
    Tensor {
        /// Path of the model directory.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Defect of the tensor.
        reason: String,
    },
    /// The number of linear layers is zero or above the limit.
    #[error("{} has {found} linear layers, and 1 to {MAX_SITES} are supported; use a language \
             model", path.display())]
    Count {
        /// Path of the model directory.
        path: PathBuf,
        /// Number of linear layers found.
        found: usize,
    },
    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A tensor cannot be packed.
    #[error("cannot pack `{tensor}`; free memory or use a smaller model")]
    Pack {
        /// Name of the tensor.
        tensor: String,
        /// Error of the packing function.
        source: PackError,
    },
    /// The weights cannot be streamed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The files changed while they were read.
    #[error(
        "{} was written while it was loaded, so its weights may be wrong; start again when the file is \
         complete",
        path.display()
    )]
    Changed {
        /// Path of the file or directory.
        path: PathBuf,
    },
    /// The threads cannot be started.
    #[error("cannot start threads for cores {cores:?}; raise the limit of threads or name fewer cores")]
    Threads {
        /// The requested cores, by number.
        cores: Vec<usize>,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl From<SafetensorsSourceError> for SiteModelError {
    fn from(error: SafetensorsSourceError) -> Self {
        Self::Open(error.into())
    }
}

/// Description of a base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseInfo {
    /// Name of its file or directory.
    pub name: String,
    /// Architecture name from the model's files.
    pub architecture: String,
    /// Hash that identifies the base; equal to the resident engine's for known architectures.
    pub identity: [u8; 32],
    /// Maximum sequence length in tokens, if the architecture is known.
    pub context_length: Option<usize>,
}

/// Linear layers of a base, with the threads that compute them.
#[derive(Debug)]
pub struct SiteModel {
    weights: BaseWeights,
    compute: Compute,
    info: BaseInfo,
}

#[derive(Debug)]
enum BaseWeights {
    /// In-memory weights of any architecture.
    Sites(SiteWeights),
    /// Streamed weights of a known architecture.
    Streamed(Box<StreamedLayers>),
}

impl SiteModel {
    /// Reads and packs the linear layers of the model at `path` and starts a thread on each of `cores` (or
    /// one, not pinned). The thread of the first evaluation is pinned to the first core.
    ///
    /// # Errors
    /// The model is missing, broken or changed during the read, or memory or threads are missing.
    pub fn open(path: &Path, cores: &[usize]) -> Result<Self, SiteModelError> {
        Self::open_with_progress(path, cores, &|_| {})
    }

    /// Opens a model as [`open`](Self::open) does and reports progress to `on_progress`, from any of the
    /// threads.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_with_progress(
        path: &Path,
        cores: &[usize],
        on_progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, SiteModelError> {
        Self::open_with(path, None, cores, on_progress)
    }

    /// Opens a model of a known architecture as [`open_with_progress`](Self::open_with_progress) does, with
    /// weights streamed from a disk as `options` say.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open), or the weights cannot be streamed.
    pub fn open_streamed(
        path: &Path,
        options: &StreamOptions,
        cores: &[usize],
        on_progress: &(dyn Fn(LoadProgress) + Sync),
    ) -> Result<Self, SiteModelError> {
        Self::open_with(path, Some(options), cores, on_progress)
    }

    fn open_with(
        path: &Path,
        streamed: Option<&StreamOptions>,
        cores: &[usize],
        on_progress: ProgressCallback<'_>,
    ) -> Result<Self, SiteModelError> {
        let files = ModelFiles::at(path).map_err(OpenError::from)?;
        let text = TextHash::of(&files).map_err(OpenError::from)?;
        let (weights, info) = match weights(&files) {
            Ok(source) => {
                grouped(&HashedWeights::new(source), text, streamed, files.path(), cores.len(), on_progress)?
            }
            Err(error) if streamed.is_some() => return Err(error.into()),
            Err(error) => match (error.is_of_configuration(), &files) {
                (true, ModelFiles::Directory(directory)) => {
                    each_its_own(directory, text, cores.len(), on_progress)?
                }
                _ => return Err(error.into()),
            },
        };
        if TextHash::of(&files).map_err(OpenError::from)? != text {
            return Err(changed(files.path()));
        }
        let pool = ThreadPool::new(cores)
            .map_err(|source| SiteModelError::Threads { cores: cores.to_vec(), source })?;
        Ok(Self { weights, compute: Compute { pool, isa: Isa::best() }, info })
    }

    /// Replaces the default precision by `precision`.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        match &mut self.weights {
            BaseWeights::Sites(weights) => weights.set_precision(precision),
            BaseWeights::Streamed(layers) => layers.set_precision(precision),
        }
        self
    }

    /// Reads and hashes all weights, and gives every eligible site in memory a modular path with a commitment
    /// to its weights. Executors whose clients mask their rows need this.
    pub fn commit(&mut self) {
        match &mut self.weights {
            BaseWeights::Sites(weights) => weights.commit(&mut self.compute),
            BaseWeights::Streamed(layers) => layers.commit(&mut self.compute),
        }
    }

    /// Returns the description of the base.
    #[must_use]
    pub fn info(&self) -> &BaseInfo {
        &self.info
    }

    /// Returns the bytes of the packed weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.weights {
            BaseWeights::Sites(weights) => weights.bytes(),
            BaseWeights::Streamed(layers) => layers.bytes(),
        }
    }

    /// Returns the stats of streamed weights, or `None` if all weights are in memory.
    #[must_use]
    pub fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        match &self.weights {
            BaseWeights::Sites(_) => None,
            BaseWeights::Streamed(layers) => layers.sweep_figures(),
        }
    }

    /// Returns the precision that suits these weights on this processor, for weights in the default one.
    #[must_use]
    pub fn suitable_precision(&self) -> Precision {
        Precision::suitable(self.compute.isa, self.sites())
    }

    /// Returns the rounding of the layers, which decides the data types of adapters and KV cache.
    #[must_use]
    pub fn numerics(&self) -> BaseNumerics {
        BaseNumerics::of(self.sites())
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

/// Opens the linear groups of a known architecture.
fn grouped(
    source: &HashedWeights<impl WeightSource + Sync>,
    text: TextHash,
    streamed: Option<&StreamOptions>,
    path: &Path,
    threads: usize,
    on_progress: ProgressCallback<'_>,
) -> Result<(BaseWeights, BaseInfo), SiteModelError> {
    let weights = match streamed {
        None => BaseWeights::Sites(ResidentLayers::load(source, threads, on_progress)?.into_sites()),
        Some(options) => {
            let layers = StreamedLayers::open(source, &source.identity(text), options, threads, on_progress)?;
            BaseWeights::Streamed(Box::new(layers))
        }
    };
    let config = source.config();
    let info = BaseInfo {
        name: name(path),
        architecture: config.architecture.clone(),
        identity: source.identity(text),
        context_length: Some(config.context_length),
    };
    if source.unchanged() { Ok((weights, info)) } else { Err(changed(path)) }
}

/// Opens every linear layer of a directory as a site.
fn each_its_own(
    directory: &Path,
    text: TextHash,
    threads: usize,
    on_progress: ProgressCallback<'_>,
) -> Result<(BaseWeights, BaseInfo), SiteModelError> {
    let files = LinearFiles::open(directory)?;
    let weights = BaseWeights::Sites(files.pack(threads, on_progress)?);
    let info = BaseInfo {
        name: name(directory),
        architecture: files.architecture().to_owned(),
        identity: files.identity(text),
        context_length: None,
    };
    if files.shards().unchanged() { Ok((weights, info)) } else { Err(changed(directory)) }
}

fn changed(path: &Path) -> SiteModelError {
    SiteModelError::Changed { path: path.to_path_buf() }
}

fn name(path: &Path) -> String {
    // A path such as `.` has no file name until it is canonical.
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let named = if path.file_name().is_some() { path } else { &whole };
    named.file_name().map_or_else(|| "base".to_owned(), |name| name.display().to_string())
}

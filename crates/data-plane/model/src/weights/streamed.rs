//! Base layers with streamed weights: a part stays in memory, and each pass reads the rest from disk.
//!
//! ```text
//! file of packed weights --reader, one chunk ahead-> double buffer --> pass
//!                        --once, at the start------> pinned chunks -->
//! ```
//!
//! The weights are packed into a file once, in their memory layout, so that they are used in place after a
//! read. The memory bound minus the double buffer is used for pinned layer chunks: the head first, then the
//! first blocks. Token embeddings that are not pinned are read row by row.
//!
//! # Layout
//!
//! - this file: the linear groups over pinned and streamed weights. [`WeightStreamStats`] counts the cost.
//! - `layout`: places of matrices in the file, and the layer chunks.
//! - `file`: makes, reads and checks the file.
//! - `double_buffer`: reads the next layer chunks ahead of the pass.
//! - `plan`: selects the pinned layer chunks under a memory bound.
//!
//! # Principles
//!
//! - All memory is allocated at the start, so the bound holds under every load.
//! - All data is checked after each read, before any computation: never a wrong token.
//! - Results have the same bits as with all weights in memory.

mod double_buffer;
mod file;
mod layout;
mod plan;

use std::{io, num::NonZeroU64, ops::Range, path::PathBuf, sync::Arc, time::Instant};

use kernels::{Activations, LinearPart, PackedMatrix, PageSlab, SumFrom};

use self::{
    double_buffer::{DoubleBuffer, PassDirection},
    file::PackedFile,
    plan::PinPlan,
};
use crate::{
    cpu::Compute,
    linear_sites::{Arithmetic, Site, SiteCall, SiteId, SiteOp, SitePart},
    precision::Precision,
    shape::{
        config::ModelConfig,
        experts::{ExpertId, ExpertPart},
        layout::{LinearGroup, group_weights, model_groups},
        source::WeightSource,
    },
    sources::hf_names::linear_name,
    weight_stream_stats::WeightStreamStats,
    weights::{
        first::{PiecewiseMatrix, SharedLayers, block_sites},
        host::{HostLayers, WaitCallback},
        packing::ProgressCallback,
        sites::{Linear, evaluate},
        tensors::{WeightsError, read_bias},
    },
};

pub use self::{
    double_buffer::Readahead,
    file::{MakeError, WeightReadError},
};

/// Domain of the keys of packed files.
const KEY_CONTEXT: &str = "holobiont 2026 packed weights v1";

/// Options for streaming a base.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// Path of the packed weights' file, existing or not, in a directory that no other user may enter.
    pub path: PathBuf,
    /// Hash of the program that packs and uses the file.
    pub program: [u8; 32],
    /// Maximum bytes of memory for weights.
    pub bound_bytes: u64,
    /// Amount of reading ahead.
    pub readahead: Readahead,
    /// Simulated disk speed in bytes per second, for measurements.
    pub bytes_per_s: Option<NonZeroU64>,
}

/// Reasons why a base cannot be streamed.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The bound is too small for the double buffer.
    #[error(
        "the weight memory of {bound_bytes} bytes is too small to stream this model; raise it to \
         {least_bytes}, the size of two blocks"
    )]
    Bound {
        /// Configured bound in bytes.
        bound_bytes: u64,
        /// Minimum bound in bytes.
        least_bytes: u64,
    },
    /// The file of packed weights cannot be made.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// The model's files do not match their configuration.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The pinned weights cannot be read.
    #[error(transparent)]
    Read(#[from] WeightReadError),
    /// Memory or a thread is missing.
    #[error("cannot get memory and a thread for weights: {0}; lower the bound or free memory")]
    System(#[from] io::Error),
}

/// Base layers with streamed weights.
#[derive(Debug)]
pub struct StreamedLayers {
    sites: Vec<Site>,
    groups: Vec<LinearGroup>,
    /// Biases of the linear layers of each site.
    biases: Vec<Vec<Option<Vec<f32>>>>,
    config: ModelConfig,
    file: Arc<PackedFile>,
    /// Matrices of each pinned layer chunk.
    pinned: Vec<Option<Vec<PackedMatrix>>>,
    window: Option<DoubleBuffer>,
    stats: Arc<WeightStreamStats>,
    bytes: usize,
}

impl StreamedLayers {
    /// Opens the file of packed weights of `source`, with the identity `base`, or makes it with `threads`
    /// threads that report progress to `on_progress`; pins as many chunks as fit.
    ///
    /// # Errors
    /// The bound is too small, the file cannot be made or read, or memory runs out.
    pub fn open(
        source: &(dyn WeightSource + Sync),
        base: &[u8; 32],
        options: &StreamOptions,
        threads: usize,
        on_progress: ProgressCallback<'_>,
    ) -> Result<Self, StreamError> {
        let plan = PinPlan::of(source, options.bound_bytes)?;
        let key = blake3::derive_key(KEY_CONTEXT, &[*base, options.program].concat());
        let file = PackedFile::open_or_make(&options.path, &key, source, threads, on_progress)?;
        let file = Arc::new(file);
        let mut pinned: Vec<_> = file.layout().chunks.iter().map(|_| None).collect();
        for (chunk, matrices) in pin(&file, &plan)? {
            pinned[chunk] = Some(matrices);
        }
        let streamed: Vec<usize> = (0..pinned.len()).filter(|&chunk| pinned[chunk].is_none()).collect();
        let stats = Arc::new(WeightStreamStats::default());
        let window = match streamed.is_empty() {
            true => None,
            false => {
                Some(DoubleBuffer::new(&file, &stats, streamed, options.readahead, options.bytes_per_s)?)
            }
        };
        let config = source.config().clone();
        let (mut sites, biases) = sites(source, &file)?;
        let groups: Vec<LinearGroup> = model_groups(&config).map(|(_, group)| group).collect();
        Precision::default().apply(&mut sites, &groups);
        Ok(Self { sites, groups, biases, config, file, pinned, window, stats, bytes: plan.bytes })
    }

    /// Returns shared handles of the pinned weights: the leading blocks up to the first missing one, and the
    /// head. A tied head is also the token embedding; no other embedding is in memory.
    pub(crate) fn shared(&self) -> SharedLayers {
        let (layers, config) = (self.file.layout().blocks, &self.config);
        let pinned = |chunk: &Option<Vec<PackedMatrix>>| {
            Some(chunk.as_ref()?.iter().cloned().map(Arc::new).collect::<Vec<_>>())
        };
        let blocks = self.pinned[..layers].iter().map_while(pinned).enumerate();
        let blocks = blocks.map(|(block, matrices)| {
            let sites =
                block_sites(config, block).map(|site| {
                    let (parts, (_, own)) = (&self.sites[site.0 as usize].parts, self.place(site));
                    let biases = &self.biases[site.0 as usize];
                    let linear =
                        |((part, matrix), bias): ((&SitePart, &Arc<PackedMatrix>), &Option<Vec<f32>>)| {
                            Linear { name: part.name.clone(), matrix: Arc::clone(matrix), bias: bias.clone() }
                        };
                    parts.iter().zip(&matrices[own]).zip(biases).map(linear).collect()
                });
            sites.collect()
        });
        let head: Option<Vec<_>> = self.pinned[layers..].iter().map(pinned).collect();
        let head = head.and_then(|pieces| PiecewiseMatrix::new(pieces.into_iter().flatten().collect()));
        let embedding = head.clone().filter(|_| self.config.tied_head);
        SharedLayers { blocks: blocks.collect(), embedding, head, group: None }
    }

    /// Returns the layer chunks of a site, and the range of its matrices within a chunk.
    fn place(&self, site: SiteId) -> (Range<usize>, Range<usize>) {
        let blocks = self.file.layout().blocks;
        let (layer, group) = site.group(&self.config).expect("the site exists");
        if group == LinearGroup::Head {
            return (blocks..self.pinned.len(), 0..1);
        }
        let of_expert = |id: ExpertId| 4 + ExpertPart::ALL.len() * usize::from(id.0);
        let first = match group {
            LinearGroup::Qkv | LinearGroup::Head => 0,
            LinearGroup::O => 3,
            LinearGroup::GateUp => 4,
            LinearGroup::Down => 6,
            LinearGroup::ExpertGateUp(id) => of_expert(id),
            LinearGroup::ExpertDown(id) => of_expert(id) + 2,
        };
        (layer..layer + 1, first..first + self.sites[site.0 as usize].parts.len())
    }
}

/// Returns the matrices of the chunk `chunk` and requests the next chunks; calls `meanwhile` during waits.
fn reach<'a>(
    pinned: &'a [Option<Vec<PackedMatrix>>],
    window: &'a mut Option<DoubleBuffer>,
    (chunk, heading): (usize, PassDirection),
    meanwhile: WaitCallback<'_>,
) -> Result<&'a [PackedMatrix], WeightReadError> {
    match (&pinned[chunk], window) {
        (Some(matrices), window) => {
            window.iter_mut().for_each(|window| window.approach(chunk, heading));
            Ok(matrices)
        }
        (None, Some(window)) => window.reach(chunk, heading, meanwhile),
        (None, None) => Err(WeightReadError::ReaderEnded),
    }
}

impl HostLayers for StreamedLayers {
    type Error = WeightReadError;

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn sites(&self) -> &[Site] {
        &self.sites
    }

    fn set_precision(&mut self, precision: Precision) {
        precision.apply(&mut self.sites, &self.groups);
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn evaluate(
        &mut self,
        compute: &mut Compute,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
        meanwhile: WaitCallback<'_>,
    ) -> Result<(), WeightReadError> {
        let (chunks, own) = self.place(call.site);
        let (site, biases) = (&self.sites[call.site.0 as usize], &self.biases[call.site.0 as usize]);
        let heading = if call.op == SiteOp::Backward { PassDirection::Down } else { PassDirection::Up };
        let (mut from, mut first_row) = (SumFrom::Zero, 0);
        for chunk in chunks {
            let way = (chunk, heading);
            let matrices = &reach(&self.pinned, &mut self.window, way, meanwhile)?[own.clone()];
            let begun = Instant::now();
            let mut column = first_row;
            let mut parts = Vec::with_capacity(matrices.len());
            for (number, matrix) in matrices.iter().enumerate() {
                if call.part.is_some_and(|part| usize::from(part) != number) {
                    continue;
                }
                let bias = biases[number].as_deref().filter(|_| call.op == SiteOp::Forward);
                let bias = bias.map(|bias| &bias[first_row..first_row + matrix.rows()]);
                parts.push(LinearPart { matrix, bias, column });
                column += matrix.rows();
            }
            evaluate(compute, site, call, x, &parts, from, out);
            // Only the head spans several chunks, and it is a single matrix.
            (from, first_row) = (SumFrom::Out, column);
            self.stats.add_computed(chunk, begun);
        }
        Ok(())
    }

    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]) -> Result<(), WeightReadError> {
        let layout = self.file.layout();
        let head = self.config.tied_head.then(|| &self.pinned[layout.blocks..]);
        let mut slab = None;
        for (token, row) in tokens.zip(out.chunks_exact_mut(self.config.hidden_size)) {
            let token = token as usize;
            let piece = head.and_then(|head| head.get(token / layout.head_rows)?.as_ref());
            match piece.and_then(|piece| piece.first()) {
                Some(matrix) => matrix.read_row(token % layout.head_rows, row),
                None => self.read_embedding(token, row, &mut slab)?,
            }
        }
        Ok(())
    }

    fn floors(&self) -> Option<Vec<u32>> {
        let chunk = |site| self.place(SiteId(site)).0.start as u32;
        self.window.as_ref().map(|_| (0..self.sites.len() as u32).map(chunk).collect())
    }

    fn sweep_bytes(&self) -> u64 {
        let chunks = self.file.layout().chunks.iter().zip(&self.pinned);
        chunks.filter(|(_, pinned)| pinned.is_none()).map(|(chunk, _)| chunk.bytes() as u64).sum()
    }

    fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        Some(Arc::clone(&self.stats))
    }
}

impl StreamedLayers {
    /// Reads a row of the token embedding from disk; `slab` is reused for each row.
    fn read_embedding(
        &self,
        token: usize,
        row: &mut [f32],
        slab: &mut Option<PageSlab>,
    ) -> Result<(), WeightReadError> {
        let layout = self.file.layout();
        let (part, pages) = layout.embedding_grain(token);
        let mut buffer = match slab.take() {
            Some(slab) => slab,
            None => PageSlab::new(layout.grain_bytes()).map_err(|source| self.file.unreadable(source))?,
        };
        let begun = Instant::now();
        let into = buffer.as_mut_slice().ok_or(WeightReadError::ReaderEnded)?;
        let (first, parts) = (part.rows.start, [part]);
        self.stats.waiting(|| self.file.load(&pages, &parts, into))?;
        self.stats.add_read(layout::bytes_of(&pages) as u64, begun);
        let matrices = self.file.matrices(&pages, &parts, &buffer, 0);
        matrices[0].read_row(token - first, row);
        drop(matrices);
        *slab = Some(buffer);
        Ok(())
    }
}

/// Reads each pinned chunk once, into memory of its own.
fn pin(file: &PackedFile, plan: &PinPlan) -> Result<Vec<(usize, Vec<PackedMatrix>)>, StreamError> {
    let bytes = plan.pinned.iter().map(|&chunk| file.chunk(chunk).bytes()).sum();
    let mut slab = PageSlab::new(bytes)?;
    let mut at = 0;
    for &chunk in &plan.pinned {
        let chunk = file.chunk(chunk);
        let into = slab.as_mut_slice().ok_or(WeightReadError::ReaderEnded)?;
        file.load(&chunk.pages, &chunk.parts, &mut into[at..])?;
        at += chunk.bytes();
    }
    let mut at = 0;
    let matrices = plan.pinned.iter().map(|&number| {
        let chunk = file.chunk(number);
        let matrices = file.matrices(&chunk.pages, &chunk.parts, &slab, at);
        at += chunk.bytes();
        (number, matrices)
    });
    Ok(matrices.collect())
}

type Biases = Vec<Vec<Option<Vec<f32>>>>;

fn sites(source: &dyn WeightSource, file: &PackedFile) -> Result<(Vec<Site>, Biases), WeightsError> {
    let config = source.config();
    let (mut sites, mut biases, mut matrix) = (Vec::new(), Vec::new(), 0);
    for (layer, group) in model_groups(config) {
        if group == LinearGroup::Head {
            matrix = file.layout().matrices.len() - 1;
        }
        let (mut parts, mut of_site) = (Vec::new(), Vec::new());
        let (mut columns, mut is_exact) = (0, true);
        for id in group_weights(layer, group) {
            let form = file.form(matrix);
            let bias = match group == LinearGroup::Head && config.tied_head {
                true => None,
                false => read_bias(source, id, form.rows())?,
            };
            let (name, has_bias) = (linear_name(config, id), bias.is_some());
            parts.push(SitePart { name, rows: form.rows(), has_bias });
            of_site.push(bias);
            (columns, is_exact, matrix) = (form.columns(), is_exact && form.is_exact(), matrix + 1);
        }
        sites.push(Site {
            columns,
            parts,
            fast_is_linear: is_exact,
            arithmetic: Arithmetic::Unrounded,
            ring: None,
        });
        biases.push(of_site);
    }
    Ok((sites, biases))
}

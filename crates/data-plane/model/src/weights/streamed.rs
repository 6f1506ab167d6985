//! Base layers of a known architecture of which only a part is in memory: the rest comes from a disk whenever a pass needs it.
//!
//! ```text
//! file of packed weights --reader, a floor ahead--> window of two floors --> pass
//!                        --once, at the start----> pinned floors        -->
//! ```
//!
//! The weights are packed into a file once, as they lie in memory, so that what is read is computed with in place. As many
//! floors as the bound leaves beside the window are pinned: the head first, then the first blocks. Token embeddings that are
//! not pinned are read row by row.
//!
//! # Layout
//!
//! - this file: the linear groups over all of it. [`WeightStreamStats`]: what it costs.
//! - `layout`: what lies where, and what is loaded together. `file`: it is made, read and checked.
//! - `double_buffer`: who brings what is next. `plan`: what is pinned under a bound.
//!
//! # Principles
//!
//! - All memory is taken at the start, and none after: the bound holds whatever is served.
//! - Whatever is read is checked before anything is computed with it: never a wrong token.
//! - The same bits as with all weights in memory.

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
    linear_sites::{Site, SiteCall, SiteId, SiteOp, SitePart},
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

/// What keys of files are made of.
const KEY_CONTEXT: &str = "holobiont 2026 packed weights v1";

/// How a base is streamed.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// Where the file of packed weights is, or will be: in a directory that nobody else may enter.
    pub path: PathBuf,
    /// What tells one program from another: what packs the file, and computes with what it holds.
    pub program: [u8; 32],
    /// Bytes of memory that weights may take.
    pub bound_bytes: u64,
    /// What is read before it is asked for.
    pub readahead: Readahead,
    /// Reads take at least as long as with a disk of so many bytes a second, for measurements.
    pub pace: Option<NonZeroU64>,
}

/// Why a base cannot be streamed.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The bound leaves no room for a window.
    #[error(
        "weights of {bound_bytes} bytes are too few to stream this model: two of its blocks at a time take {least_bytes}; \
         raise the bound to that"
    )]
    Bound {
        /// What was allowed.
        bound_bytes: u64,
        /// The least that works.
        least_bytes: u64,
    },
    /// There is no file of packed weights.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// The model's files do not hold what their configuration says.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The pinned weights cannot be read.
    #[error(transparent)]
    Read(#[from] WeightReadError),
    /// There is no memory or no thread for it.
    #[error("cannot take memory and a thread for weights: {0}; lower the bound or free memory")]
    System(#[from] io::Error),
}

/// Base layers of which some come from a disk.
#[derive(Debug)]
pub struct StreamedLayers {
    sites: Vec<Site>,
    /// What the sites are.
    groups: Vec<LinearGroup>,
    /// Biases of the linear layers of each site.
    biases: Vec<Vec<Option<Vec<f32>>>>,
    config: ModelConfig,
    file: Arc<PackedFile>,
    /// The matrices of each floor that is pinned.
    pinned: Vec<Option<Vec<PackedMatrix>>>,
    window: Option<DoubleBuffer>,
    figures: Arc<WeightStreamStats>,
    bytes: usize,
}

impl StreamedLayers {
    /// Opens the file of packed weights of `source`, which is of this `base`, or makes it with `threads` threads, and pins what fits; `told` hears, from
    /// any of the threads, how far the packing is.
    ///
    /// # Errors
    /// The bound is too small, the file cannot be made or read, or memory runs out.
    pub fn open(
        source: &(dyn WeightSource + Sync),
        base: &[u8; 32],
        options: &StreamOptions,
        threads: usize,
        told: ProgressCallback<'_>,
    ) -> Result<Self, StreamError> {
        let plan = PinPlan::of(source, options.bound_bytes)?;
        let key = blake3::derive_key(KEY_CONTEXT, &[*base, options.program].concat());
        let file = PackedFile::open_or_make(&options.path, &key, source, threads, told)?;
        let file = Arc::new(file);
        let mut pinned: Vec<_> = file.layout().floors.iter().map(|_| None).collect();
        for (floor, matrices) in pin(&file, &plan)? {
            pinned[floor] = Some(matrices);
        }
        let streamed: Vec<usize> = (0..pinned.len()).filter(|&floor| pinned[floor].is_none()).collect();
        let figures = Arc::new(WeightStreamStats::default());
        let window = match streamed.is_empty() {
            true => None,
            false => Some(DoubleBuffer::new(&file, &figures, streamed, options.readahead, options.pace)?),
        };
        let config = source.config().clone();
        let (mut sites, biases) = sites(source, &file)?;
        let groups: Vec<LinearGroup> = model_groups(&config).map(|(_, group)| group).collect();
        Precision::default().apply(&mut sites, &groups);
        Ok(Self { sites, groups, biases, config, file, pinned, window, figures, bytes: plan.bytes })
    }

    /// What is pinned, to be shared: the first blocks, as far as no other is missing between them, and the head, which is the token
    /// embedding too where a model ties them. No other embedding is in memory.
    pub(crate) fn shared(&self) -> SharedLayers {
        let (layers, config) = (self.file.layout().blocks, &self.config);
        let pinned = |floor: &Option<Vec<PackedMatrix>>| {
            Some(floor.as_ref()?.iter().cloned().map(Arc::new).collect::<Vec<_>>())
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
        SharedLayers { blocks: blocks.collect(), embedding, head }
    }

    /// Floors of a site, and which of a floor's matrices are its own.
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

/// Has the window bring what comes after `floor`, and the matrices of that floor; `meanwhile` is called where it waits.
fn reach<'a>(
    pinned: &'a [Option<Vec<PackedMatrix>>],
    window: &'a mut Option<DoubleBuffer>,
    (floor, heading): (usize, PassDirection),
    meanwhile: WaitCallback<'_>,
) -> Result<&'a [PackedMatrix], WeightReadError> {
    match (&pinned[floor], window) {
        (Some(matrices), window) => {
            window.iter_mut().for_each(|window| window.approach(floor, heading));
            Ok(matrices)
        }
        (None, Some(window)) => window.reach(floor, heading, meanwhile),
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
        let (floors, own) = self.place(call.site);
        let (site, biases) = (&self.sites[call.site.0 as usize], &self.biases[call.site.0 as usize]);
        let heading = if call.op == SiteOp::Backward { PassDirection::Down } else { PassDirection::Up };
        let (mut from, mut first_row) = (SumFrom::Zero, 0);
        for floor in floors {
            let way = (floor, heading);
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
            // Only the head has several floors, and it is one matrix.
            (from, first_row) = (SumFrom::Out, column);
            self.figures.add_computed(floor, begun);
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
        let floor = |site| self.place(SiteId(site)).0.start as u32;
        self.window.as_ref().map(|_| (0..self.sites.len() as u32).map(floor).collect())
    }

    fn sweep_bytes(&self) -> u64 {
        let floors = self.file.layout().floors.iter().zip(&self.pinned);
        floors.filter(|(_, pinned)| pinned.is_none()).map(|(floor, _)| floor.bytes() as u64).sum()
    }

    fn sweep_figures(&self) -> Option<Arc<WeightStreamStats>> {
        Some(Arc::clone(&self.figures))
    }
}

impl StreamedLayers {
    /// A row of the token embedding from the disk; `slab` is kept from row to row.
    fn read_embedding(
        &self,
        token: usize,
        row: &mut [f32],
        slab: &mut Option<PageSlab>,
    ) -> Result<(), WeightReadError> {
        let layout = self.file.layout();
        let (part, pages) = layout.embedding_grain(token);
        let mut room = match slab.take() {
            Some(slab) => slab,
            None => PageSlab::new(layout.grain_bytes()).map_err(|source| self.file.unreadable(source))?,
        };
        let begun = Instant::now();
        let into = room.as_mut_slice().ok_or(WeightReadError::ReaderEnded)?;
        let (first, parts) = (part.rows.start, [part]);
        self.figures.waiting(|| self.file.load(&pages, &parts, into))?;
        self.figures.add_read(layout::bytes_of(&pages) as u64, begun);
        let matrices = self.file.matrices(&pages, &parts, &room, 0);
        matrices[0].read_row(token - first, row);
        drop(matrices);
        *slab = Some(room);
        Ok(())
    }
}

/// Reads the floors that are pinned, each of them once, into memory of their own.
fn pin(file: &PackedFile, plan: &PinPlan) -> Result<Vec<(usize, Vec<PackedMatrix>)>, StreamError> {
    let bytes = plan.pinned.iter().map(|&floor| file.floor(floor).bytes()).sum();
    let mut slab = PageSlab::new(bytes)?;
    let mut at = 0;
    for &floor in &plan.pinned {
        let floor = file.floor(floor);
        let into = slab.as_mut_slice().ok_or(WeightReadError::ReaderEnded)?;
        file.load(&floor.pages, &floor.parts, &mut into[at..])?;
        at += floor.bytes();
    }
    let mut at = 0;
    let matrices = plan.pinned.iter().map(|&number| {
        let floor = file.floor(number);
        let matrices = file.matrices(&floor.pages, &floor.parts, &slab, at);
        at += floor.bytes();
        (number, matrices)
    });
    Ok(matrices.collect())
}

type Biases = Vec<Vec<Option<Vec<f32>>>>;

/// The sites of a model, and their biases.
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
        sites.push(Site { columns, parts, fast_is_linear: is_exact, rounding: None, ring: None });
        biases.push(of_site);
    }
    Ok((sites, biases))
}

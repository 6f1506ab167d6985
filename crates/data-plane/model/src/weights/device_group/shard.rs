//! The weights that one device of a group holds.

use std::ops::Range;

use kernels::{Arena, LinearPart, PackedLayout, PackedMatrix};

use super::plan::GroupPlan;
use crate::{
    linear_sites::{Arithmetic, Site, SiteCall, SiteId, SiteOp, SitePart},
    shape::{
        config::ModelConfig,
        layout::{LinearGroup, group_weights, model_groups, tensor_shape},
        source::{Target, TensorId, WeightSource},
    },
    sources::hf_names::{linear_name, module_name},
    weights::{
        elements,
        packing::{ProgressCallback, pack_all},
        tensors::{WeightsError, read_bias, read_matrix},
    },
};

/// The weights of one device, and the sites of the whole model.
#[derive(Debug)]
pub struct ShardWeights {
    pub(super) config: ModelConfig,
    pub(super) device: usize,
    /// All sites of the model. If the head is not tied, the token embedding follows as one more site.
    pub(super) sites: Vec<Site>,
    /// Linear group of each site, without the embedding's.
    pub(super) groups: Vec<LinearGroup>,
    /// Outputs of each site that each device holds.
    pub(super) ranges: Vec<Vec<Range<usize>>>,
    /// Biases of all linear layers of each site.
    biases: Vec<SiteBiases>,
    /// Rows of each site's linear layers on this device.
    segments: Vec<Vec<Segment>>,
}

/// Bias of each linear layer of a site, if the layer has one.
type SiteBiases = Vec<Option<Vec<f32>>>;

/// Rows of one linear layer.
#[derive(Debug)]
struct Segment {
    /// Index of the layer in its site.
    part: usize,
    /// First row of the segment in its layer.
    first_row: usize,
    /// Outputs of the site before the first row.
    column: usize,
    matrix: PackedMatrix,
}

/// Division of a model's weights, with the segments of one device.
struct GroupLayout {
    sites: Vec<Site>,
    biases: Vec<SiteBiases>,
    ranges: Vec<Vec<Range<usize>>>,
    jobs: Vec<SegmentJob>,
}

/// A segment that is not packed yet.
struct SegmentJob {
    site: usize,
    part: usize,
    id: TensorId,
    rows: Range<usize>,
    column: usize,
}

impl ShardWeights {
    /// Reads and packs the weights of `device` with `threads` threads, which report to `told`.
    ///
    /// # Errors
    ///
    /// A tensor is missing or has another shape than the configuration implies, or memory runs out.
    pub fn load(
        source: &(dyn WeightSource + Sync),
        plan: GroupPlan,
        device: usize,
        threads: usize,
        told: ProgressCallback<'_>,
    ) -> Result<Self, WeightsError> {
        let config = source.config();
        let GroupLayout { sites, biases, ranges, jobs } = GroupLayout::of(source, plan, device)?;
        let part_of = |job: &SegmentJob| {
            let [rows, _] = tensor_shape(config, job.id);
            elements(config, job.id) / rows.max(1) as u64 * job.rows.len() as u64
        };
        let packed = pack_all(&jobs, part_of, threads, told, |arena, job| pack(source, arena, job))?;
        let mut segments: Vec<Vec<Segment>> = sites.iter().map(|_| Vec::new()).collect();
        for (job, matrix) in jobs.into_iter().zip(packed) {
            let SegmentJob { site, part, rows, column, .. } = job;
            segments[site].push(Segment { part, first_row: rows.start, column, matrix });
        }
        let groups = model_groups(config).map(|(_, group)| group).collect();
        Ok(Self { config: config.clone(), device, sites, groups, ranges, biases, segments })
    }

    /// Returns the bytes of `device`'s packed weights without reading any.
    ///
    /// # Errors
    ///
    /// A tensor is missing.
    pub fn planned_bytes(
        source: &dyn WeightSource,
        plan: GroupPlan,
        device: usize,
    ) -> Result<u64, WeightsError> {
        let jobs = GroupLayout::of(source, plan, device)?.jobs;
        let bytes = |job: &SegmentJob| Ok(packed_layout(source, job.id)?.of_rows(&job.rows).bytes() as u64);
        jobs.iter().map(bytes).sum()
    }

    /// Returns the model's shape.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the bytes of memory that this device's weights take.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.segments.iter().flatten().map(|segment| segment.matrix.bytes()).sum()
    }

    /// Returns this device's outputs of a site.
    pub(super) fn own(&self, site: usize) -> &Range<usize> {
        &self.ranges[site][self.device]
    }

    /// Returns the layers of `call` on this device; columns count from output `base` of the site.
    pub(super) fn parts(&self, call: SiteCall, base: usize) -> Vec<LinearPart<'_>> {
        let site = call.site.0 as usize;
        let wanted = |segment: &&Segment| call.part.is_none_or(|part| usize::from(part) == segment.part);
        let segments = self.segments[site].iter().filter(wanted);
        let parts = segments.map(|segment| {
            let bias = self.biases[site][segment.part].as_deref().filter(|_| call.op == SiteOp::Forward);
            let bias = bias.map(|bias| &bias[segment.first_row..][..segment.matrix.rows()]);
            LinearPart { matrix: &segment.matrix, bias, column: segment.column - base }
        });
        parts.collect()
    }

    /// Writes a row of a site's weights to `out`; `output` is the row among the site's outputs.
    ///
    /// # Panics
    /// If this device does not have the row.
    pub(super) fn read_row(&self, site: usize, output: usize, out: &mut [f32]) {
        let segments = &self.segments[site];
        let next = segments.partition_point(|segment| segment.column <= output);
        let segment = &segments[next.checked_sub(1).expect("the device has the row")];
        segment.matrix.read_row(output - segment.column, out);
    }

    /// Returns the site, the first output and the bias of a linear layer of block `layer`.
    pub(super) fn find(&self, layer: usize, target: Target) -> Option<(usize, usize, Option<&[f32]>)> {
        let name = module_name(layer, target);
        let of_name = |(site, description): (usize, &Site)| {
            let part = description.parts.iter().position(|part| part.name == name)?;
            Some((site, first_output(description, part), self.biases[site][part].as_deref()))
        };
        self.sites[..self.groups.len()].iter().enumerate().find_map(of_name)
    }

    /// Returns the site with the token embedding: the head if it is tied, else one past the head.
    pub(super) fn embedding_site(&self) -> usize {
        if self.config.tied_head { self.groups.len() - 1 } else { self.groups.len() }
    }
}

impl GroupLayout {
    fn of(source: &dyn WeightSource, plan: GroupPlan, device: usize) -> Result<Self, WeightsError> {
        let config = source.config();
        let (mut sites, mut biases, mut ranges, mut jobs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (number, ids) in site_tensors(config).enumerate() {
            let (site, of_site) = describe(source, &ids)?;
            let id = SiteId(u32::try_from(number).unwrap_or(u32::MAX));
            let cuts = plan.ranges(config, id, &site);
            jobs.extend(segments(number, &site, &ids, &cuts[device]));
            ranges.push(cuts);
            sites.push(site);
            biases.push(of_site);
        }
        Ok(Self { sites, biases, ranges, jobs })
    }
}

/// Returns the first output of a site's layer `part`.
fn first_output(site: &Site, part: usize) -> usize {
    site.parts[..part].iter().map(|part| part.rows).sum()
}

/// Returns the outputs of a call among a site's outputs, or `None` if the site has no such layer.
pub(super) fn call_outputs(site: &Site, part: Option<u8>) -> Option<Range<usize>> {
    let Some(part) = part.map(usize::from) else {
        return Some(0..first_output(site, site.parts.len()));
    };
    let rows = site.parts.get(part)?.rows;
    let first = first_output(site, part);
    Some(first..first + rows)
}

/// Returns the weights of each site, and of the token embedding at the end if the head is not tied to it.
fn site_tensors(config: &ModelConfig) -> impl Iterator<Item = Vec<TensorId>> {
    let of_group = |(layer, group)| match group {
        LinearGroup::Head if config.tied_head => vec![TensorId::TokenEmbedding],
        _ => group_weights(layer, group),
    };
    let embedding = (!config.tied_head).then(|| vec![TensorId::TokenEmbedding]);
    model_groups(config).map(of_group).chain(embedding)
}

/// Returns a site with the weights `ids`, and the bias of each.
fn describe(source: &dyn WeightSource, ids: &[TensorId]) -> Result<(Site, SiteBiases), WeightsError> {
    let config = source.config();
    let (mut parts, mut biases, mut is_exact, mut columns) = (Vec::new(), Vec::new(), true, 0);
    for &id in ids {
        let layout = packed_layout(source, id)?;
        let (rows, bias) = (layout.rows(), read_bias(source, id, layout.rows())?);
        let name = match id {
            TensorId::TokenEmbedding => module_name(0, Target::LmHead),
            id => linear_name(config, id),
        };
        parts.push(SitePart { name, rows, has_bias: bias.is_some() });
        biases.push(bias);
        (is_exact, columns) = (is_exact && layout.is_exact(), layout.columns());
    }
    let (arithmetic, ring) = (Arithmetic::Unrounded, None);
    Ok((Site { columns, parts, fast_is_linear: is_exact, arithmetic, ring }, biases))
}

/// Returns the layout of a packed matrix, whose unit is not known before it is read.
fn packed_layout(source: &dyn WeightSource, id: TensorId) -> Result<PackedLayout, WeightsError> {
    let [rows, columns] = tensor_shape(source.config(), id);
    let layout = source.kind(id).and_then(|kind| PackedLayout::known(kind, rows, columns, 1.0));
    layout.ok_or(WeightsError::Missing(id))
}

/// Returns the segments of a site within the outputs `own`.
fn segments(site: usize, description: &Site, ids: &[TensorId], own: &Range<usize>) -> Vec<SegmentJob> {
    let mut column = 0;
    let mut jobs = Vec::new();
    for (part, (id, rows)) in ids.iter().zip(description.parts.iter().map(|part| part.rows)).enumerate() {
        let (from, to) = (own.start.max(column), own.end.min(column + rows));
        if from < to {
            jobs.push(SegmentJob { site, part, id: *id, rows: from - column..to - column, column: from });
        }
        column += rows;
    }
    jobs
}

fn pack(source: &dyn WeightSource, arena: &Arena, job: &SegmentJob) -> Result<PackedMatrix, WeightsError> {
    let tensor = read_matrix(source, job.id)?;
    let shape = [tensor.rows, tensor.cols];
    let matrix = PackedMatrix::pack_rows_in(arena, tensor.kind, &tensor.data, shape, job.rows.clone())
        .map_err(|source| WeightsError::Pack { id: job.id, source })?;
    drop(tensor);
    source.release(job.id);
    Ok(matrix)
}

//! Changes by the adapters of a batch: low-rank deltas, scales (IA3), biases, keys and values of virtual
//! tokens (prefix tuning), embeddings and heads. The device computes the ranks that it holds, and helpers the
//! rest.

use std::convert::Infallible;

use kernels::{
    Activations,
    attention::QkvLayout,
    lora::{LeadingSums, LoraSegment, add_deltas},
};

use crate::{
    adapter::ScaledSide,
    cpu::Compute,
    deltas::{
        adapter_rows::{AdapterRows, AdapterRun, EmbeddingRows, VirtualRows},
        assist::{Assist, PartialSum},
    },
    forward::Deltas,
    shape::{
        config::ModelConfig,
        layout::{LinearGroup, expert_targets, linear_shape},
        source::Target,
    },
    weights::group_targets,
};

/// A run's part of one linear layer. The ranks on the device are looked up once for each group, so that
/// helpers and device agree on the missing ones.
#[derive(Debug, Clone, Copy)]
struct RunPart {
    run: usize,
    target: Target,
    column: usize,
    /// Number of leading ranks that the device lacks.
    missing: usize,
    /// Index of the first element of their sums.
    offset: usize,
}

/// Buffers for the deltas of a batch, kept between passes.
#[derive(Debug, Default)]
pub struct DeltaScratch {
    parts: Vec<RunPart>,
    sums: Vec<f32>,
}

/// Deltas of one batch, as a pass applies them.
#[derive(Debug)]
pub struct BatchDeltas<'a> {
    config: &'a ModelConfig,
    /// Helpers that sum missing ranks in this pass; without them the executor reads the host tier.
    assist: Option<&'a mut (dyn Assist + 'static)>,
    scratch: &'a mut DeltaScratch,
    found: &'a AdapterRows,
    asks: Vec<PartialSum<'a>>,
    has_scales: bool,
    has_experts: bool,
}

impl<'a> BatchDeltas<'a> {
    /// Creates the deltas of a batch with the adapter rows `found`.
    #[must_use]
    pub fn new(
        config: &'a ModelConfig,
        assist: Option<&'a mut (dyn Assist + 'static)>,
        scratch: &'a mut DeltaScratch,
        found: &'a AdapterRows,
    ) -> Self {
        let is_cold = !found.rows.iter().all(|run| run.adapter.is_on_device());
        let mut assist = assist.filter(|_| is_cold);
        if assist.as_mut().is_some_and(|assist| assist.helpers() == 0) {
            assist = None;
        }
        if let Some(assist) = &mut assist {
            assist.begin_pass();
        }
        let has_scales = found.have_scales();
        let has_experts = found.have_experts();
        Self { config, assist, scratch, found, asks: Vec::new(), has_scales, has_experts }
    }

    /// Looks up the ranks on the device for the group's layers, and lists the requests.
    fn plan(&mut self, layer: usize, group: LinearGroup) {
        let DeltaScratch { parts, sums } = &mut *self.scratch;
        let runs = self.found.of_group(group);
        parts.clear();
        self.asks.clear();
        let mut offset = 0;
        if !runs.is_empty() {
            let targets = group_targets(self.config, group);
            for (index, run) in runs.iter().enumerate().filter(|(_, run)| run.rows > 0) {
                for &(target, column) in &targets {
                    let Some(host) = run.adapter.matrix(layer, target) else { continue };
                    let device = run.device.as_ref();
                    let missing = device.map_or(host.rank(), |copy| copy.missing_ranks(host, layer, target));
                    parts.push(RunPart { run: index, target, column, missing, offset });
                    if missing > 0 && self.assist.is_some() {
                        let ask = run.ask(layer, target, host, missing, offset);
                        offset += ask.elements();
                        self.asks.push(ask);
                    }
                }
            }
        }
        sums.resize(offset, 0.0);
    }
}

impl BatchDeltas<'_> {
    /// Multiplies the adapters' scales into this side of a group; `values` are rows of `stride`.
    fn scale(&self, layer: usize, group: LinearGroup, side: ScaledSide, values: &mut [f32], stride: usize) {
        if !self.has_scales {
            return;
        }
        let runs = self.found.of_group(group);
        let targets = group_targets(self.config, group);
        for run in runs {
            let Some(scales) = run.adapter.scales() else { continue };
            let rows = &mut values[run.first_row * stride..][..run.rows * stride];
            for &(target, column) in &targets {
                // Scaled inputs belong to one layer only.
                let column = if side == ScaledSide::Input { 0 } else { column };
                if let Some(factors) = scales.get(layer, target, side) {
                    for row in rows.chunks_exact_mut(stride) {
                        let part = row[column..].iter_mut().zip(factors);
                        part.for_each(|(value, factor)| *value *= factor);
                    }
                }
                if let Some(offset) = scales.offset(layer, target).filter(|_| side == ScaledSide::Output) {
                    for row in rows.chunks_exact_mut(stride) {
                        row[column..].iter_mut().zip(offset).for_each(|(value, more)| *value += more);
                    }
                }
            }
        }
    }

    /// Overwrites the logits of rows whose adapter has its own head or rows of it; `out` has rows of
    /// `stride`.
    fn replace_logits(
        &self,
        compute: &mut Compute,
        x: &Activations,
        out: &mut [f32],
        stride: usize,
    ) -> Result<(), Infallible> {
        self.found.own_logits(compute, x.values(), |row, logits| {
            out[row * stride..][..stride].copy_from_slice(logits);
            Ok::<_, Infallible>(())
        })?;
        self.found.token_logits(x.values(), x.width(), |row, logits| {
            logits.iter().for_each(|&(token, logit)| out[row * stride + token] = logit);
            Ok(())
        })
    }

    fn outputs(&self, group: LinearGroup) -> usize {
        let targets = group_targets(self.config, group);
        targets.iter().map(|&(target, _)| linear_shape(self.config, target)[0]).sum()
    }
}

impl Drop for BatchDeltas<'_> {
    fn drop(&mut self) {
        if let Some(assist) = &mut self.assist {
            assist.end_pass();
        }
    }
}

/// Returns the executor's work for a part. With `sums`, these are the ranks after the leading ones; without
/// helpers and with missing ranks, all ranks from the host tier.
fn segment<'a>(
    run: &'a AdapterRun,
    part: &RunPart,
    layer: usize,
    sums: Option<&'a [f32]>,
) -> Option<LoraSegment<'a>> {
    let matrix = run.adapter.matrix(layer, part.target)?;
    let device = || run.device.as_ref().and_then(|copy| copy.matrix(layer, part.target));
    let rank_rows = |ranks: usize| (run.rows * ranks) as u64;
    let (staged, head) = match (part.missing, sums) {
        (0, _) => (device(), LeadingSums::None),
        (_, None) => (None, LeadingSums::None),
        (ranks, Some(sums)) => {
            let values = &sums[part.offset..part.offset + run.rows * matrix.rows()];
            (device(), LeadingSums::Sums { ranks, values })
        }
    };
    match (part.missing, sums) {
        (missing, None) if missing > 0 => run.adapter.tally().executor(rank_rows(matrix.rank())),
        (missing, _) => run.adapter.tally().device(rank_rows(matrix.rank() - missing)),
    }
    Some(LoraSegment { first_row: run.first_row, rows: run.rows, matrix, column: part.column, staged, head })
}

impl Deltas<Compute> for BatchDeltas<'_> {
    fn change_embeddings(
        &mut self,
        _device: &mut Compute,
        tokens: &mut dyn Iterator<Item = u32>,
        residual: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        let width = self.config.hidden_size;
        let EmbeddingRows { added, replaced } = self.found.embedding_rows(self.config, tokens);
        for (row, delta) in added.iter(width) {
            let embedding = &mut residual[row * width..][..width];
            embedding.iter_mut().zip(delta).for_each(|(value, delta)| *value += delta);
        }
        for (row, embedding) in replaced.iter(width) {
            residual[row * width..][..width].copy_from_slice(embedding);
        }
        Ok(())
    }

    fn scale_inputs(
        &mut self,
        _device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
    ) -> Result<(), Infallible> {
        let width = x.width();
        self.scale(layer, group, ScaledSide::Input, x.values_mut(), width);
        Ok(())
    }

    fn place_prefix(
        &mut self,
        _device: &mut Compute,
        layer: usize,
        qkv: &mut Vec<f32>,
        layout: QkvLayout,
    ) -> Result<(), Infallible> {
        let stride = layout.stride();
        for VirtualRows { first_row, token, rows, adapter } in &self.found.virtual_rows {
            let Some(prefix) = adapter.prefix() else { continue };
            let rows = qkv.chunks_exact_mut(stride).skip(*first_row).take(*rows);
            for (row, token) in rows.zip(*token..) {
                let from = prefix.keys_and_values(token, layer);
                // Keys and values are adjacent at the end of a row.
                row[stride - from.len()..].copy_from_slice(from);
            }
        }
        Ok(())
    }

    fn begin(
        &mut self,
        _device: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &Activations,
    ) -> Result<(), Infallible> {
        self.plan(layer, group);
        if let Some(assist) = self.assist.as_mut().filter(|_| !self.asks.is_empty()) {
            assist.begin(x, &self.asks);
        }
        Ok(())
    }

    fn add_to_expert(
        &mut self,
        compute: &mut Compute,
        (layer, group): (usize, LinearGroup),
        rows: &[u32],
        x: &Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        if !self.has_experts {
            return Ok(());
        }
        let stride = out.len() / rows.len().max(1);
        for targets in expert_targets(self.config, group) {
            let segments = self.found.expert_segments(layer, &targets, rows);
            if !segments.is_empty() {
                add_deltas(&mut compute.pool, compute.isa, x, &segments, out, stride);
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &Activations,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        let has_own_heads = group == LinearGroup::Head && self.found.have_own_heads();
        if self.scratch.parts.is_empty() && !self.has_scales && !has_own_heads {
            return Ok(());
        }
        let stride = self.outputs(group);
        if has_own_heads {
            self.replace_logits(compute, x, out, stride)?;
        }
        self.scale(layer, group, ScaledSide::Output, out, stride);
        let DeltaScratch { parts, sums } = &mut *self.scratch;
        if parts.is_empty() {
            return Ok(());
        }
        let runs = self.found.of_group(group);
        if let Some(assist) = self.assist.as_mut().filter(|_| !self.asks.is_empty()) {
            assist.finish(compute, x, &self.asks, sums);
        }
        let sums = self.assist.is_some().then_some(&sums[..]);
        let segment = |part: &RunPart| segment(&runs[part.run], part, layer, sums);
        let segments: Vec<LoraSegment<'_>> = parts.iter().filter_map(segment).collect();
        add_deltas(&mut compute.pool, compute.isa, x, &segments, out, stride);
        Ok(())
    }
}

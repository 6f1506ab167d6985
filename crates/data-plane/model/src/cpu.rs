//! The CPU as a device of the forward pass: rows in process memory, and work done when a call returns.

pub(crate) mod experts;
pub mod kv;

use std::convert::Infallible;

use kernels::{
    Activations, Isa, ThreadPool,
    attention::KvRows,
    elementwise::{Heads, Norm, Rotation, add_norm, cap_in_place, gate_mul, norm_in_place, rotate},
};

use crate::{
    forward::{Device, ExpertRows, ExpertScratch, ModelContext, NormSite, Routing, Scratch, ScratchBuffer},
    shape::{config::ModelConfig, rope::Angles},
};

/// Threads and instruction set that a pass computes with.
#[derive(Debug)]
pub struct Compute {
    /// Threads among which kernels divide their work.
    pub pool: ThreadPool,
    /// The instruction set of the kernels.
    pub isa: Isa,
}

impl Compute {
    /// Returns the query and key heads of a layer for norms and rotation; queries also take the score scale.
    pub(crate) fn heads(model: &ModelContext, layer: usize) -> [Heads<'_>; 2] {
        let (layout, norms, eps) = (model.qkv_layout(), &model.norms, model.config.norm_eps);
        let norm = |weight| Norm { weight, eps };
        let queries = Heads {
            column: 0,
            count: layout.heads,
            norm: norms.query.get(layer).map(|weight| norm(weight)),
            scale: model.score_scale(),
        };
        let keys = Heads {
            column: layout.heads * layout.head_dim,
            count: layout.kv_heads,
            norm: norms.key.get(layer).map(|weight| norm(weight)),
            scale: 1.0,
        };
        [queries, keys]
    }
}

/// Positions and KV blocks of a batch's rows.
#[derive(Debug, Default)]
pub struct RowTable {
    angles: Angles,
    spans: Vec<Span>,
    trunks: Vec<Span>,
    blocks: Vec<u32>,
}

/// Rows of one sequence, and the range of its blocks in [`RowTable::blocks`].
#[derive(Debug, Clone, Copy)]
struct Span {
    first_row: usize,
    rows: usize,
    position: usize,
    first_block: usize,
    blocks: usize,
}

impl RowTable {
    /// Returns the rotary tables for the rows' positions in `layer`.
    pub(crate) fn rotation(&self, config: &ModelConfig, layer: usize) -> Rotation<'_> {
        let (cos, sin) = self.angles.tables(config.reach(layer));
        Rotation { width: config.rotary_dim(), cos, sin }
    }

    /// Returns the rows of each sequence in the form of the kernels.
    #[must_use]
    pub fn sequences(&self) -> Vec<KvRows<'_>> {
        self.spans.iter().map(|span| self.rows(span)).collect()
    }

    /// Returns the rows that are also stored in the blocks of a branch.
    pub(crate) fn trunks(&self) -> impl Iterator<Item = KvRows<'_>> {
        self.trunks.iter().map(|span| self.rows(span))
    }

    fn rows(&self, span: &Span) -> KvRows<'_> {
        let &Span { first_row, rows, position, first_block, blocks } = span;
        KvRows { first_row, rows, position, blocks: &self.blocks[first_block..first_block + blocks] }
    }

    fn place(&mut self, rows: &KvRows<'_>) -> Span {
        let &KvRows { first_row, rows, position, blocks } = rows;
        let first_block = self.blocks.len();
        self.blocks.extend_from_slice(blocks);
        Span { first_row, rows, position, first_block, blocks: blocks.len() }
    }
}

impl Scratch<Compute> {
    /// Returns scratch buffers for zero rows.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            residual: Vec::new(),
            update: Vec::new(),
            normed: Activations::default(),
            qkv: Vec::new(),
            attended: Activations::default(),
            gate_up: Vec::new(),
            gated: Activations::default(),
            experts: ExpertScratch {
                inputs: Activations::default(),
                gate_up: Vec::new(),
                gated: Activations::default(),
                outputs: Vec::new(),
                sums: Vec::new(),
                routing: Routing::default(),
            },
            batch: RowTable::default(),
            states: Vec::new(),
        }
    }
}

impl Device for Compute {
    type Error = Infallible;
    type Residual = Vec<f32>;
    type Inputs = Activations;
    type Outputs = Vec<f32>;
    type Batch = RowTable;

    fn scratch(&self) -> Result<Scratch<Self>, Infallible> {
        Ok(Scratch::empty())
    }

    fn lay_out(
        &mut self,
        model: &ModelContext,
        sequences: &[KvRows<'_>],
        trunks: &[KvRows<'_>],
        batch: &mut RowTable,
    ) -> Result<(), Infallible> {
        batch.angles.clear();
        batch.spans.clear();
        batch.trunks.clear();
        batch.blocks.clear();
        for rows in sequences {
            let span = batch.place(rows);
            batch.spans.push(span);
            batch.angles.extend(&model.rope, rows.position..rows.position + rows.rows);
        }
        for rows in trunks {
            let span = batch.place(rows);
            batch.trunks.push(span);
        }
        Ok(())
    }

    fn reshape(
        &mut self,
        buffer: ScratchBuffer<'_, Self>,
        rows: usize,
        width: usize,
    ) -> Result<(), Infallible> {
        match buffer {
            ScratchBuffer::Residual(values) | ScratchBuffer::Outputs(values) => {
                values.resize(rows * width, 0.0)
            }
            ScratchBuffer::Inputs(values) => values.reshape(rows, width),
        }
        Ok(())
    }

    fn add_norm(
        &mut self,
        model: &ModelContext,
        site: NormSite,
        residual: &mut Vec<f32>,
        update: Option<&Vec<f32>>,
        out: &mut Activations,
    ) -> Result<(), Infallible> {
        let (update, out) = (update.map(Vec::as_slice), out.values_mut());
        match model.norm(site) {
            Some(norm) => add_norm(&mut self.pool, self.isa, residual, update, norm, out),
            None => {
                residual.iter_mut().zip(update.unwrap_or_default()).for_each(|(value, more)| *value += more);
                out.copy_from_slice(residual);
            }
        }
        Ok(())
    }

    fn scale_embeddings(&mut self, factor: f32, residual: &mut Vec<f32>) -> Result<(), Infallible> {
        residual.iter_mut().for_each(|value| *value *= factor);
        Ok(())
    }

    fn scale_update(&mut self, factor: f32, update: &mut Vec<f32>) -> Result<(), Infallible> {
        update.iter_mut().for_each(|value| *value *= factor);
        Ok(())
    }

    fn norm_update(
        &mut self,
        model: &ModelContext,
        site: NormSite,
        update: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        if let Some(norm) = model.norm(site) {
            norm_in_place(&mut self.pool, self.isa, update, norm);
        }
        Ok(())
    }

    fn rotate(
        &mut self,
        model: &ModelContext,
        layer: usize,
        qkv: &mut Vec<f32>,
        batch: &RowTable,
    ) -> Result<(), Infallible> {
        let (layout, by) = (model.qkv_layout(), batch.rotation(&model.config, layer));
        let heads = Self::heads(model, layer);
        rotate(&mut self.pool, self.isa, qkv, layout.stride(), layout.head_dim, by, &heads);
        Ok(())
    }

    fn gate(
        &mut self,
        model: &ModelContext,
        gate_up: &Vec<f32>,
        out: &mut Activations,
    ) -> Result<(), Infallible> {
        let (gate, width) = (model.config.traits.gate, out.width());
        gate_mul(&mut self.pool, self.isa, gate, gate_up, width, out.values_mut());
        Ok(())
    }

    fn route(
        &mut self,
        model: &ModelContext,
        layer: usize,
        normed: &Activations,
        routing: &mut Routing,
    ) -> Result<(), Infallible> {
        let (_, experts) = model.router(layer).expect("a block with experts has a router");
        routing.sort(&self.probabilities(model, layer, normed), experts);
        Ok(())
    }

    fn take_some(
        &mut self,
        from: &Activations,
        rows: &[u32],
        out: &mut Activations,
    ) -> Result<(), Infallible> {
        experts::take_some(from.values(), rows, from.width(), out.values_mut());
        Ok(())
    }

    fn clear(&mut self, sums: &mut Vec<f32>) -> Result<(), Infallible> {
        sums.fill(0.0);
        Ok(())
    }

    fn give_sums(&mut self, sums: &mut Vec<f32>, update: &mut Vec<f32>) -> Result<(), Infallible> {
        std::mem::swap(sums, update);
        Ok(())
    }

    fn add_weighted(
        &mut self,
        from: &Vec<f32>,
        taken: ExpertRows<'_>,
        sums: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        experts::add_weighted(from, taken, from.len() / taken.rows.len(), sums);
        Ok(())
    }

    fn cap_logits(&mut self, cap: f32, logits: &mut Vec<f32>) -> Result<(), Infallible> {
        cap_in_place(&mut self.pool, self.isa, logits, cap);
        Ok(())
    }

    fn keep(
        &mut self,
        residual: &mut Vec<f32>,
        update: &mut Vec<f32>,
        width: usize,
        kept: &[u32],
    ) -> Result<(), Infallible> {
        for values in [residual, update] {
            for (to, &from) in kept.iter().enumerate() {
                let from = from as usize * width;
                // Rows only move towards the front, so no row is overwritten before it is read.
                values.copy_within(from..from + width, to * width);
            }
            values.truncate(kept.len() * width);
        }
        Ok(())
    }

    fn take_rows(
        &mut self,
        inputs: &mut Activations,
        first: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), Infallible> {
        out.extend_from_slice(&inputs.values()[first * inputs.width()..]);
        inputs.truncate(first);
        Ok(())
    }
}

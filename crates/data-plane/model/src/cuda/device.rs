//! Rows of a pass on the device.

use std::{mem, sync::Arc};

use kernels::{
    attention::{KvRows, QkvLayout},
    cuda::{
        BlockMemory, CudaError, CudaStream, DeviceVec, Matrix,
        attention::RowTable,
        gate::gate_mul,
        norm::{Norm, add_copy, add_norm, norm_in_place},
        rope::{Rotation, rotate},
        rows::{cap, gather, scale_columns},
    },
    lora::ElementKind,
};

use super::experts::DeviceExperts;
use crate::{
    forward::{
        Device, ExpertRows, ExpertScratch, ModelContext, NormSite, Norms, Routing, Scratch, ScratchBuffer,
    },
    shape::config::AttentionReach,
};

/// Whether a pass writes the tables of its batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tables {
    Write,
    /// The tables are already written, because a captured CUDA graph must not contain changing data.
    Written,
}

/// A GPU as the device of a pass.
#[derive(Debug)]
pub struct CudaDevice {
    stream: CudaStream,
    kind: ElementKind,
    layout: QkvLayout,
    pool: Arc<BlockMemory>,
    norms: DeviceNorms,
    /// Rotary frequencies of layers with global attention, then of those with a window.
    frequencies: [DeviceVec<f32>; 2],
    /// Factor of the embeddings for each feature.
    embedding_scale: Option<DeviceVec<f32>>,
    /// Factor of the outputs of attention and feed-forward, for each feature.
    update_scale: Option<DeviceVec<f32>>,
    pub(super) tables: Tables,
    tokens: DeviceVec<u32>,
    /// Source rows of the rows to keep.
    kept: DeviceVec<u32>,
    spare_residual: Matrix,
    spare_update: Matrix,
    experts: DeviceExperts,
}

#[derive(Debug)]
struct DeviceNorms {
    attention: Vec<DeviceVec<f32>>,
    feed_forward: Vec<DeviceVec<f32>>,
    attention_update: Vec<DeviceVec<f32>>,
    feed_forward_update: Vec<DeviceVec<f32>>,
    query: Vec<DeviceVec<f32>>,
    key: Vec<DeviceVec<f32>>,
    output: DeviceVec<f32>,
}

impl DeviceNorms {
    fn upload(stream: &CudaStream, norms: &Norms) -> Result<Self, CudaError> {
        let all = |vectors: &[Vec<f32>]| -> Result<Vec<_>, CudaError> {
            vectors.iter().map(|vector| DeviceVec::from_slice(stream, vector)).collect()
        };
        Ok(Self {
            attention: all(&norms.attention)?,
            feed_forward: all(&norms.feed_forward)?,
            attention_update: all(&norms.attention_update)?,
            feed_forward_update: all(&norms.feed_forward_update)?,
            query: all(&norms.query)?,
            key: all(&norms.key)?,
            output: DeviceVec::from_slice(stream, &norms.output)?,
        })
    }

    fn get(&self, site: NormSite) -> Option<&DeviceVec<f32>> {
        match site {
            NormSite::Attention(layer) => self.attention.get(layer),
            NormSite::FeedForward(layer) => self.feed_forward.get(layer),
            NormSite::AttentionUpdate(layer) => self.attention_update.get(layer),
            NormSite::FeedForwardUpdate(layer) => self.feed_forward_update.get(layer),
            NormSite::Output => Some(&self.output),
        }
    }
}

impl CudaDevice {
    pub(super) fn new(
        pool: &Arc<BlockMemory>,
        model: &ModelContext,
        kind: ElementKind,
    ) -> Result<Self, CudaError> {
        let cuda = pool.cuda();
        let stream = CudaStream::new(cuda)?;
        let frequencies = |reach| DeviceVec::from_slice(&stream, model.rope.frequencies(reach));
        let scales = |factor: Option<f32>| {
            let factors = factor.map(|factor| vec![factor; model.config.hidden_size]);
            factors.map(|factors| DeviceVec::from_slice(&stream, &factors)).transpose()
        };
        let traits = &model.config.traits;
        Ok(Self {
            kind,
            layout: model.qkv_layout(),
            pool: Arc::clone(pool),
            norms: DeviceNorms::upload(&stream, &model.norms)?,
            frequencies: [frequencies(AttentionReach::Global)?, frequencies(AttentionReach::Local)?],
            embedding_scale: scales(traits.embedding_scale)?,
            update_scale: scales(traits.update_scale)?,
            tables: Tables::Write,
            tokens: DeviceVec::new(cuda, 0)?,
            kept: DeviceVec::new(cuda, 0)?,
            spare_residual: Matrix::new(cuda, ElementKind::F32)?,
            spare_update: Matrix::new(cuda, kind)?,
            experts: DeviceExperts::new(&stream, model, kind)?,
            stream,
        })
    }

    pub(super) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    pub(super) fn kind(&self) -> ElementKind {
        self.kind
    }

    pub(super) fn tokens(&self) -> &DeviceVec<u32> {
        &self.tokens
    }

    /// Writes the batch's tokens, unless they are already written.
    pub(super) fn write_tokens(&mut self, tokens: &mut dyn Iterator<Item = u32>) -> Result<(), CudaError> {
        if self.tables == Tables::Written {
            return Ok(());
        }
        self.stream.write(&tokens.collect::<Vec<_>>(), &mut self.tokens)
    }

    fn new_matrix(&self, kind: ElementKind) -> Result<Matrix, CudaError> {
        Matrix::new(self.stream.cuda(), kind)
    }
}

fn scale_rows(
    stream: &CudaStream,
    values: &mut Matrix,
    factors: Option<&DeviceVec<f32>>,
) -> Result<(), CudaError> {
    let factors = factors.expect("a model with a factor has brought it here");
    let rows = 0..values.rows();
    scale_columns(stream, values, rows, 0, factors)
}

impl Device for CudaDevice {
    type Error = CudaError;
    type Residual = Matrix;
    type Inputs = Matrix;
    type Outputs = Matrix;
    type Batch = RowTable;

    fn scratch(&self) -> Result<Scratch<Self>, CudaError> {
        Ok(Scratch {
            residual: self.new_matrix(ElementKind::F32)?,
            update: self.new_matrix(self.kind)?,
            normed: self.new_matrix(self.kind)?,
            qkv: self.new_matrix(self.kind)?,
            attended: self.new_matrix(self.kind)?,
            gate_up: self.new_matrix(self.kind)?,
            gated: self.new_matrix(self.kind)?,
            experts: ExpertScratch {
                inputs: self.new_matrix(self.kind)?,
                gate_up: self.new_matrix(self.kind)?,
                gated: self.new_matrix(self.kind)?,
                outputs: self.new_matrix(self.kind)?,
                sums: self.new_matrix(ElementKind::F32)?,
                routing: Routing::default(),
            },
            batch: RowTable::new(&self.pool, self.layout)?,
            states: Vec::new(),
        })
    }

    fn lay_out(
        &mut self,
        _model: &ModelContext,
        sequences: &[KvRows<'_>],
        trunks: &[KvRows<'_>],
        batch: &mut RowTable,
    ) -> Result<(), CudaError> {
        assert!(trunks.is_empty(), "a GPU takes chains of drafted tokens alone (`ForwardPass::branches`)");
        match self.tables {
            Tables::Write => batch.upload(&self.stream, sequences),
            Tables::Written => Ok(()),
        }
    }

    fn reshape(
        &mut self,
        buffer: ScratchBuffer<'_, Self>,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        match buffer {
            ScratchBuffer::Residual(matrix)
            | ScratchBuffer::Inputs(matrix)
            | ScratchBuffer::Outputs(matrix) => matrix.reshape(rows, width),
        }
    }

    fn add_norm(
        &mut self,
        model: &ModelContext,
        site: NormSite,
        residual: &mut Matrix,
        update: Option<&Matrix>,
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        match self.norms.get(site) {
            Some(weight) => {
                let norm = Norm { weight, eps: model.config.norm_eps };
                add_norm(&self.stream, residual, update, norm, out)
            }
            None => add_copy(&self.stream, residual, update, out),
        }
    }

    fn scale_embeddings(&mut self, _factor: f32, residual: &mut Matrix) -> Result<(), CudaError> {
        scale_rows(&self.stream, residual, self.embedding_scale.as_ref())
    }

    fn scale_update(&mut self, _factor: f32, update: &mut Matrix) -> Result<(), CudaError> {
        scale_rows(&self.stream, update, self.update_scale.as_ref())
    }

    fn norm_update(
        &mut self,
        model: &ModelContext,
        site: NormSite,
        update: &mut Matrix,
    ) -> Result<(), CudaError> {
        match self.norms.get(site) {
            Some(weight) => {
                norm_in_place(&self.stream, update, 0, Norm { weight, eps: model.config.norm_eps })
            }
            None => Ok(()),
        }
    }

    fn rotate(
        &mut self,
        model: &ModelContext,
        layer: usize,
        qkv: &mut Matrix,
        batch: &RowTable,
    ) -> Result<(), CudaError> {
        let norm = |weight| Norm { weight, eps: model.config.norm_eps };
        let (mut query, mut key) =
            (self.norms.query.get(layer).map(norm), self.norms.key.get(layer).map(norm));
        let (layout, scale) = (model.qkv_layout(), model.score_scale());
        if model.config.traits.wide_query_norms {
            // The rotation kernel holds one head at a time, so norms over all heads run before it.
            for (norm, column) in [(query.take(), 0), (key.take(), layout.heads * layout.head_dim)] {
                norm.map_or(Ok(()), |norm| norm_in_place(&self.stream, qkv, column, norm))?;
            }
        }
        let [global, local] = &self.frequencies;
        let frequencies = if model.config.reach(layer) == AttentionReach::Global { global } else { local };
        let by = Rotation { positions: batch.positions(), frequencies, magnitude: model.rope.magnitude() };
        rotate(&self.stream, qkv, layout, by, query, key, scale)
    }

    fn gate(&mut self, model: &ModelContext, gate_up: &Matrix, out: &mut Matrix) -> Result<(), CudaError> {
        gate_mul(&self.stream, model.config.traits.gate, gate_up, out)
    }

    fn route(
        &mut self,
        model: &ModelContext,
        layer: usize,
        normed: &Matrix,
        routing: &mut Routing,
    ) -> Result<(), CudaError> {
        let (_, experts) = model.router(layer).expect("a block with experts has a router");
        self.experts.route(&self.stream, layer, experts, normed, routing)
    }

    fn take_some(&mut self, from: &Matrix, rows: &[u32], out: &mut Matrix) -> Result<(), CudaError> {
        self.experts.take_some(&self.stream, from, rows, out)
    }

    fn clear(&mut self, sums: &mut Matrix) -> Result<(), CudaError> {
        sums.clear(&self.stream)
    }

    fn add_weighted(
        &mut self,
        from: &Matrix,
        taken: ExpertRows<'_>,
        sums: &mut Matrix,
    ) -> Result<(), CudaError> {
        self.experts.add_weighted(&self.stream, from, taken, sums)
    }

    fn give_sums(&mut self, sums: &mut Matrix, update: &mut Matrix) -> Result<(), CudaError> {
        add_copy(&self.stream, sums, None, update)
    }

    fn cap_logits(&mut self, limit: f32, logits: &mut Matrix) -> Result<(), CudaError> {
        cap(&self.stream, logits, limit)
    }

    fn keep(
        &mut self,
        residual: &mut Matrix,
        update: &mut Matrix,
        width: usize,
        kept: &[u32],
    ) -> Result<(), CudaError> {
        // If all rows are kept, as in every decode step, nothing moves.
        if kept.len() == residual.rows() {
            return Ok(());
        }
        self.stream.write(kept, &mut self.kept)?;
        for (matrix, spare) in [(residual, &mut self.spare_residual), (update, &mut self.spare_update)] {
            spare.reshape(kept.len(), width)?;
            gather(&self.stream, matrix, &self.kept, kept.len(), spare)?;
            mem::swap(matrix, spare);
        }
        Ok(())
    }

    fn take_rows(&mut self, inputs: &mut Matrix, first: usize, out: &mut Vec<f32>) -> Result<(), CudaError> {
        out.resize((inputs.rows() - first) * inputs.width(), 0.0);
        inputs.download(&self.stream, first, out)?;
        inputs.truncate(first);
        Ok(())
    }
}

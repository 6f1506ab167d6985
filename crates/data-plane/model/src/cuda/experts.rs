//! Routing of rows to experts and back, on the device.
//!
//! The device multiplies the router in 32 bits, and the host reads the result and sorts the rows, because the
//! number of rows per expert decides the launches. A pass with experts therefore waits once in each such
//! block and is not captured in a CUDA graph.

use kernels::{
    Isa, TensorType, ThreadPool,
    cuda::{
        CudaError, CudaStream, DeviceVec, Matrix,
        linear::{LinearPart, Workspace, linear},
        norm::add_copy,
        rows::{add_weighted, gather},
        weight::Weight,
    },
    elementwise::softmax_in_place,
    lora::ElementKind,
};

use crate::{
    forward::{ExpertRows, ModelContext, Routing},
    shape::experts::Experts,
};

#[derive(Debug)]
pub(super) struct DeviceExperts {
    routers: Vec<Option<Weight>>,
    workspace: Workspace,
    /// Inputs and outputs of a router in 32 bits.
    exact: Matrix,
    logits: Matrix,
    /// Unused by-product of the conversion to 32 bits.
    spare: Matrix,
    probabilities: Vec<f32>,
    pool: ThreadPool,
    /// Rows of an expert, and their weights.
    rows: DeviceVec<u32>,
    weights: DeviceVec<f32>,
}

impl DeviceExperts {
    pub(super) fn new(
        stream: &CudaStream,
        model: &ModelContext,
        kind: ElementKind,
    ) -> Result<Self, CudaError> {
        let cuda = stream.cuda();
        let router = |layer| {
            let Some((router, _)) = model.router(layer) else { return Ok(None) };
            let router = &router.matrix;
            let (rows, columns) = (router.rows(), router.columns());
            let mut values = vec![0.0; rows * columns];
            values.chunks_exact_mut(columns).enumerate().for_each(|(row, out)| router.read_row(row, out));
            let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
            Weight::upload(stream, TensorType::F32, &bytes, rows, columns).map(Some)
        };
        Ok(Self {
            routers: (0..model.config.layers).map(router).collect::<Result<_, CudaError>>()?,
            workspace: Workspace::new(cuda, None),
            exact: Matrix::new(cuda, ElementKind::F32)?,
            logits: Matrix::new(cuda, ElementKind::F32)?,
            spare: Matrix::new(cuda, kind)?,
            probabilities: Vec::new(),
            pool: ThreadPool::new(&[]).expect("a pool of the calling thread starts none"),
            rows: DeviceVec::new(cuda, 0)?,
            weights: DeviceVec::new(cuda, 0)?,
        })
    }

    /// Sorts the rows of `normed` by the experts of `layer` that the router chooses.
    pub(super) fn route(
        &mut self,
        stream: &CudaStream,
        layer: usize,
        experts: &Experts,
        normed: &Matrix,
        routing: &mut Routing,
    ) -> Result<(), CudaError> {
        let router = self.routers[layer].as_ref().expect("a block with experts has a router");
        let (rows, width) = (normed.rows(), normed.width());
        // Adding the rows to zeros converts them to 32 bits.
        self.exact.reshape(rows, width)?;
        self.exact.clear(stream)?;
        self.spare.reshape(rows, width)?;
        add_copy(stream, &mut self.exact, Some(normed), &mut self.spare)?;
        self.logits.reshape(rows, experts.count)?;
        let part = LinearPart { weight: router, bias: None, column: 0 };
        linear(stream, &mut self.workspace, &self.exact, &[part], &mut self.logits)?;
        self.probabilities.resize(rows * experts.count, 0.0);
        self.logits.download(stream, 0, &mut self.probabilities)?;
        softmax_in_place(&mut self.pool, Isa::best(), &mut self.probabilities, experts.count);
        routing.sort(&self.probabilities, experts);
        Ok(())
    }

    pub(super) fn take_some(
        &mut self,
        stream: &CudaStream,
        from: &Matrix,
        rows: &[u32],
        out: &mut Matrix,
    ) -> Result<(), CudaError> {
        stream.write(rows, &mut self.rows)?;
        gather(stream, from, &self.rows, rows.len(), out)
    }

    pub(super) fn add_weighted(
        &mut self,
        stream: &CudaStream,
        from: &Matrix,
        taken: ExpertRows<'_>,
        sums: &mut Matrix,
    ) -> Result<(), CudaError> {
        stream.write(taken.rows, &mut self.rows)?;
        stream.write(taken.weights, &mut self.weights)?;
        add_weighted(stream, from, &self.rows, &self.weights, sums)
    }
}

//! The device of a pass: storage of rows and arithmetic on them.

use std::fmt;

use kernels::attention::KvRows;

use super::{
    expert_routing::{ExpertRows, Routing},
    model_context::{ModelContext, NormSite},
};

/// Stores the rows of a pass and computes with them.
///
/// A device works in the order of the calls, possibly after a call returns. Reads of results wait.
pub trait Device {
    /// Error of the device: `Infallible` for the CPU.
    type Error;
    /// Residual stream in 32 bits: `[rows, hidden]`.
    type Residual: fmt::Debug;
    /// Rows that enter linear layers.
    type Inputs: fmt::Debug;
    /// Rows that leave linear layers.
    type Outputs: fmt::Debug;
    /// Positions and blocks of a batch's rows.
    type Batch: fmt::Debug;

    /// Creates empty scratch buffers, which are kept between passes.
    ///
    /// # Errors
    /// There is no memory.
    fn scratch(&self) -> Result<Scratch<Self>, Self::Error>;

    /// Records the positions and blocks of the batch's rows; the rows of `sequences` are contiguous. `trunks`
    /// are rows among them that are also stored in the blocks of a branch ([`Trunk`](super::Trunk)).
    ///
    /// # Errors
    /// The device fails.
    fn lay_out(
        &mut self,
        model: &ModelContext,
        sequences: &[KvRows<'_>],
        trunks: &[KvRows<'_>],
        batch: &mut Self::Batch,
    ) -> Result<(), Self::Error>;

    /// Resizes a buffer to `rows` rows of `width`, with unspecified contents.
    ///
    /// # Errors
    /// There is no memory.
    fn reshape(
        &mut self,
        buffer: ScratchBuffer<'_, Self>,
        rows: usize,
        width: usize,
    ) -> Result<(), Self::Error>;

    /// Computes `out = norm(residual += update)`, without the norm if the model has none there.
    ///
    /// # Errors
    /// The device fails.
    fn add_norm(
        &mut self,
        model: &ModelContext,
        site: NormSite,
        residual: &mut Self::Residual,
        update: Option<&Self::Outputs>,
        out: &mut Self::Inputs,
    ) -> Result<(), Self::Error>;

    /// Computes `residual *= factor` for token embeddings, in models with such a factor.
    ///
    /// # Errors
    /// The device fails.
    fn scale_embeddings(&mut self, factor: f32, residual: &mut Self::Residual) -> Result<(), Self::Error>;

    /// Computes `update *= factor` before the residual addition, in models with such a factor.
    ///
    /// # Errors
    /// The device fails.
    fn scale_update(&mut self, factor: f32, update: &mut Self::Outputs) -> Result<(), Self::Error>;

    /// Computes `update = norm(update)` before the residual addition, in models with such a norm.
    ///
    /// # Errors
    /// The device fails.
    fn norm_update(
        &mut self,
        model: &ModelContext,
        site: NormSite,
        update: &mut Self::Outputs,
    ) -> Result<(), Self::Error>;

    /// Norms queries and keys if the model does so, rotates them, and scales queries by the score scale.
    ///
    /// # Errors
    /// The device fails.
    fn rotate(
        &mut self,
        model: &ModelContext,
        layer: usize,
        qkv: &mut Self::Outputs,
        batch: &Self::Batch,
    ) -> Result<(), Self::Error>;

    /// Applies the model's gate to rows `[gate | up]` and writes the result to `out`.
    ///
    /// # Errors
    /// The device fails.
    fn gate(
        &mut self,
        model: &ModelContext,
        gate_up: &Self::Outputs,
        out: &mut Self::Inputs,
    ) -> Result<(), Self::Error>;

    /// Sorts the rows of `normed` by the experts of `layer` that the router chooses for them.
    ///
    /// # Errors
    /// The device fails.
    fn route(
        &mut self,
        model: &ModelContext,
        layer: usize,
        normed: &Self::Inputs,
        routing: &mut Routing,
    ) -> Result<(), Self::Error>;

    /// Copies the rows numbered `rows` from `from` to `out`.
    ///
    /// # Errors
    /// The device fails.
    fn take_some(
        &mut self,
        from: &Self::Inputs,
        rows: &[u32],
        out: &mut Self::Inputs,
    ) -> Result<(), Self::Error>;

    /// Sets all sums to zero.
    ///
    /// # Errors
    /// The device fails.
    fn clear(&mut self, sums: &mut Self::Residual) -> Result<(), Self::Error>;

    /// Adds an expert's outputs `from` to the sums of its rows, each times its weight.
    ///
    /// # Errors
    /// The device fails.
    fn add_weighted(
        &mut self,
        from: &Self::Outputs,
        taken: ExpertRows<'_>,
        sums: &mut Self::Residual,
    ) -> Result<(), Self::Error>;

    /// Moves `sums` to `update`; `sums` is unspecified afterwards.
    ///
    /// # Errors
    /// The device fails.
    fn give_sums(&mut self, sums: &mut Self::Residual, update: &mut Self::Outputs)
    -> Result<(), Self::Error>;

    /// Computes `logits = cap * tanh(logits / cap)`, in models with such a cap.
    ///
    /// # Errors
    /// The device fails.
    fn cap_logits(&mut self, cap: f32, logits: &mut Self::Outputs) -> Result<(), Self::Error>;

    /// Keeps the rows `kept`, ascending and `width` wide, and drops the others.
    ///
    /// # Errors
    /// The device fails.
    fn keep(
        &mut self,
        residual: &mut Self::Residual,
        update: &mut Self::Outputs,
        width: usize,
        kept: &[u32],
    ) -> Result<(), Self::Error>;

    /// Moves the rows from `first` on to `out`, which must be empty.
    ///
    /// # Errors
    /// The device fails.
    fn take_rows(
        &mut self,
        inputs: &mut Self::Inputs,
        first: usize,
        out: &mut Vec<f32>,
    ) -> Result<(), Self::Error>;
}

/// A buffer to resize, by kind.
#[derive(Debug)]
pub enum ScratchBuffer<'a, D: Device + ?Sized> {
    /// Buffer of a residual stream.
    Residual(&'a mut D::Residual),
    /// Rows that enter linear layers.
    Inputs(&'a mut D::Inputs),
    /// Rows that leave linear layers.
    Outputs(&'a mut D::Outputs),
}

/// Buffers for the rows of a batch, kept between passes.
#[derive(Debug)]
pub struct Scratch<D: Device + ?Sized> {
    /// Residual stream of the rows.
    pub residual: D::Residual,
    /// Output of `o` and `down`, added to the residual by the next norm.
    pub update: D::Outputs,
    /// Residual stream after its norm.
    pub normed: D::Inputs,
    /// Rows of `[q | k | v]`.
    pub qkv: D::Outputs,
    /// Output of the attention.
    pub attended: D::Inputs,
    /// Rows of `[gate | up]`.
    pub gate_up: D::Outputs,
    /// Output of the feed-forward's gate.
    pub gated: D::Inputs,
    /// Buffers for experts, in models that have some.
    pub experts: ExpertScratch<D>,
    /// Positions and blocks of the rows.
    pub batch: D::Batch,
    /// Hidden states requested in the last pass, `[rows, hidden]`, in host memory on every device.
    pub states: Vec<f32>,
}

/// Buffers for the rows of one expert at a time, kept between passes.
#[derive(Debug)]
pub struct ExpertScratch<D: Device + ?Sized> {
    /// Input rows of the expert.
    pub inputs: D::Inputs,
    /// Rows of `[gate | up]` of the expert.
    pub gate_up: D::Outputs,
    /// Output of the expert's gate.
    pub gated: D::Inputs,
    /// Output rows of the expert.
    pub outputs: D::Outputs,
    /// Sums of the experts' outputs, in 32 bits: `[rows, hidden]`.
    pub sums: D::Residual,
    /// Experts of each row.
    pub routing: Routing,
}

/// Resizes all buffers to `rows` rows, except those of experts, whose numbers of rows are not known yet.
pub(crate) fn make_room<D: Device>(
    model: &ModelContext,
    device: &mut D,
    s: &mut Scratch<D>,
    rows: usize,
) -> Result<(), D::Error> {
    let config = &model.config;
    let (hidden, width) = (config.hidden_size, config.intermediate_size);
    device.reshape(ScratchBuffer::Residual(&mut s.residual), rows, hidden)?;
    device.reshape(ScratchBuffer::Outputs(&mut s.update), rows, hidden)?;
    device.reshape(ScratchBuffer::Inputs(&mut s.normed), rows, hidden)?;
    device.reshape(ScratchBuffer::Outputs(&mut s.qkv), rows, model.qkv_layout().stride())?;
    device.reshape(ScratchBuffer::Inputs(&mut s.attended), rows, config.heads * config.head_dim)?;
    device.reshape(ScratchBuffer::Outputs(&mut s.gate_up), rows, 2 * width)?;
    device.reshape(ScratchBuffer::Inputs(&mut s.gated), rows, width)
}

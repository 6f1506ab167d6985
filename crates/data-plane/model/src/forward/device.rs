//! Where the rows of a pass lie, and who computes with them.

use std::fmt;

use kernels::attention::KvRows;

use super::{
    expert_routing::{ExpertRows, Routing},
    model_context::{ModelContext, NormSite},
};

/// Where the rows of a pass lie, and who computes with them.
///
/// What is asked of a device is done in the order it is asked; it need not be done when the call returns. Whoever reads
/// results waits for them.
pub trait Device {
    /// Why it cannot compute: `Infallible` for the CPU.
    type Error;
    /// The residual stream, 32 bits: `[rows, hidden]`.
    type Residual: fmt::Debug;
    /// Rows that enter linear layers.
    type Inputs: fmt::Debug;
    /// Rows that leave linear layers.
    type Outputs: fmt::Debug;
    /// What it must know of a batch's rows: positions and blocks.
    type Batch: fmt::Debug;

    /// Everything a pass keeps from one time to the next, with no rows in it.
    ///
    /// # Errors
    /// There is no memory.
    fn scratch(&self) -> Result<Scratch<Self>, Self::Error>;

    /// Takes in where the batch's rows stand: `sequences` follow each other without a gap. `trunks` are rows among them
    /// that are kept once more, in the blocks of a branch ([`Trunk`](super::Trunk)).
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

    /// Makes room for `rows` rows of `width`; their contents are unspecified.
    ///
    /// # Errors
    /// There is no memory.
    fn reshape(
        &mut self,
        room: ScratchBuffer<'_, Self>,
        rows: usize,
        width: usize,
    ) -> Result<(), Self::Error>;

    /// `out = norm(residual += update)`, or the residual stream as it is, if the model has no norm there.
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

    /// `residual *= factor`: of token embeddings, where the model has such a factor.
    ///
    /// # Errors
    /// The device fails.
    fn scale_embeddings(&mut self, factor: f32, residual: &mut Self::Residual) -> Result<(), Self::Error>;

    /// `update *= factor`, before it is added, where the model has such a factor.
    ///
    /// # Errors
    /// The device fails.
    fn scale_update(&mut self, factor: f32, update: &mut Self::Outputs) -> Result<(), Self::Error>;

    /// `update = norm(update)`, before it is added, where the model has a norm there.
    ///
    /// # Errors
    /// The device fails.
    fn norm_update(
        &mut self,
        model: &ModelContext,
        site: NormSite,
        update: &mut Self::Outputs,
    ) -> Result<(), Self::Error>;

    /// Norms queries and keys if the model does, and rotates them to their positions; queries take on the scale of
    /// the scores.
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

    /// What the model's gate lets through of rows `[gate | up]`.
    ///
    /// # Errors
    /// The device fails.
    fn gate(
        &mut self,
        model: &ModelContext,
        gate_up: &Self::Outputs,
        out: &mut Self::Inputs,
    ) -> Result<(), Self::Error>;

    /// Sorts the rows of `normed` by the experts of `layer` that they take; those of the layer are asked for one after the other then.
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

    /// `out` = the rows of `from` that `rows` names.
    ///
    /// # Errors
    /// The device fails.
    fn take_some(
        &mut self,
        from: &Self::Inputs,
        rows: &[u32],
        out: &mut Self::Inputs,
    ) -> Result<(), Self::Error>;

    /// `sums = 0`.
    ///
    /// # Errors
    /// The device fails.
    fn clear(&mut self, sums: &mut Self::Residual) -> Result<(), Self::Error>;

    /// Adds what an expert gave, `from`, to the sums of its rows, each times its weight.
    ///
    /// # Errors
    /// The device fails.
    fn add_weighted(
        &mut self,
        from: &Self::Outputs,
        taken: ExpertRows<'_>,
        sums: &mut Self::Residual,
    ) -> Result<(), Self::Error>;

    /// Makes `sums`, which are not needed any more, the update.
    ///
    /// # Errors
    /// The device fails.
    fn give_sums(&mut self, sums: &mut Self::Residual, update: &mut Self::Outputs)
    -> Result<(), Self::Error>;

    /// `logits = cap * tanh(logits / cap)`, where the model has such a cap.
    ///
    /// # Errors
    /// The device fails.
    fn cap_logits(&mut self, cap: f32, logits: &mut Self::Outputs) -> Result<(), Self::Error>;

    /// Keeps the rows that `kept` names in ascending order, `width` wide, and drops the others.
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

    /// Takes the rows from `first` on away, and writes them to `out`, which was empty.
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

/// What there is to be room for.
#[derive(Debug)]
pub enum ScratchBuffer<'a, D: Device + ?Sized> {
    /// The residual stream.
    Residual(&'a mut D::Residual),
    /// Rows that enter linear layers.
    Inputs(&'a mut D::Inputs),
    /// Rows that leave them.
    Outputs(&'a mut D::Outputs),
}

/// What the rows of a batch pass through, kept between passes.
#[derive(Debug)]
pub struct Scratch<D: Device + ?Sized> {
    /// The residual stream.
    pub residual: D::Residual,
    /// Output of `o` and `down`, added to the residual by the next norm.
    pub update: D::Outputs,
    /// The residual, normed.
    pub normed: D::Inputs,
    /// `[q | k | v]`.
    pub qkv: D::Outputs,
    /// What attention found.
    pub attended: D::Inputs,
    /// `[gate | up]`.
    pub gate_up: D::Outputs,
    /// The feed-forward's middle.
    pub gated: D::Inputs,
    /// What experts take and give, in models that have some.
    pub experts: ExpertScratch<D>,
    /// Where the rows stand.
    pub batch: D::Batch,
    /// Hidden states that the last pass was asked for, `[rows, hidden]`; the caller's memory on every device.
    pub states: Vec<f32>,
}

/// What the rows of one expert after the other pass through, kept between passes.
#[derive(Debug)]
pub struct ExpertScratch<D: Device + ?Sized> {
    /// The rows that the expert takes.
    pub inputs: D::Inputs,
    /// `[gate | up]` of them.
    pub gate_up: D::Outputs,
    /// The expert's middle.
    pub gated: D::Inputs,
    /// What it gives.
    pub outputs: D::Outputs,
    /// The sums of what experts gave, in 32 bits: `[rows, hidden]`.
    pub sums: D::Residual,
    /// Which expert takes which rows.
    pub routing: Routing,
}

/// Makes room for `rows` rows in all that a pass keeps, but for experts, of which it is not known how many rows they take.
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

//! Who does what the device does not: base layers, the adapters' deltas, keys and values.

use kernels::attention::QkvLayout;

use super::device::Device;
use crate::shape::layout::LinearGroup;

/// Who evaluates the frozen linear layers.
pub trait BaseLayers<D: Device> {
    /// Why a group could not be evaluated: `Infallible` for weights in this process.
    type Error: From<D::Error>;

    /// `out = x Wᵀ + bias` for all matrices of the group side by side; `out` is `[rows of x, outputs of the group]`.
    ///
    /// # Errors
    /// Whoever evaluates it elsewhere may be gone, or refuse; the pass ends, and may be run again.
    fn linear(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        x: &mut D::Inputs,
        out: &mut D::Outputs,
    ) -> Result<(), Self::Error>;

    /// Writes the embeddings of `tokens` to `out`, `[tokens, hidden]`.
    ///
    /// # Errors
    /// The device fails.
    fn embed(
        &self,
        device: &mut D,
        tokens: &mut dyn Iterator<Item = u32>,
        out: &mut D::Residual,
    ) -> Result<(), Self::Error>;
}

/// Who takes gradients back through the frozen linear layers, too.
pub trait ReverseLayers<D: Device>: BaseLayers<D> {
    /// `out = g W` for all matrices of the group side by side: the gradient at the group's inputs, `[rows of g, inputs]`, from
    /// that at its outputs.
    ///
    /// # Errors
    /// As [`linear`](BaseLayers::linear).
    fn linear_transposed(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        g: &mut D::Inputs,
        out: &mut D::Outputs,
    ) -> Result<(), Self::Error>;
}

/// Who adds the adapters' deltas to the outputs of a group.
pub trait Deltas<D: Device> {
    /// Changes the embeddings of the batch's `tokens`, `[tokens, hidden]`, where an adapter adds to them or has its own.
    ///
    /// # Errors
    /// The device fails.
    fn change_embeddings(
        &mut self,
        device: &mut D,
        tokens: &mut dyn Iterator<Item = u32>,
        residual: &mut D::Residual,
    ) -> Result<(), D::Error>;

    /// Changes the inputs of a group where an adapter scales them (IA3), before anybody else sees them.
    ///
    /// # Errors
    /// The device fails.
    fn scale_inputs(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        x: &mut D::Inputs,
    ) -> Result<(), D::Error>;

    /// Puts an adapter's own keys and values in the place of those computed for its virtual tokens (prefix tuning).
    /// `qkv` are rows `[q | k | v]` as they will be kept: keys are rotated.
    ///
    /// # Errors
    /// The device fails.
    fn place_prefix(
        &mut self,
        device: &mut D,
        layer: usize,
        qkv: &mut D::Outputs,
        layout: QkvLayout,
    ) -> Result<(), D::Error>;

    /// What others can compute while the base layers of the group are evaluated is asked of them; returns at once.
    ///
    /// # Errors
    /// The device fails.
    fn begin(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        x: &D::Inputs,
    ) -> Result<(), D::Error>;

    /// Sees what the experts of a layer give, summed, of which adapters change nothing.
    ///
    /// # Errors
    /// The device fails.
    fn see_experts(&mut self, device: &mut D, layer: usize, update: &D::Outputs) -> Result<(), D::Error> {
        let _ = (device, layer, update);
        Ok(())
    }

    /// `out[row] += delta of the row's adapter`. For [`LinearGroup::Head`], rows are those whose logits are wanted, and those whose
    /// adapter has a head of its own get that one's.
    ///
    /// # Errors
    /// The device fails.
    fn add(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        x: &D::Inputs,
        out: &mut D::Outputs,
    ) -> Result<(), D::Error>;
}

/// Who keeps keys and values.
pub trait KvStore<D: Device> {
    /// Keeps the keys and values of rows `[q | k | v]`.
    ///
    /// # Errors
    /// The device fails.
    fn append(
        &mut self,
        device: &mut D,
        layer: usize,
        qkv: &D::Outputs,
        layout: QkvLayout,
        batch: &D::Batch,
    ) -> Result<(), D::Error>;

    /// Attention of the rows' queries over what is kept; `out` is `[rows, heads * head_dim]`.
    ///
    /// # Errors
    /// The device fails.
    fn attend(
        &self,
        device: &mut D,
        layer: usize,
        qkv: &D::Outputs,
        layout: QkvLayout,
        batch: &D::Batch,
        out: &mut D::Inputs,
    ) -> Result<(), D::Error>;
}

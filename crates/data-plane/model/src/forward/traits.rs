//! Traits of a pass besides the device: base layers, adapter deltas, and the KV cache.

use kernels::attention::QkvLayout;

use super::device::Device;
use crate::shape::layout::LinearGroup;

/// Evaluates the frozen linear layers.
pub trait BaseLayers<D: Device> {
    /// Error of an evaluation: `Infallible` for weights in this process.
    type Error: From<D::Error>;

    /// Computes `out = x Wᵀ + bias` for the matrices of the group side by side, `[rows of x, group outputs]`.
    ///
    /// # Errors
    /// A remote executor may be gone or refuse the call. The pass then ends and may be run again.
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

/// Computes gradients through the frozen linear layers.
pub trait ReverseLayers<D: Device>: BaseLayers<D> {
    /// Computes `out = g W` for all matrices of the group side by side: the gradient at the group's inputs,
    /// `[rows of g, inputs]`, from that at its outputs.
    ///
    /// # Errors
    /// The errors of [`linear`](BaseLayers::linear).
    fn linear_transposed(
        &mut self,
        device: &mut D,
        layer: usize,
        group: LinearGroup,
        g: &mut D::Inputs,
        out: &mut D::Outputs,
    ) -> Result<(), Self::Error>;
}

/// Applies the adapters of a batch to a pass.
pub trait Deltas<D: Device> {
    /// Changes the embeddings of `tokens`, `[tokens, hidden]`, where an adapter adds to or replaces them.
    ///
    /// # Errors
    /// The device fails.
    fn change_embeddings(
        &mut self,
        device: &mut D,
        tokens: &mut dyn Iterator<Item = u32>,
        residual: &mut D::Residual,
    ) -> Result<(), D::Error>;

    /// Scales the inputs of a group for adapters that do so (IA3), before any other use of them.
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

    /// Overwrites the keys and values of virtual tokens by those of the adapter (prefix tuning). `qkv` are
    /// rows `[q | k | v]` as they will be cached, with rotated keys.
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

    /// Requests partial sums in parallel to the group's base layers; returns at once.
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

    /// Adds the deltas of an expert's group to `out`, for the rows numbered `rows` of the batch, ascending.
    /// `x` and `out` have these rows alone. By default no adapter changes experts: a process without these
    /// deltas refuses such adapters when it loads them.
    ///
    /// # Errors
    /// The device fails.
    fn add_to_expert(
        &mut self,
        device: &mut D,
        (layer, group): (usize, LinearGroup),
        rows: &[u32],
        x: &D::Inputs,
        out: &mut D::Outputs,
    ) -> Result<(), D::Error> {
        let _ = (device, layer, group, rows, x, out);
        Ok(())
    }

    /// Receives the summed outputs of a layer's experts.
    ///
    /// # Errors
    /// The device fails.
    fn see_experts(&mut self, device: &mut D, layer: usize, update: &D::Outputs) -> Result<(), D::Error> {
        let _ = (device, layer, update);
        Ok(())
    }

    /// Adds the delta of each row's adapter to `out`. For [`LinearGroup::Head`], rows are those with wanted
    /// logits, and an adapter with its own head replaces the logits.
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

/// Stores keys and values and computes attention over them.
pub trait KvStore<D: Device> {
    /// Subtracts the origin of keys from the keys of rows `[q | k | v]`, if this store has so few bits that
    /// keys need one. Attention is the same up to rounding.
    fn center_keys(&self, layer: usize, qkv: &mut D::Outputs, layout: QkvLayout) {
        let _ = (layer, qkv, layout);
    }

    /// Stores the keys and values of rows `[q | k | v]`.
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

    /// Computes attention of queries over stored keys and values; `out` is `[rows, heads * head_dim]`.
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

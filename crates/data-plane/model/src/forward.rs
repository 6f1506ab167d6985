//! The one forward pass, [`run`], for the resident engine, GPUs and split clients.
//!
//! [`run`] is generic over the place and arithmetic of rows ([`Device`]), the linear layers ([`BaseLayers`]),
//! the adapter deltas ([`Deltas`]) and the KV cache ([`KvStore`]). The resident engine has all four in its
//! process; a split client has all but the linear layers.
//!
//! Rows of all sequences form one batch without padding. Linear layers with a common input form one group: a
//! transformer block costs four calls, one with experts two, and two more for each expert in use.
//!
//! # Layout
//!
//! - `batch`: slices of sequences, their rows, and the rows that give logits.
//! - `model_context`: the facts about a model that the pass needs.
//! - `device`: the trait for rows and the arithmetic on them.
//! - `moe`: the feed-forward of blocks with experts.
//! - `expert_routing`: the experts of each row.
//! - `traits`: linear layers, deltas and KV cache.
//! - `forward_pass`: the whole pass, as an engine runs it.
//! - `failpoints`: places where tests interrupt the pass.

mod batch;
mod device;
mod expert_routing;
mod failpoints;
mod forward_pass;
mod model_context;
mod moe;
mod traits;

pub(crate) use self::{
    batch::BatchRows,
    device::make_room,
    model_context::{AttentionConstants, Router},
};
pub use self::{
    batch::{BLOCK_TOKENS, LogitRows, SequenceSlice, Trunk},
    device::{Device, ExpertScratch, Scratch, ScratchBuffer},
    expert_routing::{ExpertRows, Routing},
    forward_pass::ForwardPass,
    model_context::{ModelContext, NormSite, Norms},
    traits::{BaseLayers, Deltas, KvStore, ReverseLayers},
};
pub use crate::shape::layout::LinearGroup;

use self::{batch::wanted_rows, failpoints::WithFailpoints};

/// Runs `batch` through the model and writes logits of the wanted rows to `logits`, `[rows, vocabulary]`.
/// Wanted hidden states, `[rows, hidden]`, are left in `scratch`.
///
/// # Errors
/// An error of the base layers or of the device. KV entries may be appended already; a retry replaces them.
pub fn run<A, D: Device, B: BaseLayers<D>>(
    model: &ModelContext,
    parts: (&mut B, &mut impl Deltas<D>, &mut impl KvStore<D>),
    device: &mut D,
    scratch: &mut Scratch<D>,
    batch: &[SequenceSlice<'_, A>],
    logits: &mut D::Outputs,
) -> Result<(), B::Error> {
    let (base, deltas, kv) = parts;
    let deltas = &mut WithFailpoints(deltas);
    let mut pass = Pass { model, base, deltas, kv, device, s: scratch };
    let tokens = || batch.iter().flat_map(|slice| slice.tokens.iter().copied());
    lay_out(model, pass.device, pass.s, batch)?;
    embed(model, pass.base, pass.device, &mut tokens(), &mut pass.s.residual)?;
    pass.deltas.change_embeddings(pass.device, &mut tokens(), &mut pass.s.residual)?;
    for layer in 0..model.config.layers {
        pass.attention(layer)?;
        pass.feed_forward(layer)?;
    }
    pass.head(batch, logits)
}

/// Writes the scaled embeddings of `tokens` to `residual`.
pub(crate) fn embed<D: Device, B: BaseLayers<D>>(
    model: &ModelContext,
    base: &B,
    device: &mut D,
    tokens: &mut dyn Iterator<Item = u32>,
    residual: &mut D::Residual,
) -> Result<(), B::Error> {
    base.embed(device, tokens, residual)?;
    if let Some(factor) = model.config.traits.embedding_scale {
        device.scale_embeddings(factor, residual)?;
    }
    Ok(())
}

/// Norms and scales the output of attention or feed-forward before the residual addition, if the model does.
pub(crate) fn finish_update<D: Device>(
    model: &ModelContext,
    device: &mut D,
    site: NormSite,
    update: &mut D::Outputs,
) -> Result<(), D::Error> {
    if model.config.norms_updates() {
        device.norm_update(model, site, update)?;
    }
    match model.config.traits.update_scale {
        Some(factor) => device.scale_update(factor, update),
        None => Ok(()),
    }
}

/// Resizes the scratch buffers for the rows of `batch` and records the rows' positions.
pub(crate) fn lay_out<A, D: Device>(
    model: &ModelContext,
    device: &mut D,
    scratch: &mut Scratch<D>,
    batch: &[SequenceSlice<'_, A>],
) -> Result<(), D::Error> {
    let rows = BatchRows::of(batch);
    make_room(model, device, scratch, rows.count)?;
    device.lay_out(model, &rows.sequences(), &rows.trunks(), &mut scratch.batch)
}

/// Runs block `layer` again for rows that [`lay_out`] has placed, from the residual stream and update in
/// `scratch`. The run ends before the activation function, or after the whole feed-forward in models that
/// norm updates. In a block with experts it ends before the router, so routing is not recorded again.
pub(crate) fn run_block<D: Device, B: BaseLayers<D>>(
    model: &ModelContext,
    parts: (&mut B, &mut impl Deltas<D>, &mut impl KvStore<D>),
    device: &mut D,
    scratch: &mut Scratch<D>,
    layer: usize,
) -> Result<(), B::Error> {
    let (base, deltas, kv) = parts;
    let mut pass = Pass { model, base, deltas, kv, device, s: scratch };
    pass.attention(layer)?;
    match model.config.experts_of(layer) {
        None if model.config.norms_updates() => pass.feed_forward(layer),
        None => pass.gate_up(layer),
        Some(_) => Ok(pass.norm(NormSite::FeedForward(layer))?),
    }
}

/// Computes logits of `rows` rows from the residual stream and the update in `scratch`.
pub(crate) fn run_head<D: Device, B: BaseLayers<D>>(
    model: &ModelContext,
    parts: (&mut B, &mut impl Deltas<D>),
    device: &mut D,
    scratch: &mut Scratch<D>,
    rows: usize,
    logits: &mut D::Outputs,
) -> Result<(), B::Error> {
    let (base, deltas) = parts;
    device.reshape(ScratchBuffer::Outputs(logits), rows, model.config.vocab_size)?;
    let mut pass = Pass { model, base, deltas, kv: &mut (), device, s: scratch };
    pass.norm_kept(rows)?;
    pass.logits(logits)
}

struct Pass<'a, D: Device, B, T, K> {
    model: &'a ModelContext,
    base: &'a mut B,
    deltas: &'a mut T,
    kv: &'a mut K,
    device: &'a mut D,
    s: &'a mut Scratch<D>,
}

impl<D: Device, B: BaseLayers<D>, T: Deltas<D>, K: KvStore<D>> Pass<'_, D, B, T, K> {
    fn attention(&mut self, layer: usize) -> Result<(), B::Error> {
        self.norm(NormSite::Attention(layer))?;
        self.linear(layer, LinearGroup::Qkv)?;
        let (s, device, layout) = (&mut *self.s, &mut *self.device, self.model.qkv_layout());
        device.rotate(self.model, layer, &mut s.qkv, &s.batch)?;
        self.deltas.place_prefix(device, layer, &mut s.qkv, layout)?;
        self.kv.center_keys(layer, &mut s.qkv, layout);
        self.kv.append(device, layer, &s.qkv, layout, &s.batch)?;
        self.kv.attend(device, layer, &s.qkv, layout, &s.batch, &mut s.attended)?;
        self.linear(layer, LinearGroup::O)?;
        Ok(finish_update(self.model, self.device, NormSite::AttentionUpdate(layer), &mut self.s.update)?)
    }

    fn gate_up(&mut self, layer: usize) -> Result<(), B::Error> {
        self.norm(NormSite::FeedForward(layer))?;
        self.linear(layer, LinearGroup::GateUp)
    }

    fn feed_forward(&mut self, layer: usize) -> Result<(), B::Error> {
        match self.model.config.experts_of(layer) {
            None => {
                self.gate_up(layer)?;
                self.device.gate(self.model, &self.s.gate_up, &mut self.s.gated)?;
                self.linear(layer, LinearGroup::Down)?;
            }
            Some(experts) => {
                self.norm(NormSite::FeedForward(layer))?;
                self.mixture(layer, experts)?;
            }
        }
        Ok(finish_update(self.model, self.device, NormSite::FeedForwardUpdate(layer), &mut self.s.update)?)
    }

    /// Computes a group's base outputs and adds the deltas; workers compute partial sums at the same time.
    fn linear(&mut self, layer: usize, group: LinearGroup) -> Result<(), B::Error> {
        let s = &mut *self.s;
        let (x, out) = match group {
            LinearGroup::Qkv => (&mut s.normed, &mut s.qkv),
            LinearGroup::O => (&mut s.attended, &mut s.update),
            LinearGroup::GateUp => (&mut s.normed, &mut s.gate_up),
            LinearGroup::Down => (&mut s.gated, &mut s.update),
            LinearGroup::ExpertGateUp(_) | LinearGroup::ExpertDown(_) | LinearGroup::Head => {
                unreachable!("experts have rooms of their own, and the head's outputs are the caller's")
            }
        };
        self.deltas.scale_inputs(self.device, layer, group, x)?;
        self.deltas.begin(self.device, layer, group, x)?;
        self.base.linear(self.device, layer, group, x, out)?;
        Ok(self.deltas.add(self.device, layer, group, x, out)?)
    }

    fn head<A>(&mut self, batch: &[SequenceSlice<'_, A>], logits: &mut D::Outputs) -> Result<(), B::Error> {
        let config = &self.model.config;
        let (kept, scored) = wanted_rows(batch);
        self.device.reshape(ScratchBuffer::Outputs(logits), scored, config.vocab_size)?;
        self.s.states.clear();
        if kept.is_empty() {
            return Ok(());
        }
        self.device.keep(&mut self.s.residual, &mut self.s.update, config.hidden_size, &kept)?;
        self.norm_kept(kept.len())?;
        if scored < kept.len() {
            self.device.take_rows(&mut self.s.normed, scored, &mut self.s.states)?;
            let divisor = config.traits.logit_divisor.unwrap_or(1.0);
            self.s.states.iter_mut().for_each(|value| *value *= divisor);
        }
        if scored > 0 { self.logits(logits) } else { Ok(()) }
    }
}

impl<D: Device, B: BaseLayers<D>, T: Deltas<D>, K> Pass<'_, D, B, T, K> {
    /// Computes `normed = norm(residual += update)`, without the norm in models that have none at `site`.
    /// Before the first layer there is no update yet.
    fn norm(&mut self, site: NormSite) -> Result<(), D::Error> {
        let s = &mut *self.s;
        let update = (site != NormSite::Attention(0)).then_some(&s.update);
        self.device.add_norm(self.model, site, &mut s.residual, update, &mut s.normed)
    }

    fn norm_kept(&mut self, rows: usize) -> Result<(), D::Error> {
        self.device.reshape(
            ScratchBuffer::Inputs(&mut self.s.normed),
            rows,
            self.model.config.hidden_size,
        )?;
        self.norm(NormSite::Output)
    }

    fn logits(&mut self, logits: &mut D::Outputs) -> Result<(), B::Error> {
        let (x, device) = (&mut self.s.normed, &mut *self.device);
        self.deltas.scale_inputs(device, 0, LinearGroup::Head, x)?;
        self.deltas.begin(device, 0, LinearGroup::Head, x)?;
        self.base.linear(device, 0, LinearGroup::Head, x, logits)?;
        self.deltas.add(device, 0, LinearGroup::Head, x, logits)?;
        match self.model.config.traits.logit_cap {
            Some(cap) => Ok(device.cap_logits(cap, logits)?),
            None => Ok(()),
        }
    }
}

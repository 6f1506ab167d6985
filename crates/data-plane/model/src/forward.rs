//! The one forward pass.
//!
//! Everything that runs a model runs [`run`]. It is generic over where the rows lie and who computes with them
//! ([`Device`]), who evaluates the linear layers ([`BaseLayers`]), who adds the adapters' deltas ([`Deltas`]) and who
//! keeps keys and values ([`KvStore`]): the resident engine has all of them in its process, a split client all but the
//! linear layers.
//!
//! Rows of all sequences are flattened into one batch: no padding anywhere. Linear layers that share an input form one
//! group, so a transformer block costs four calls; with experts two, and two more for each expert that any row takes.
//!
//! # Layout
//!
//! - `batch`: slices of sequences, their rows, and which of these give logits.
//! - `model_context`: what the pass knows of a model. `device`: where rows lie and who computes with them.
//! - `moe`: the feed-forward of blocks with experts. `expert_routing`: which rows these take.
//! - `traits`: who does the rest. `forward_pass`: the whole pass, as an engine runs it.
//! - `failpoints`: where tests interrupt it.

mod batch;
mod device;
mod expert_routing;
mod failpoints;
mod forward_pass;
mod model_context;
mod moe;
mod traits;

pub(crate) use self::{batch::BatchRows, device::make_room};
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

/// Runs `batch` through the model and writes the wanted rows of logits to `logits`, `[rows, vocabulary]`; those of hidden
/// states, `[rows, hidden]`, are in `scratch`.
///
/// # Errors
/// The base layers' own, or the device's. Keys and values of the batch may be appended by then; running it again
/// replaces them.
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

/// Writes the embeddings of `tokens` to `residual`, as the first block takes them.
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

/// Makes what attention or the feed-forward gave what is added to the residual stream: normed and scaled, in models that do so.
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

/// Makes room for the rows of `batch`, and takes in where they stand.
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

/// Runs a block of rows that were [laid out](lay_out) once more, from the residual stream and the update of `scratch`: as far
/// as the middle of its feed-forward, unless what comes of that is normed. Of experts nothing is noted, and none is asked.
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

/// Logits of `rows` rows, from the residual stream and the update of `scratch`.
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

    /// A group's base outputs, then its deltas; whoever helps with these computes at the same time.
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

    /// Logits, and hidden states, of the wanted rows.
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
    /// `normed = norm(residual += update)`, or the same where nothing is normed; before the first layer there is no update yet.
    fn norm(&mut self, site: NormSite) -> Result<(), D::Error> {
        let s = &mut *self.s;
        let update = (site != NormSite::Attention(0)).then_some(&s.update);
        self.device.add_norm(self.model, site, &mut s.residual, update, &mut s.normed)
    }

    /// The last norm, of all `rows` rows that there are.
    fn norm_kept(&mut self, rows: usize) -> Result<(), D::Error> {
        self.device.reshape(
            ScratchBuffer::Inputs(&mut self.s.normed),
            rows,
            self.model.config.hidden_size,
        )?;
        self.norm(NormSite::Output)
    }

    /// Logits of all rows that were normed.
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

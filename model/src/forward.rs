//! The one forward pass.
//!
//! Everything that runs a model runs [`run`]. It is generic over where the rows lie and who computes with them
//! ([`Device`]), who evaluates the linear layers ([`BaseLayers`]), who adds the adapters' deltas ([`Deltas`]) and who
//! keeps keys and values ([`KvStore`]): the resident engine has all of them in its process, a split client all but the
//! linear layers.
//!
//! Rows of all sequences are flattened into one batch: no padding anywhere. Linear layers that share an input form one
//! group, so a transformer block costs four calls.

use std::{fmt, ops::Range, sync::Arc};

use kernels::attention::{KvRows, QkvLayout};

use crate::{
    config::ModelConfig,
    rope::RopeTable,
    sampling::{Draw, Drawn},
    sites::{Alone, Company},
};

pub use crate::cpu::Compute;

/// Tokens a KV block holds.
pub const BLOCK_TOKENS: usize = kernels::attention::BLOCK_TOKENS;

/// Index of a KV block in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// For which of a slice's tokens logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LogitRows {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last token's.
    Last,
    /// Every token's (prompt log-probabilities).
    All,
    /// The last token's, but only to draw the next token from them: where the pass [draws](ForwardPass::draws), they do
    /// not leave the device, and are not among the logits.
    Draw(Draw),
}

/// Consecutive tokens of one sequence that go through the model in one pass.
#[derive(Debug)]
pub struct SequenceSlice<'a, A> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them; the positions before it are in the KV blocks already.
    pub start: usize,
    /// The sequence's KV blocks in order; they must hold `start + tokens.len()` tokens.
    pub blocks: &'a [BlockId],
    /// The adapter, or `None` for the base model.
    pub adapter: Option<&'a Arc<A>>,
    /// Which logits to compute.
    pub logits: LogitRows,
}

impl<A> SequenceSlice<'_, A> {
    /// Indices, within the slice, of the rows whose logits are wanted.
    fn wanted(&self) -> Range<usize> {
        let rows = self.tokens.len();
        match self.logits {
            LogitRows::None => rows..rows,
            LogitRows::Last | LogitRows::Draw(_) => rows - 1..rows,
            LogitRows::All => 0..rows,
        }
    }
}

/// Whoever can run slices of sequences through a model. The engine is generic over it, so that its scheduling
/// is tested without weights.
pub trait ForwardPass {
    /// An adapter prepared for this pass.
    type Adapter;

    /// Why a pass is not finished; the keys and values of its rows are undefined then. `Infallible` on the CPU.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// True if it draws tokens itself where [`LogitRows::Draw`] asks for it; else that means [`LogitRows::Last`].
    fn draws(&self) -> bool {
        false
    }

    /// What was drawn in the last pass, one for each slice that asked for it; `None` where no logit was a number.
    fn drawn(&self) -> &[Option<Drawn>] {
        &[]
    }

    /// True once nothing can be computed in this process any more: its device is lost.
    fn is_lost(&self) -> bool {
        false
    }

    /// Runs `batch` and writes the wanted rows of logits to `logits`, slice after slice, row after row
    /// (`logits` is resized to rows x vocab_size). Appends keys and values to the sequences' blocks.
    ///
    /// # Errors
    /// The device fails.
    fn forward(
        &mut self,
        batch: &[SequenceSlice<'_, Self::Adapter>],
        logits: &mut Vec<f32>,
    ) -> Result<(), Self::Error> {
        self.forward_in_company(batch, logits, &mut Alone)
    }

    /// As [`forward`](Self::forward), and others' calls join the pass at the layers they wait for.
    ///
    /// # Errors
    /// The device fails.
    fn forward_in_company(
        &mut self,
        batch: &[SequenceSlice<'_, Self::Adapter>],
        logits: &mut Vec<f32>,
        company: &mut dyn Company,
    ) -> Result<(), Self::Error>;
}

/// Linear layers that share an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinearGroup {
    /// `[q | k | v]` of the normed residual.
    Qkv,
    /// Attention output.
    O,
    /// `[gate | up]` of the normed residual.
    GateUp,
    /// Feed-forward output.
    Down,
    /// Logits; has no layer, its layer index is 0.
    Head,
}

/// Which norm of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormSite {
    /// Before a layer's attention.
    Attention(usize),
    /// Before a layer's feed-forward.
    FeedForward(usize),
    /// Before the head.
    Output,
}

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

    /// Takes in where the batch's rows stand: `sequences` follow each other without a gap.
    ///
    /// # Errors
    /// The device fails.
    fn lay_out(
        &mut self,
        model: &Skeleton,
        sequences: &[KvRows<'_>],
        batch: &mut Self::Batch,
    ) -> Result<(), Self::Error>;

    /// Makes room for `rows` rows of `width`; their contents are unspecified.
    ///
    /// # Errors
    /// There is no memory.
    fn reshape(&mut self, room: Room<'_, Self>, rows: usize, width: usize) -> Result<(), Self::Error>;

    /// `out = norm(residual += update)`.
    ///
    /// # Errors
    /// The device fails.
    fn add_norm(
        &mut self,
        model: &Skeleton,
        site: NormSite,
        residual: &mut Self::Residual,
        update: Option<&Self::Outputs>,
        out: &mut Self::Inputs,
    ) -> Result<(), Self::Error>;

    /// Norms query and key heads if the model does, and rotates them to their positions; queries take on the scale of
    /// the scores.
    ///
    /// # Errors
    /// The device fails.
    fn rotate(
        &mut self,
        model: &Skeleton,
        layer: usize,
        qkv: &mut Self::Outputs,
        batch: &Self::Batch,
    ) -> Result<(), Self::Error>;

    /// `out = silu(gate) * up` of rows `[gate | up]`, each `width` wide.
    ///
    /// # Errors
    /// The device fails.
    fn gate(
        &mut self,
        gate_up: &Self::Outputs,
        width: usize,
        out: &mut Self::Inputs,
    ) -> Result<(), Self::Error>;

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
}

/// What there is to be room for.
#[derive(Debug)]
pub enum Room<'a, D: Device + ?Sized> {
    /// The residual stream.
    Residual(&'a mut D::Residual),
    /// Rows that enter linear layers.
    Inputs(&'a mut D::Inputs),
    /// Rows that leave them.
    Outputs(&'a mut D::Outputs),
}

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

/// Who adds the adapters' deltas to the outputs of a group.
pub trait Deltas<D: Device> {
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

    /// `out[row] += delta of the row's adapter`. For [`LinearGroup::Head`], rows are those whose logits are wanted.
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

/// The small tensors of a model, which whoever runs the pass holds itself.
#[derive(Debug)]
pub struct Norms {
    /// `[hidden]` of each layer, before attention.
    pub attention: Vec<Vec<f32>>,
    /// `[hidden]` of each layer, before the feed-forward.
    pub feed_forward: Vec<Vec<f32>>,
    /// `[head_dim]` of each layer; empty without qk-norm.
    pub query: Vec<Vec<f32>>,
    /// `[head_dim]` of each layer; empty without qk-norm.
    pub key: Vec<Vec<f32>>,
    /// `[hidden]`, before the head.
    pub output: Vec<f32>,
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
    /// Where the rows stand.
    pub batch: D::Batch,
}

/// A model without its large weights: what [`run`] needs to know.
#[derive(Debug)]
pub struct Skeleton {
    /// The model's shape.
    pub config: ModelConfig,
    /// Its norms.
    pub norms: Norms,
    /// Its rotary frequencies.
    pub rope: RopeTable,
}

impl Skeleton {
    /// Where queries, keys and values lie in a row.
    #[must_use]
    pub fn qkv_layout(&self) -> QkvLayout {
        let ModelConfig { heads, kv_heads, head_dim, .. } = self.config;
        QkvLayout { heads, kv_heads, head_dim }
    }

    /// What scores are multiplied with; queries carry it.
    #[must_use]
    pub fn score_scale(&self) -> f32 {
        1.0 / (self.config.head_dim as f32).sqrt()
    }

    /// The weights of a norm.
    #[must_use]
    pub fn norm(&self, site: NormSite) -> &[f32] {
        match site {
            NormSite::Attention(layer) => &self.norms.attention[layer],
            NormSite::FeedForward(layer) => &self.norms.feed_forward[layer],
            NormSite::Output => &self.norms.output,
        }
    }
}

/// Runs `batch` through the model and writes the wanted rows of logits to `logits`, `[rows, vocabulary]`.
///
/// # Errors
/// The base layers' own, or the device's. Keys and values of the batch may be appended by then; running it again
/// replaces them.
pub fn run<A, D: Device, B: BaseLayers<D>>(
    model: &Skeleton,
    parts: (&mut B, &mut impl Deltas<D>, &mut impl KvStore<D>),
    device: &mut D,
    scratch: &mut Scratch<D>,
    batch: &[SequenceSlice<'_, A>],
    logits: &mut D::Outputs,
) -> Result<(), B::Error> {
    let (base, deltas, kv) = parts;
    let mut pass = Pass { model, base, deltas, kv, device, s: scratch };
    pass.start(batch)?;
    for layer in 0..model.config.layers {
        pass.attention(layer)?;
        pass.feed_forward(layer)?;
    }
    pass.head(batch, logits)
}

struct Pass<'a, D: Device, B, T, K> {
    model: &'a Skeleton,
    base: &'a mut B,
    deltas: &'a mut T,
    kv: &'a mut K,
    device: &'a mut D,
    s: &'a mut Scratch<D>,
}

impl<D: Device, B: BaseLayers<D>, T: Deltas<D>, K: KvStore<D>> Pass<'_, D, B, T, K> {
    /// Lays out the rows and embeds their tokens.
    fn start<A>(&mut self, batch: &[SequenceSlice<'_, A>]) -> Result<(), B::Error> {
        let rows = BatchRows::of(batch);
        make_room(self.model, self.device, self.s, rows.count)?;
        self.device.lay_out(self.model, &rows.sequences(), &mut self.s.batch)?;
        let mut tokens = batch.iter().flat_map(|slice| slice.tokens.iter().copied());
        self.base.embed(self.device, &mut tokens, &mut self.s.residual)
    }

    /// `normed = norm(residual += update)`; before the first layer there is no update yet.
    fn norm(&mut self, site: NormSite) -> Result<(), D::Error> {
        let s = &mut *self.s;
        let update = (site != NormSite::Attention(0)).then_some(&s.update);
        self.device.add_norm(self.model, site, &mut s.residual, update, &mut s.normed)
    }

    fn attention(&mut self, layer: usize) -> Result<(), B::Error> {
        self.norm(NormSite::Attention(layer))?;
        self.linear(layer, LinearGroup::Qkv)?;
        let (s, device, layout) = (&mut *self.s, &mut *self.device, self.model.qkv_layout());
        device.rotate(self.model, layer, &mut s.qkv, &s.batch)?;
        self.deltas.place_prefix(device, layer, &mut s.qkv, layout)?;
        self.kv.append(device, layer, &s.qkv, layout, &s.batch)?;
        self.kv.attend(device, layer, &s.qkv, layout, &s.batch, &mut s.attended)?;
        failpoint::pass("forward.after_attention");
        self.linear(layer, LinearGroup::O)
    }

    fn feed_forward(&mut self, layer: usize) -> Result<(), B::Error> {
        self.norm(NormSite::FeedForward(layer))?;
        self.linear(layer, LinearGroup::GateUp)?;
        let width = self.model.config.intermediate_size;
        self.device.gate(&self.s.gate_up, width, &mut self.s.gated)?;
        self.linear(layer, LinearGroup::Down)
    }

    /// A group's base outputs, then its deltas; whoever helps with these computes at the same time.
    fn linear(&mut self, layer: usize, group: LinearGroup) -> Result<(), B::Error> {
        let s = &mut *self.s;
        let (x, out) = match group {
            LinearGroup::Qkv => (&mut s.normed, &mut s.qkv),
            LinearGroup::O => (&mut s.attended, &mut s.update),
            LinearGroup::GateUp => (&mut s.normed, &mut s.gate_up),
            LinearGroup::Down => (&mut s.gated, &mut s.update),
            LinearGroup::Head => unreachable!("the head's outputs are the caller's"),
        };
        self.deltas.scale_inputs(self.device, layer, group, x)?;
        self.deltas.begin(self.device, layer, group, x)?;
        self.base.linear(self.device, layer, group, x, out)?;
        self.deltas.add(self.device, layer, group, x, out)?;
        failpoint::pass(match group {
            LinearGroup::Qkv => "forward.after_qkv",
            LinearGroup::O => "forward.after_o",
            LinearGroup::GateUp => "forward.after_gate_up",
            LinearGroup::Down => "forward.after_down",
            LinearGroup::Head => unreachable!("the head's outputs are the caller's"),
        });
        Ok(())
    }

    /// Logits of the wanted rows.
    fn head<A>(&mut self, batch: &[SequenceSlice<'_, A>], logits: &mut D::Outputs) -> Result<(), B::Error> {
        let config = &self.model.config;
        let kept = wanted_rows(batch);
        self.device.reshape(Room::Outputs(logits), kept.len(), config.vocab_size)?;
        if kept.is_empty() {
            return Ok(());
        }
        let (s, device) = (&mut *self.s, &mut *self.device);
        device.keep(&mut s.residual, &mut s.update, config.hidden_size, &kept)?;
        device.reshape(Room::Inputs(&mut s.normed), kept.len(), config.hidden_size)?;
        self.norm(NormSite::Output)?;
        let (x, device) = (&mut self.s.normed, &mut *self.device);
        self.deltas.scale_inputs(device, 0, LinearGroup::Head, x)?;
        self.deltas.begin(device, 0, LinearGroup::Head, x)?;
        self.base.linear(device, 0, LinearGroup::Head, x, logits)?;
        self.deltas.add(device, 0, LinearGroup::Head, x, logits)?;
        failpoint::pass("forward.head");
        Ok(())
    }
}

/// Makes room for `rows` rows in all that a pass keeps.
pub(crate) fn make_room<D: Device>(
    model: &Skeleton,
    device: &mut D,
    s: &mut Scratch<D>,
    rows: usize,
) -> Result<(), D::Error> {
    let config = &model.config;
    let (hidden, width) = (config.hidden_size, config.intermediate_size);
    device.reshape(Room::Residual(&mut s.residual), rows, hidden)?;
    device.reshape(Room::Outputs(&mut s.update), rows, hidden)?;
    device.reshape(Room::Inputs(&mut s.normed), rows, hidden)?;
    device.reshape(Room::Outputs(&mut s.qkv), rows, model.qkv_layout().stride())?;
    device.reshape(Room::Inputs(&mut s.attended), rows, config.heads * config.head_dim)?;
    device.reshape(Room::Outputs(&mut s.gate_up), rows, 2 * width)?;
    device.reshape(Room::Inputs(&mut s.gated), rows, width)
}

/// Which rows of a batch are which sequence's.
#[derive(Debug)]
pub(crate) struct BatchRows {
    /// Rows of the batch.
    pub(crate) count: usize,
    /// First row, rows and position of each sequence, and where its blocks begin and end.
    sequences: Vec<(usize, usize, usize, Range<usize>)>,
    blocks: Vec<u32>,
}

impl BatchRows {
    /// The rows of `batch`, sequence after sequence.
    pub(crate) fn of<A>(batch: &[SequenceSlice<'_, A>]) -> Self {
        let mut all = Self { count: 0, sequences: Vec::with_capacity(batch.len()), blocks: Vec::new() };
        for slice in batch {
            let (rows, first) = (slice.tokens.len(), all.blocks.len());
            all.blocks.extend(slice.blocks.iter().map(|block| block.0));
            all.sequences.push((all.count, rows, slice.start, first..all.blocks.len()));
            all.count += rows;
        }
        all
    }

    /// The sequences, as kernels take them.
    pub(crate) fn sequences(&self) -> Vec<KvRows<'_>> {
        let sequence = |(first_row, rows, position, blocks): &(usize, usize, usize, Range<usize>)| KvRows {
            first_row: *first_row,
            rows: *rows,
            position: *position,
            blocks: &self.blocks[blocks.clone()],
        };
        self.sequences.iter().map(sequence).collect()
    }
}

/// The batch's rows whose logits are wanted, ascending.
fn wanted_rows<A>(batch: &[SequenceSlice<'_, A>]) -> Vec<u32> {
    let mut first = 0;
    let mut kept = Vec::new();
    for slice in batch {
        let rows = slice.wanted();
        kept.extend(rows.map(|row| u32::try_from(first + row).expect("a batch has far fewer rows")));
        first += slice.tokens.len();
    }
    kept
}

//! The one forward pass.
//!
//! Everything that runs a model runs [`run`]. It is generic over who evaluates the linear layers ([`BaseLayers`]), who
//! adds the adapters' deltas ([`Deltas`]) and who keeps keys and values ([`KvStore`]): the resident engine has all three
//! in its process, a split client only the last two.
//!
//! Rows of all sequences are flattened into one batch: no padding anywhere. Linear layers that share an input form one
//! group, so a transformer block costs four calls.

use std::sync::Arc;

use kernels::{
    Activations, Isa, Pool,
    attention::{KvRows, QkvLayout},
    elementwise::{Heads, Norm, add_norm, rotate, silu_mul},
};

use crate::{
    config::ModelConfig,
    rope::{Angles, RopeTable},
    sites::{Alone, Company},
};

/// Tokens a KV block holds.
pub const BLOCK_TOKENS: usize = kernels::attention::BLOCK_TOKENS;

/// Index of a KV block in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// For which of a slice's tokens logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last token's.
    Last,
    /// Every token's (prompt log-probabilities).
    All,
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
    fn wanted(&self) -> std::ops::Range<usize> {
        let rows = self.tokens.len();
        match self.logits {
            LogitRows::None => rows..rows,
            LogitRows::Last => rows - 1..rows,
            LogitRows::All => 0..rows,
        }
    }
}

/// Whoever can run slices of sequences through a model. The engine is generic over it, so that its scheduling
/// is tested without weights.
pub trait ForwardPass {
    /// An adapter prepared for this pass.
    type Adapter;

    /// Length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Runs `batch` and writes the wanted rows of logits to `logits`, slice after slice, row after row
    /// (`logits` is resized to rows x vocab_size). Appends keys and values to the sequences' blocks.
    fn forward(&mut self, batch: &[SequenceSlice<'_, Self::Adapter>], logits: &mut Vec<f32>) {
        self.forward_in_company(batch, logits, &mut Alone);
    }

    /// As [`forward`](Self::forward), and others' calls join the pass at the layers they wait for.
    fn forward_in_company(
        &mut self,
        batch: &[SequenceSlice<'_, Self::Adapter>],
        logits: &mut Vec<f32>,
        company: &mut dyn Company,
    );
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

/// The threads and instructions a pass computes with.
#[derive(Debug)]
pub struct Compute {
    /// Threads.
    pub pool: Pool,
    /// Instructions.
    pub isa: Isa,
}

/// Who evaluates the frozen linear layers.
pub trait BaseLayers {
    /// Why a group could not be evaluated: `Infallible` for weights in this process.
    type Error;

    /// `out = x Wᵀ + bias` for all matrices of the group side by side; `out` is `[x.rows(), outputs of the group]`.
    ///
    /// # Errors
    /// Whoever evaluates it elsewhere may be gone, or refuse; the pass ends, and may be run again.
    fn linear(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), Self::Error>;

    /// Writes the embeddings of `tokens` to `out`, `[tokens, hidden]`.
    fn embed(&self, tokens: &mut dyn Iterator<Item = u32>, out: &mut [f32]);
}

/// Who adds the adapters' deltas to the outputs of a group.
pub trait Deltas {
    /// Changes the inputs of a group where an adapter scales them (IA3), before anybody else sees them.
    fn scale_inputs(&mut self, layer: usize, group: LinearGroup, x: &mut Activations) {
        let _ = (layer, group, x);
    }

    /// Puts an adapter's own keys and values in the place of those computed for its virtual tokens (prefix tuning).
    /// `qkv` are rows `[q | k | v]` as they will be kept: keys are rotated.
    fn place_prefix(&mut self, layer: usize, qkv: &mut [f32], layout: QkvLayout) {
        let _ = (layer, qkv, layout);
    }

    /// What others can compute while the base layers of the group are evaluated is asked of them; returns at once.
    fn begin(&mut self, layer: usize, group: LinearGroup, x: &Activations) {
        let _ = (layer, group, x);
    }

    /// `out[row] += delta of the row's adapter`. For [`LinearGroup::Head`], rows are those whose logits are wanted.
    fn add(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        group: LinearGroup,
        x: &Activations,
        out: &mut [f32],
    );
}

/// Who keeps keys and values.
pub trait KvStore {
    /// Keeps the keys and values of rows `[q | k | v]`.
    fn append(
        &mut self,
        compute: &mut Compute,
        layer: usize,
        qkv: &[f32],
        layout: QkvLayout,
        rows: &[KvRows<'_>],
    );

    /// Attention of the rows' queries over what is kept; `out` is `[rows, heads * head_dim]`.
    fn attend(
        &self,
        compute: &mut Compute,
        layer: usize,
        qkv: &[f32],
        layout: QkvLayout,
        rows: &[KvRows<'_>],
        out: &mut [f32],
    );
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
#[derive(Debug, Default)]
pub struct Scratch {
    residual: Vec<f32>,
    /// Output of `o` and `down`, added to the residual by the next norm.
    update: Vec<f32>,
    normed: Activations,
    qkv: Vec<f32>,
    attended: Activations,
    gate_up: Vec<f32>,
    gated: Activations,
    angles: Angles,
    rows: Vec<RowSpan>,
    block_ids: Vec<u32>,
}

/// A slice's rows in the batch and its blocks in [`Scratch::block_ids`].
#[derive(Debug, Clone, Copy)]
struct RowSpan {
    first_row: usize,
    rows: usize,
    position: usize,
    first_block: usize,
    blocks: usize,
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

    fn norm<'a>(&self, weight: &'a [f32]) -> Norm<'a> {
        Norm { weight, eps: self.config.norm_eps }
    }
}

/// Runs `batch` through the model and writes the wanted rows of logits to `logits`.
///
/// # Errors
/// The base layers' own. Keys and values of the batch may be appended by then; running it again replaces them.
pub fn run<A, B: BaseLayers>(
    model: &Skeleton,
    parts: (&mut B, &mut impl Deltas, &mut impl KvStore),
    compute: &mut Compute,
    scratch: &mut Scratch,
    batch: &[SequenceSlice<'_, A>],
    logits: &mut Vec<f32>,
) -> Result<(), B::Error> {
    let (base, deltas, kv) = parts;
    let mut pass = Pass { model, base, deltas, kv, compute, s: scratch };
    pass.start(batch);
    for layer in 0..model.config.layers {
        pass.attention(layer)?;
        pass.feed_forward(layer)?;
    }
    pass.head(batch, logits)
}

struct Pass<'a, B, D, K> {
    model: &'a Skeleton,
    base: &'a mut B,
    deltas: &'a mut D,
    kv: &'a mut K,
    compute: &'a mut Compute,
    s: &'a mut Scratch,
}

impl<B: BaseLayers, D: Deltas, K: KvStore> Pass<'_, B, D, K> {
    /// Lays out the rows and embeds their tokens.
    fn start<A>(&mut self, batch: &[SequenceSlice<'_, A>]) {
        let (s, config) = (&mut *self.s, &self.model.config);
        s.rows.clear();
        s.block_ids.clear();
        s.angles.clear();
        let mut rows = 0;
        for slice in batch {
            let (first_row, count, first_block) = (rows, slice.tokens.len(), s.block_ids.len());
            s.block_ids.extend(slice.blocks.iter().map(|block| block.0));
            let span = RowSpan {
                first_row,
                rows: count,
                position: slice.start,
                first_block,
                blocks: slice.blocks.len(),
            };
            s.rows.push(span);
            s.angles.extend(&self.model.rope, slice.start..slice.start + count);
            rows += count;
        }
        s.residual.resize(rows * config.hidden_size, 0.0);
        s.update.resize(rows * config.hidden_size, 0.0);
        s.normed.reshape(rows, config.hidden_size);
        s.qkv.resize(rows * self.model.qkv_layout().stride(), 0.0);
        s.attended.reshape(rows, config.heads * config.head_dim);
        s.gate_up.resize(rows * 2 * config.intermediate_size, 0.0);
        s.gated.reshape(rows, config.intermediate_size);
        self.base.embed(&mut batch.iter().flat_map(|slice| slice.tokens.iter().copied()), &mut s.residual);
    }

    /// `normed = norm(residual += update)`; before the first layer there is no update yet.
    fn norm(&mut self, weight: &[f32], first: IsFirst) {
        let (s, compute) = (&mut *self.s, &mut *self.compute);
        let update = (first == IsFirst::No).then_some(&s.update[..]);
        let norm = self.model.norm(weight);
        add_norm(&mut compute.pool, compute.isa, &mut s.residual, update, norm, s.normed.values_mut());
    }

    fn attention(&mut self, layer: usize) -> Result<(), B::Error> {
        let first = if layer == 0 { IsFirst::Yes } else { IsFirst::No };
        self.norm(&self.model.norms.attention[layer], first);
        self.linear(layer, LinearGroup::Qkv)?;
        self.rotate(layer);
        let layout = self.model.qkv_layout();
        let (s, compute) = (&mut *self.s, &mut *self.compute);
        self.deltas.place_prefix(layer, &mut s.qkv, layout);
        let rows: Vec<KvRows<'_>> = s.rows.iter().map(|span| span.kv_rows(&s.block_ids)).collect();
        self.kv.append(compute, layer, &s.qkv, layout, &rows);
        self.kv.attend(compute, layer, &s.qkv, layout, &rows, s.attended.values_mut());
        failpoint::pass("forward.after_attention");
        self.linear(layer, LinearGroup::O)
    }

    fn feed_forward(&mut self, layer: usize) -> Result<(), B::Error> {
        self.norm(&self.model.norms.feed_forward[layer], IsFirst::No);
        self.linear(layer, LinearGroup::GateUp)?;
        let (s, compute) = (&mut *self.s, &mut *self.compute);
        let width = self.model.config.intermediate_size;
        silu_mul(&mut compute.pool, compute.isa, &s.gate_up, width, s.gated.values_mut());
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
        self.deltas.scale_inputs(layer, group, x);
        self.deltas.begin(layer, group, x);
        self.base.linear(self.compute, layer, group, x, out)?;
        self.deltas.add(self.compute, layer, group, x, out);
        failpoint::pass(match group {
            LinearGroup::Qkv => "forward.after_qkv",
            LinearGroup::O => "forward.after_o",
            LinearGroup::GateUp => "forward.after_gate_up",
            LinearGroup::Down => "forward.after_down",
            LinearGroup::Head => unreachable!("the head's outputs are the caller's"),
        });
        Ok(())
    }

    fn rotate(&mut self, layer: usize) {
        let (s, compute, layout) = (&mut *self.s, &mut *self.compute, self.model.qkv_layout());
        let norms = &self.model.norms;
        let queries = Heads {
            column: 0,
            count: layout.heads,
            norm: norms.query.get(layer).map(|weight| self.model.norm(weight)),
            // Queries carry the scale of the scores.
            scale: 1.0 / (layout.head_dim as f32).sqrt(),
        };
        let keys = Heads {
            column: layout.heads * layout.head_dim,
            count: layout.kv_heads,
            norm: norms.key.get(layer).map(|weight| self.model.norm(weight)),
            scale: 1.0,
        };
        let (cos, sin) = s.angles.tables();
        let (pool, isa) = (&mut compute.pool, compute.isa);
        rotate(pool, isa, &mut s.qkv, layout.stride(), layout.head_dim, cos, sin, &[queries, keys]);
    }

    /// Logits of the wanted rows.
    fn head<A>(&mut self, batch: &[SequenceSlice<'_, A>], logits: &mut Vec<f32>) -> Result<(), B::Error> {
        let hidden = self.model.config.hidden_size;
        let s = &mut *self.s;
        let mut kept = 0;
        for (span, slice) in s.rows.iter().zip(batch) {
            for row in slice.wanted() {
                let from = (span.first_row + row) * hidden;
                // Rows only move towards the front, so none is overwritten before it was read.
                s.residual.copy_within(from..from + hidden, kept * hidden);
                s.update.copy_within(from..from + hidden, kept * hidden);
                kept += 1;
            }
        }
        logits.resize(kept * self.model.config.vocab_size, 0.0);
        if kept == 0 {
            return Ok(());
        }
        s.residual.truncate(kept * hidden);
        s.update.truncate(kept * hidden);
        s.normed.reshape(kept, hidden);
        self.norm(&self.model.norms.output, IsFirst::No);
        self.deltas.scale_inputs(0, LinearGroup::Head, &mut self.s.normed);
        self.deltas.begin(0, LinearGroup::Head, &self.s.normed);
        self.base.linear(self.compute, 0, LinearGroup::Head, &mut self.s.normed, logits)?;
        self.deltas.add(self.compute, 0, LinearGroup::Head, &self.s.normed, logits);
        failpoint::pass("forward.head");
        Ok(())
    }
}

/// Whether a norm is the pass's first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IsFirst {
    Yes,
    No,
}

impl RowSpan {
    fn kv_rows<'a>(&self, block_ids: &'a [u32]) -> KvRows<'a> {
        KvRows {
            first_row: self.first_row,
            rows: self.rows,
            position: self.position,
            blocks: &block_ids[self.first_block..self.first_block + self.blocks],
        }
    }
}

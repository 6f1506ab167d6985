//! Forward and reverse passes over batches of training sequences.
//!
//! - `rows`: lays out training sequences as rows of a pass.

mod rows;

use std::{cell::RefCell, io, sync::Arc};

use kernels::{
    Isa, ThreadPool,
    attention::KvShape,
    backward::attention::SequenceRows,
    lora::{LayoutError, LoraPrecision},
};
use types::AdapterVersion;

use self::rows::{batch, blocks, tape};
use super::{
    dropout::{Dropout, Dropping, RowDropouts},
    error::TrainError,
    head::{HeadScratch, LmHeadPass, Loss, Prediction, tiles},
    ordered_reduction::ReductionTurn,
    pass::{BackwardScratch, Reverse},
    saved_activations::{
        LayerActivations, RecordingDeltas, RecordingKv, SavedActivations, SavedScope, Tape, place_residual,
    },
    trainable_site::TrainableSite,
};
use crate::{
    adapter::{Adapter, MethodWeights, ScaledSide},
    cpu::{Compute, kv::PagedKv},
    deltas::{
        adapter_rows::AdapterRows,
        batch::{BatchDeltas, DeltaScratch},
        prepared::PreparedAdapter,
    },
    forward::{
        BLOCK_TOKENS, ModelContext, ReverseLayers, Scratch, SequenceSlice, embed, lay_out, run, run_block,
    },
    shape::config::ModelConfig,
};

/// A training sequence with its targets.
#[derive(Debug, Clone, Copy)]
pub struct Example<'a> {
    /// Tokens of the sequence, at least one.
    pub tokens: &'a [u32],
    /// Target after each token, or `None` without a loss there.
    pub targets: &'a [Option<u32>],
    /// Dropout of the low-rank inputs; a batch has it for all sequences or for none.
    pub dropout: Option<Dropout>,
}

/// An adapter in training, in both forms of its weights.
#[derive(Debug)]
pub struct TrainableAdapter {
    /// Current values of the adapter's weights.
    pub method: MethodWeights,
    /// The values in the kernels' format.
    pub prepared: Arc<PreparedAdapter>,
}

impl TrainableAdapter {
    /// Prepares an adapter for training, in the format in which an engine will serve it.
    ///
    /// # Errors
    /// The kernels do not support the shape of a matrix.
    pub fn new(
        method: &MethodWeights,
        config: &ModelConfig,
        precision: LoraPrecision,
    ) -> Result<Self, LayoutError> {
        let method = method.clone();
        let adapter = Adapter {
            generation: AdapterVersion([0; 32]),
            method,
            base_model: None,
            stored_in_16_bits: false,
        };
        let prepared = Arc::new(PreparedAdapter::new(&adapter, config, precision)?);
        Ok(Self { method: adapter.method, prepared })
    }
}

/// Trains adapters over a model. `B` evaluates the linear layers; the KV cache is kept for one batch.
#[derive(Debug)]
pub struct Trainer<B> {
    model: Arc<ModelContext>,
    base: B,
    shape: KvShape,
    kv: PagedKv,
    compute: Compute,
    keep: SavedScope,
    scratch: Scratch<Compute>,
    deltas: DeltaScratch,
    buffers: BackwardScratch,
    head: HeadScratch,
}

impl<B: ReverseLayers<Compute>> Trainer<B> {
    /// Creates a trainer that computes with `pool`. `shape` is the KV format of the serving engine.
    ///
    /// # Errors
    /// Memory for the KV cache is missing.
    pub fn new(
        model: Arc<ModelContext>,
        base: B,
        shape: KvShape,
        pool: ThreadPool,
        keep: SavedScope,
    ) -> io::Result<Self> {
        let kv = PagedKv::new(shape, 0, &model)?;
        let compute = Compute { pool, isa: Isa::best() };
        Ok(Self {
            model,
            base,
            shape,
            kv,
            compute,
            keep,
            scratch: Scratch::empty(),
            deltas: DeltaScratch::default(),
            buffers: BackwardScratch::default(),
            head: HeadScratch::default(),
        })
    }

    /// Returns the model without its linear layers.
    #[must_use]
    pub fn model(&self) -> &ModelContext {
        &self.model
    }

    /// Sets the activations that later batches save.
    pub fn set_keep(&mut self, keep: SavedScope) {
        self.keep = keep;
    }

    /// Returns the linear layers.
    #[must_use]
    pub fn base(&self) -> &B {
        &self.base
    }

    /// Runs `examples` forward through all blocks.
    ///
    /// # Errors
    /// The base layers fail, or there is no memory for keys and values.
    pub fn forward(
        &mut self,
        learner: &TrainableAdapter,
        examples: &[Example<'_>],
    ) -> Result<Tape, TrainError<B::Error>> {
        let mut tape = tape(learner, examples);
        self.make_room(&tape)?;
        let notes = self.notes(learner, self.keep == SavedScope::All);
        let noted = self.noting(&tape, learner, notes, |pass, base, parts, batch| {
            let (deltas, kv) = parts;
            let mut tokens = tape.tokens.iter().flatten().copied();
            let mut residual = vec![0.0; tape.rows() * pass.model.config.hidden_size];
            embed(pass.model, base, pass.compute, &mut tokens, &mut residual)?;
            deltas.notes.borrow_mut().residual = residual;
            run(pass.model, (base, deltas, kv), pass.compute, pass.scratch, batch, &mut Vec::new())
        })?;
        (tape.layers, tape.residual) = (noted.layers, noted.residual);
        Ok(tape)
    }

    /// Returns the log-probabilities of all targets, example by example.
    ///
    /// # Errors
    /// The base layers fail.
    pub fn log_probabilities(
        &mut self,
        learner: &TrainableAdapter,
        tape: &Tape,
    ) -> Result<Vec<f32>, TrainError<B::Error>> {
        let mut all = Vec::with_capacity(tape.targets.len());
        self.each_tile(learner, tape, |_, buffers| all.extend_from_slice(&buffers.log_probabilities))?;
        Ok(all)
    }

    /// Returns the prediction at each target, example by example, among the tokens `allowed` (empty: all).
    ///
    /// # Errors
    /// The base layers fail.
    ///
    /// # Panics
    /// If an allowed token is not in the vocabulary.
    pub fn predictions(
        &mut self,
        learner: &TrainableAdapter,
        tape: &Tape,
        allowed: &[u32],
    ) -> Result<Vec<Prediction>, TrainError<B::Error>> {
        let mut all = Vec::with_capacity(tape.targets.len());
        self.each_tile(learner, tape, |model, buffers| all.extend(buffers.predictions(model, allowed)))?;
        Ok(all)
    }

    fn each_tile(
        &mut self,
        learner: &TrainableAdapter,
        tape: &Tape,
        mut seen: impl FnMut(&ModelConfig, &HeadScratch),
    ) -> Result<(), TrainError<B::Error>> {
        let mut buffers = std::mem::take(&mut self.head);
        let dropouts = tape.row_dropouts();
        for tile in tiles(&tape.targets, &tape.sequences) {
            let targets = &tape.targets[tile.targets];
            let dropouts = dropouts.of_rows(targets.iter().map(|target| target.row));
            let mut head = self.head(learner, &dropouts);
            head.forward(&tape.residual, targets, &mut buffers).map_err(TrainError::Base)?;
            seen(&self.model.config, &buffers);
        }
        self.head = buffers;
        Ok(())
    }

    /// Runs the reverse pass and adds the gradients of `loss` to the sums of `turn`.
    ///
    /// # Errors
    /// The base layers fail, or an earlier batch failed. The gradients are undefined then.
    pub fn reverse(
        &mut self,
        learner: &TrainableAdapter,
        tape: Tape,
        loss: &mut dyn Loss,
        mut turn: ReductionTurn<'_>,
    ) -> Result<(), TrainError<B::Error>> {
        self.make_room(&tape)?;
        self.buffers.residual.clear();
        self.buffers.residual.resize(tape.rows() * self.model.config.hidden_size, 0.0);
        self.reverse_head(learner, &tape, loss, &mut turn)?;
        self.reverse_blocks(learner, tape, &mut turn)?;
        turn.end();
        Ok(())
    }

    /// Reverses the blocks from the last one to the first site that learns.
    fn reverse_blocks(
        &mut self,
        learner: &TrainableAdapter,
        tape: Tape,
        turn: &mut ReductionTurn<'_>,
    ) -> Result<(), TrainError<B::Error>> {
        let Some(last_block) = TrainableSite::first(&learner.method).layer() else { return Ok(()) };
        let Tape { layers, tokens, sequences, dropouts, .. } = tape;
        let frame = Tape { tokens, sequences, dropouts, ..Tape::default() };
        let dropouts = frame.row_dropouts();
        for (layer, mut notes) in layers.into_iter().enumerate().skip(last_block).rev() {
            if !notes.is_whole() {
                notes = self.again(learner, &frame, layer, notes)?;
            }
            if !self.back(learner, &frame.sequences, &dropouts, turn).block(layer, &notes)? {
                break;
            }
        }
        Ok(())
    }

    /// Reverses the head: from the targets to the residual stream after the last block.
    fn reverse_head(
        &mut self,
        learner: &TrainableAdapter,
        tape: &Tape,
        loss: &mut dyn Loss,
        turn: &mut ReductionTurn<'_>,
    ) -> Result<(), TrainError<B::Error>> {
        let mut buffers = std::mem::take(&mut self.head);
        let dropouts = tape.row_dropouts();
        for tile in tiles(&tape.targets, &tape.sequences) {
            let targets = &tape.targets[tile.targets.clone()];
            let dropouts = dropouts.of_rows(targets.iter().map(|target| target.row));
            let mut head = self.head(learner, &dropouts);
            head.forward(&tape.residual, targets, &mut buffers).map_err(TrainError::Base)?;
            self.back(learner, &tape.sequences, &dropouts, turn).head(targets, &tile, loss, &mut buffers)?;
        }
        turn.pass_on();
        self.head = buffers;
        // The head has left other rows in the scratch buffers.
        let blocks = blocks(&tape.sequences);
        let batch = batch(tape, &blocks, learner);
        lay_out(&self.model, &mut self.compute, &mut self.scratch, &batch)
            .unwrap_or_else(|never| match never {});
        Ok(())
    }

    /// Runs a block again to recover its unsaved activations.
    fn again(
        &mut self,
        learner: &TrainableAdapter,
        tape: &Tape,
        layer: usize,
        kept: LayerActivations,
    ) -> Result<LayerActivations, TrainError<B::Error>> {
        let notes = SavedActivations { residual: kept.residual, ..self.notes(learner, true) };
        let mut noted = self.noting(tape, learner, notes, |pass, base, (deltas, kv), batch| {
            lay_out(pass.model, pass.compute, pass.scratch, batch).unwrap_or_else(|never| match never {});
            place_residual(pass.scratch, &deltas.notes.borrow().residual);
            run_block(pass.model, (base, deltas, kv), pass.compute, pass.scratch, layer)
        })?;
        Ok(noted.layers.swap_remove(layer))
    }

    fn noting(
        &mut self,
        tape: &Tape,
        learner: &TrainableAdapter,
        notes: SavedActivations,
        run: impl FnOnce(
            PassParts<'_>,
            &mut B,
            (&mut RecordingDeltas<'_, BatchDeltas<'_>>, &mut RecordingKv<'_, PagedKv>),
            &[SequenceSlice<'_, PreparedAdapter>],
        ) -> Result<(), B::Error>,
    ) -> Result<SavedActivations, TrainError<B::Error>> {
        let blocks = blocks(&tape.sequences);
        let batch = batch(tape, &blocks, learner);
        let (notes, found) = (RefCell::new(notes), AdapterRows::of(&batch));
        let config = &self.model.config;
        let (deltas, dropouts) =
            (BatchDeltas::new(config, None, &mut self.deltas, &found), &tape.row_dropouts());
        let dropping = Dropping { dropouts, method: &learner.method, config };
        let mut deltas = RecordingDeltas { model: &self.model, deltas, dropping, notes: &notes };
        let mut kv = RecordingKv { kv: &mut self.kv, notes: &notes };
        let pass = PassParts { model: &self.model, compute: &mut self.compute, scratch: &mut self.scratch };
        run(pass, &mut self.base, (&mut deltas, &mut kv), &batch).map_err(TrainError::Base)?;
        drop(deltas);
        Ok(notes.into_inner())
    }

    fn notes(&self, learner: &TrainableAdapter, is_whole: bool) -> SavedActivations {
        let scales_outputs = match &learner.method {
            MethodWeights::Ia3(scales) => {
                scales.vectors().iter().any(|vector| vector.side == ScaledSide::Output)
            }
            MethodWeights::Lora(_)
            | MethodWeights::Activated(..)
            | MethodWeights::Prefix(_)
            | MethodWeights::Prompt(_) => false,
        };
        SavedActivations {
            layers: (0..self.model.config.layers).map(|_| LayerActivations::default()).collect(),
            residual: Vec::new(),
            is_whole,
            projected: scales_outputs || self.model.config.qk_norm,
            before_scales: scales_outputs,
        }
    }

    fn make_room(&mut self, tape: &Tape) -> Result<(), TrainError<B::Error>> {
        let wanted: usize = tape.sequences.iter().map(|rows| rows.count.div_ceil(BLOCK_TOKENS)).sum();
        if self.kv.blocks() < wanted {
            self.kv = PagedKv::new(self.shape, wanted, &self.model).map_err(TrainError::NoMemory)?;
        }
        Ok(())
    }

    fn head<'a>(&'a mut self, learner: &'a TrainableAdapter, dropouts: &'a RowDropouts) -> LmHeadPass<'a, B> {
        LmHeadPass {
            model: &self.model,
            base: &mut self.base,
            device: &mut self.compute,
            scratch: &mut self.scratch,
            deltas: &mut self.deltas,
            adapter: &learner.prepared,
            method: &learner.method,
            dropouts,
        }
    }

    fn back<'a, 'g>(
        &'a mut self,
        learner: &'a TrainableAdapter,
        sequences: &'a [SequenceRows],
        dropouts: &'a RowDropouts,
        turn: &'a mut ReductionTurn<'g>,
    ) -> Reverse<'a, 'g, B> {
        Reverse {
            model: &self.model,
            base: &mut self.base,
            device: &mut self.compute,
            precision: self.shape.precision,
            adapter: &learner.method,
            turn,
            buffers: &mut self.buffers,
            rows: &self.scratch.batch,
            sequences,
            dropouts,
            first: TrainableSite::first(&learner.method),
        }
    }
}

struct PassParts<'a> {
    model: &'a ModelContext,
    compute: &'a mut Compute,
    scratch: &'a mut Scratch<Compute>,
}

//! The model that predicts draft tokens, shared by several sequences.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use model::{
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, ForwardPass, LogitRows, SequenceSlice},
    resident::ResidentModel,
    sampling::logprobs,
    weights::{ResidentLayers, host::HostLayers},
};
use scheduling::perf::{fit::Fit, linear_fit::LinearFit};
use speculation::draft::MAX_GUESSES;

use crate::{
    kv_slots::{DraftSequences, SequenceId},
    vocabulary::Vocabulary,
};

/// Maximum tokens of one sequence in a pass.
pub(crate) const CHUNK_TOKENS: usize = 256;

/// A draft model for several sequences, whose prefetched predictions share a pass. Clones share the model.
pub struct Drafter<L = ResidentLayers>(Arc<Mutex<DraftRunner<L>>>);

impl<L> Clone for Drafter<L> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<L> fmt::Debug for Drafter<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drafter").finish_non_exhaustive()
    }
}

impl<L: HostLayers<Error = Infallible>> Drafter<L> {
    pub(crate) fn new(
        model: ResidentModel<L>,
        adapter: Option<Arc<PreparedAdapter>>,
        vocabulary: Vocabulary,
    ) -> Self {
        let texts = DraftSequences::new(model.kv_blocks());
        let most_tokens = texts.most_tokens().min(model.config().context_length);
        let (logits, timings) = (Vec::new(), Fit::default());
        Self(Arc::new(Mutex::new(DraftRunner {
            model,
            adapter,
            vocabulary,
            texts,
            most_tokens,
            logits,
            timings,
            foreseen: Vec::new(),
            along: HashMap::new(),
        })))
    }
}

impl<L> Drafter<L> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, DraftRunner<L>> {
        // A panic during a pass leaves undefined KV entries; at worst, later draft tokens are wrong.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct DraftRunner<L> {
    model: ResidentModel<L>,
    adapter: Option<Arc<PreparedAdapter>>,
    vocabulary: Vocabulary,
    pub(crate) texts: DraftSequences,
    most_tokens: usize,
    logits: Vec<f32>,
    /// Linear fit of pass seconds over rows.
    timings: Fit<LinearFit>,
    /// Sequences to predict next; the first request reads all of them in one pass.
    foreseen: Vec<PrefetchedLogits>,
    /// Predictions from a shared pass that their sequences have not asked for yet.
    along: HashMap<SequenceId, (Vec<u32>, TokenProbabilities)>,
}

/// Tokens with their probabilities, most likely first.
type TokenProbabilities = Vec<(u32, f64)>;

#[derive(Debug)]
struct PrefetchedLogits {
    id: SequenceId,
    text: Vec<u32>,
    /// Number of tokens without KV entries.
    missing: usize,
}

impl<L> DraftRunner<L> {
    pub(crate) fn close(&mut self, id: SequenceId) {
        self.forget(id);
        self.texts.close(id);
    }

    /// Drops prefetched work and predictions of a sequence.
    pub(crate) fn forget(&mut self, id: SequenceId) {
        self.foreseen.retain(|foreseen| foreseen.id != id);
        self.along.remove(&id);
    }
}

impl<L: HostLayers<Error = Infallible>> DraftRunner<L> {
    /// Whether `text` is short enough and has only tokens of the model's vocabulary.
    pub(crate) fn can_read(&self, text: &[u32]) -> bool {
        !text.is_empty()
            && text.len() <= self.most_tokens
            && text.iter().all(|&token| self.vocabulary.reads(token))
    }

    /// Returns the number of tokens of `text` to compute, at least 1 for the last token's logits.
    pub(crate) fn missing(&self, id: SequenceId, text: &[u32]) -> usize {
        text.len() - self.texts.get(id).map_or(0, |read| read.known(text))
    }

    /// Returns the seconds that a pass of `tokens` rows takes, or `None` before the first pass.
    pub(crate) fn seconds(&self, tokens: usize) -> Option<f64> {
        Some(self.timings.line()?.at(tokens as f64))
    }

    /// Returns the additional seconds of `tokens` rows in the next shared pass, or `None` without timings.
    pub(crate) fn seconds_along(&self, tokens: usize) -> Option<f64> {
        let foreseen: usize = self.foreseen.iter().map(|foreseen| foreseen.missing).sum();
        Some(self.seconds(foreseen + tokens)? - self.owed_s())
    }

    /// Returns the seconds of a pass over all prefetched sequences, or 0 before the first pass.
    pub(crate) fn owed_s(&self) -> f64 {
        match self.foreseen.iter().map(|foreseen| foreseen.missing).sum() {
            0 => 0.0,
            missing => self.seconds(missing).unwrap_or_default(),
        }
    }

    /// Queues the prediction after `text` for the next shared pass; `can_read` must hold for `text`.
    pub(crate) fn prefetch_logits(&mut self, id: SequenceId, text: Vec<u32>) {
        self.forget(id);
        let missing = self.missing(id, &text);
        self.foreseen.push(PrefetchedLogits { id, text, missing });
    }

    /// Returns the prediction after `text` and the time spent, which is zero if an earlier shared pass has
    /// computed it. `can_read` must hold for `text`.
    pub(crate) fn said(&mut self, id: SequenceId, text: &[u32]) -> (TokenProbabilities, Duration) {
        let is_foreseen = |foreseen: &PrefetchedLogits| foreseen.id == id && foreseen.text == text;
        let mut took = Duration::ZERO;
        if self.foreseen.iter().any(is_foreseen) {
            took = self.read_foreseen();
        }
        if let Some((_, said)) = self.along.remove(&id).filter(|(known, _)| known == text) {
            return (said, took);
        }
        let (is_read, alone) = self.read(id, text, LogitRows::Last);
        let has_said = is_read && !self.logits.is_empty();
        let said = if has_said { self.likeliest(0..self.logits.len()) } else { Vec::new() };
        (said, took + alone)
    }

    /// Returns the `MAX_GUESSES` likeliest tokens of a row of logits.
    fn likeliest(&self, row: Range<usize>) -> TokenProbabilities {
        let (_, likely) = logprobs(&self.logits[row], 0, MAX_GUESSES);
        let known = |(index, logprob)| Some((self.vocabulary.token(index)?, f64::from(logprob).exp()));
        likely.into_iter().filter_map(known).collect()
    }

    /// Computes all prefetched predictions in one pass, except those without enough KV blocks.
    fn read_foreseen(&mut self) -> Duration {
        let foreseen = self.with_room();
        let slices = foreseen.iter().filter_map(|one| {
            let read = self.texts.get(one.id)?;
            Some(SequenceSlice {
                trunk: &[],
                tokens: &one.text[read.tokens.len()..],
                start: read.tokens.len(),
                blocks: &read.blocks,
                adapter: self.adapter.as_ref(),
                logits: LogitRows::Last,
            })
        });
        let batch: Vec<_> = slices.collect();
        if batch.is_empty() {
            return Duration::ZERO;
        }
        let rows: usize = batch.iter().map(|slice| slice.tokens.len()).sum();
        let begun = Instant::now();
        let Ok(()) = self.model.forward(&batch, &mut self.logits);
        let took = begun.elapsed();
        self.timings.observe(rows as f64, took.as_secs_f64());
        let width = self.logits.len() / foreseen.len();
        for (at, PrefetchedLogits { id, text, .. }) in foreseen.into_iter().enumerate() {
            let said = self.likeliest(at * width..(at + 1) * width);
            self.texts.note(id, &text);
            self.along.insert(id, (text, said));
        }
        took
    }

    /// Returns the prefetched sequences with enough KV blocks; truncates each cache to its common prefix.
    fn with_room(&mut self) -> Vec<PrefetchedLogits> {
        let mut foreseen = std::mem::take(&mut self.foreseen);
        for PrefetchedLogits { id, text, .. } in &foreseen {
            if let Some(read) = self.texts.with_room(*id, text.len()) {
                read.tokens.truncate(read.known(text));
            }
        }
        // A later sequence may have taken the blocks of an earlier one.
        let capacity = |id| self.texts.get(id).map_or(0, |read| read.blocks.len() * BLOCK_TOKENS);
        foreseen.retain(|one| capacity(one.id) >= one.text.len());
        foreseen
    }

    /// Computes the missing tokens of `text`. Returns false if there are too few KV blocks.
    pub(crate) fn read(&mut self, id: SequenceId, text: &[u32], logits: LogitRows) -> (bool, Duration) {
        let Some(read) = self.texts.with_room(id, text.len()) else { return (false, Duration::ZERO) };
        let mut start = read.known(text);
        read.tokens.truncate(start);
        let mut took = Duration::ZERO;
        while start < text.len() {
            let tokens = &text[start..text.len().min(start + CHUNK_TOKENS)];
            let is_last = start + tokens.len() == text.len();
            let slice = SequenceSlice {
                trunk: &[],
                tokens,
                start,
                blocks: &read.blocks,
                adapter: self.adapter.as_ref(),
                logits: if is_last { logits } else { LogitRows::None },
            };
            let begun = Instant::now();
            let Ok(()) = self.model.forward(&[slice], &mut self.logits);
            let spent = begun.elapsed();
            self.timings.observe(tokens.len() as f64, spent.as_secs_f64());
            took += spent;
            start += tokens.len();
            read.tokens.extend_from_slice(tokens);
        }
        (true, took)
    }
}

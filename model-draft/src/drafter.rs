//! The model that guesses.

use std::{
    convert::Infallible,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use model::{
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass, LogitRows, SequenceSlice},
    resident::ResidentModel,
    sampling::logprobs,
    weights::{ResidentLayers, host::HostLayers},
};
use policy::perf::{fit::Fit, line::Line};
use speculation::draft::MAX_GUESSES;

use crate::{
    texts::{TextId, Texts},
    vocabulary::Vocabulary,
};

/// Tokens of a text that are read at once.
pub(crate) const CHUNK_TOKENS: usize = 256;

/// A model that guesses for several texts, one after the other. Clones are the same.
pub struct Drafter<L = ResidentLayers>(Arc<Mutex<Guessing<L>>>);

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
        let texts = Texts::new(model.kv_blocks());
        let most_tokens = texts.most_tokens().min(model.config().context_length);
        let (logits, timings) = (Vec::new(), Fit::default());
        Self(Arc::new(Mutex::new(Guessing {
            model,
            adapter,
            vocabulary,
            texts,
            most_tokens,
            logits,
            timings,
        })))
    }
}

impl<L> Drafter<L> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Guessing<L>> {
        // After a panic in the middle of a pass its keys and values are undefined, and guesses wrong at worst.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The model, and what it has read.
#[derive(Debug)]
pub(crate) struct Guessing<L> {
    model: ResidentModel<L>,
    adapter: Option<Arc<PreparedAdapter>>,
    vocabulary: Vocabulary,
    pub(crate) texts: Texts,
    /// Of a text that can be read.
    most_tokens: usize,
    logits: Vec<f32>,
    /// Rows of a pass to seconds.
    timings: Fit<Line>,
}

impl<L: HostLayers<Error = Infallible>> Guessing<L> {
    /// Whether `text` is one that can be read: not too long, and of tokens that the model knows.
    pub(crate) fn can_read(&self, text: &[u32]) -> bool {
        !text.is_empty()
            && text.len() <= self.most_tokens
            && text.iter().all(|&token| self.vocabulary.reads(token))
    }

    /// Tokens of `text` that were not read, at least the last.
    pub(crate) fn missing(&self, id: TextId, text: &[u32]) -> usize {
        text.len() - self.texts.get(id).map_or(0, |read| read.known(text))
    }

    /// Seconds that reading so many tokens takes; `None` before any were.
    pub(crate) fn seconds(&self, tokens: usize) -> Option<f64> {
        Some(self.timings.line()?.at(tokens as f64))
    }

    /// What comes behind `text`, which can be read, the likeliest first, each with the probability that the model gives it.
    pub(crate) fn said(&mut self, id: TextId, text: &[u32]) -> (Vec<(u32, f64)>, Duration) {
        let (is_read, took) = self.read(id, text, LogitRows::Last);
        if !is_read || self.logits.is_empty() {
            return (Vec::new(), took);
        }
        let (_, likely) = logprobs(&self.logits, 0, MAX_GUESSES);
        let known = likely
            .into_iter()
            .filter_map(|(index, logprob)| Some((self.vocabulary.token(index)?, f64::from(logprob).exp())));
        (known.collect(), took)
    }

    /// Reads what of `text` is not there, for logits of its last token or for none. False: there is no room.
    pub(crate) fn read(&mut self, id: TextId, text: &[u32], logits: LogitRows) -> (bool, Duration) {
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

//! Drafters of sequences, as the engine uses them.
//!
//! A drafter owns what it computes with, so it can run at any time, also while a pass waits for its weights.

use std::{convert::Infallible, fmt, time::Duration};

use draft_model::{draft::ModelDraft, drafter::Drafter};
use kv_cache::ledger::MemoryReservation;
use model::weights::host::HostLayers;
use shmproto::message::DraftKind;
use speculation::{
    calibration::Calibration,
    draft::{Draft, DraftToken},
    hybrid_drafter::{DraftCost, HybridDrafter},
    ngram::{AcceptanceTable, Ngram},
    tree::{NodeId, TokenTree},
};

/// Acceptance statistics of an adapter and client.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AcceptanceStats {
    pub text: AcceptanceTable,
    pub model: Calibration,
}

/// A drafter of one sequence.
pub trait SequenceDrafter: Draft<Error = Infallible> + Send {
    /// Returns the acceptance statistics it has learned.
    fn learned(&self) -> Option<AcceptanceStats> {
        None
    }

    /// Prefills pending text for about `seconds` at most.
    fn read_ahead(&mut self, seconds: f64) {
        let _ = seconds;
    }

    /// Sets the time that slow predictions may cost from now on.
    fn set_price(&mut self, price: DraftCost) {
        let _ = price;
    }

    /// Announces a question about `at`, so that a model may compute several sequences' questions together.
    fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>) {
        let _ = (tree, at);
    }

    /// Returns the seconds that all announced predictions take, over all sequences.
    fn owed_s(&self) -> f64 {
        0.0
    }

    /// Returns the time that a model took since the previous call.
    fn take_spent(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Whether a model predicted any token of the latest tree.
    fn was_asked(&self) -> bool {
        false
    }

    /// Whether a model predicted this node of the latest tree.
    fn is_of_model(&self, tree: &TokenTree, node: NodeId) -> bool {
        let _ = (tree, node);
        false
    }
}

impl SequenceDrafter for Ngram {
    fn learned(&self) -> Option<AcceptanceStats> {
        Some(AcceptanceStats { text: self.survival().clone(), model: Calibration::default() })
    }
}

impl<L: HostLayers<Error = Infallible> + Send> SequenceDrafter for HybridDrafter<ModelDraft<L>> {
    fn learned(&self) -> Option<AcceptanceStats> {
        let (text, model) = (self.table().survival().clone(), self.model().calibration().clone());
        Some(AcceptanceStats { text, model })
    }

    fn read_ahead(&mut self, seconds: f64) {
        self.model_mut().read_ahead(seconds);
    }

    fn set_price(&mut self, price: DraftCost) {
        Self::set_price(self, price);
    }

    fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>) {
        Self::prefetch_logits(self, tree, at);
    }

    fn owed_s(&self) -> f64 {
        self.model().owed_s()
    }

    fn take_spent(&mut self) -> Duration {
        self.model_mut().take_spent()
    }

    fn was_asked(&self) -> bool {
        Self::was_asked(self)
    }

    fn is_of_model(&self, tree: &TokenTree, node: NodeId) -> bool {
        Self::is_of_model(self, tree, node)
    }
}

impl Draft for Box<dyn SequenceDrafter> {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.as_mut().accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        self.as_mut().guesses(tree, at)
    }

    fn takes_time(&self) -> bool {
        self.as_ref().takes_time()
    }
}

/// Makes a drafter for a prompt, with the statistics of earlier requests for the same adapter.
type MakeDrafter = Box<dyn FnMut(&[u32], AcceptanceStats) -> Box<dyn SequenceDrafter> + Send>;

/// Makes drafters for all sequences.
pub struct DrafterFactory {
    kind: DraftKind,
    make: MakeDrafter,
}

impl fmt::Debug for DrafterFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agency").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl DrafterFactory {
    /// Creates a factory of drafters of this kind.
    pub fn new(
        kind: DraftKind,
        make: impl FnMut(&[u32], AcceptanceStats) -> Box<dyn SequenceDrafter> + Send + 'static,
    ) -> Self {
        Self { kind, make: Box::new(make) }
    }

    /// Creates a factory of n-gram drafters.
    #[must_use]
    pub fn ngram() -> Self {
        Self::new(DraftKind::Ngram, |prompt, learned| Box::new(Ngram::new(prompt, learned.text)))
    }

    /// Creates a factory of n-gram drafters with a model; `held` is the model's memory.
    pub(crate) fn combined<L>(kind: DraftKind, drafter: Drafter<L>, held: MemoryReservation) -> Self
    where
        L: HostLayers<Error = Infallible> + Send + 'static,
    {
        Self::new(kind, move |prompt, learned| {
            let _ = &held;
            let table = Ngram::new(prompt, learned.text);
            Box::new(HybridDrafter::new(table, drafter.text(prompt, learned.model)))
        })
    }

    #[must_use]
    pub fn kind(&self) -> DraftKind {
        self.kind
    }

    /// Makes a drafter for a text that begins with `prompt`.
    pub fn make(&mut self, prompt: &[u32], learned: AcceptanceStats) -> Box<dyn SequenceDrafter> {
        (self.make)(prompt, learned)
    }
}

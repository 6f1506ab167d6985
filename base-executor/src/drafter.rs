//! Who drafts for a sequence, as the engine takes them.
//!
//! An author owns what it computes with, so that it may be asked at any time, also while a pass waits for its weights.

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

/// How far drafts of somebody's text are to be trusted.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AcceptanceStats {
    /// Those out of what the text said before.
    pub text: AcceptanceTable,
    /// Those of a model.
    pub model: Calibration,
}

/// Somebody who drafts for one sequence.
pub trait SequenceDrafter: Draft<Error = Infallible> + Send {
    /// What it has learned about those it drafts for.
    fn learned(&self) -> Option<AcceptanceStats> {
        None
    }

    /// Reads what of the text it would have to read before it guesses, for about as many seconds at most.
    fn read_ahead(&mut self, seconds: f64) {
        let _ = seconds;
    }

    /// From now on guesses that take time may be made where this allows it.
    fn set_price(&mut self, price: DraftCost) {
        let _ = price;
    }

    /// It is about to be asked what comes behind `at`: a model may say that along with what others are about to ask.
    fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>) {
        let _ = (tree, at);
    }

    /// Seconds that all takes that was foreseen, for whomever.
    fn owed_s(&self) -> f64 {
        0.0
    }

    /// Time that a model has taken since this was asked last.
    fn take_spent(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Whether a model guessed anything for the tree that was drafted last.
    fn was_asked(&self) -> bool {
        false
    }

    /// Whether a model guessed this node of the tree that was drafted last.
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

/// Makes an author for a prompt; what was learned is of those who asked for the same adapter before.
type MakeDrafter = Box<dyn FnMut(&[u32], AcceptanceStats) -> Box<dyn SequenceDrafter> + Send>;

/// Somebody who provides all sequences with authors.
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
    /// One of this kind that `make`s them.
    pub fn new(
        kind: DraftKind,
        make: impl FnMut(&[u32], AcceptanceStats) -> Box<dyn SequenceDrafter> + Send + 'static,
    ) -> Self {
        Self { kind, make: Box::new(make) }
    }

    /// What a sequence said before.
    #[must_use]
    pub fn ngram() -> Self {
        Self::new(DraftKind::Ngram, |prompt, learned| Box::new(Ngram::new(prompt, learned.text)))
    }

    /// The same, and a model where that does not know. `held` is what it takes, until the agency is given up.
    pub fn combined<L>(kind: DraftKind, drafter: Drafter<L>, held: MemoryReservation) -> Self
    where
        L: HostLayers<Error = Infallible> + Send + 'static,
    {
        Self::new(kind, move |prompt, learned| {
            let _ = &held;
            let table = Ngram::new(prompt, learned.text);
            Box::new(HybridDrafter::new(table, drafter.text(prompt, learned.model)))
        })
    }

    /// Who guesses.
    #[must_use]
    pub fn kind(&self) -> DraftKind {
        self.kind
    }

    /// An author for a text that begins with `prompt`.
    pub fn author(&mut self, prompt: &[u32], learned: AcceptanceStats) -> Box<dyn SequenceDrafter> {
        (self.make)(prompt, learned)
    }
}

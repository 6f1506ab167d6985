//! A drafter that combines the n-gram table with a model.
//!
//! The table costs nothing, so it is asked first. The model is asked where its higher acceptance probability
//! is worth its time.

use std::{collections::HashSet, convert::Infallible};

use crate::{
    draft::{CostedDraft, Draft, DraftToken, MAX_GUESSES},
    ngram::Ngram,
    tree::{NodeId, TokenTree},
    verify_selection::{StepEstimate, is_worth_asking},
};

/// Time that the model's predictions may cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DraftCost {
    /// A step waits for the prediction, so its benefit must exceed its cost.
    Worth {
        /// Estimate of the step that waits.
        step: StepEstimate,
        /// Seconds left for predictions.
        left_s: f64,
        /// Whether one prediction is made regardless of its benefit, to measure the model's acceptance.
        probe: ProbePolicy,
    },
    /// Predictions that end within `left_s` seconds are free, because no step waits for them.
    Free {
        /// Seconds left for predictions.
        left_s: f64,
    },
}

impl DraftCost {
    /// Pays for a prediction after `at` if its `gain` in expected tokens is worth it; otherwise returns
    /// false. `guess_s` is its duration in seconds, `None` if not yet measured.
    pub fn pay(&mut self, guess_s: Option<f64>, (tree, at): (&TokenTree, Option<NodeId>), gain: f64) -> bool {
        match self {
            Self::Worth { step, left_s, probe } => {
                // A prediction without a measured duration is tried once.
                let guess_s = guess_s.unwrap_or(0.0);
                let is_probe = *probe == ProbePolicy::Due && at.is_none();
                if guess_s > *left_s || !(is_probe || is_worth_asking(step, guess_s, tree, gain)) {
                    return false;
                }
                *left_s -= guess_s;
                step.drafting_s += guess_s;
                *probe = ProbePolicy::No;
            }
            Self::Free { left_s } => {
                // A prediction without a measured duration could delay the step by any time.
                let guess_s = guess_s.unwrap_or(f64::MAX);
                if guess_s > *left_s {
                    return false;
                }
                *left_s -= guess_s;
            }
        }
        true
    }
}

/// Whether the model is probed; see [`DraftCost::Worth`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbePolicy {
    /// Probe the model once at the root.
    Due,
    /// Do not probe now.
    No,
}

/// The n-gram table and a drafter model behind one interface.
#[derive(Debug, Clone)]
pub struct HybridDrafter<M> {
    table: Ngram,
    model: M,
    price: Option<DraftCost>,
    /// Token paths, after the last verified token, of the draft tokens that the model predicted.
    of_model: HashSet<Vec<u32>>,
    /// Path for which [`prefetch_logits`](Self::prefetch_logits) was called, with the chosen source.
    foreseen: Option<(Vec<u32>, DraftSource)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DraftSource {
    Table,
    Model,
}

impl<M: CostedDraft> HybridDrafter<M> {
    /// Creates a drafter; `table` and `model` know the same text. The model needs a [price](Self::set_price).
    #[must_use]
    pub fn new(table: Ngram, model: M) -> Self {
        Self { table, model, price: None, of_model: HashSet::new(), foreseen: None }
    }

    /// Returns the n-gram table.
    #[must_use]
    pub fn table(&self) -> &Ngram {
        &self.table
    }

    /// Returns the drafter model.
    #[must_use]
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Returns the drafter model for changes.
    pub fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// Sets the time that predictions of the model may cost from now on.
    pub fn set_price(&mut self, price: DraftCost) {
        self.price = Some(price);
    }

    /// Whether the model predicted any token after the last verified one.
    #[must_use]
    pub fn was_asked(&self) -> bool {
        !self.of_model.is_empty()
    }

    /// Whether the model predicted this node of the latest tree.
    #[must_use]
    pub fn is_of_model(&self, tree: &TokenTree, node: NodeId) -> bool {
        self.of_model.contains(&way(tree, Some(node)))
    }

    /// Announces a question about `at`. If the model would be asked, it computes it with others.
    pub fn prefetch_logits(&mut self, tree: &TokenTree, at: Option<NodeId>)
    where
        M: Draft<Error = Infallible>,
    {
        let Ok(table) = self.table.guesses(tree, at);
        let asks = self.asks(tree, at, &table);
        if asks == DraftSource::Model {
            self.model.prefetch_logits(tree, at);
        }
        self.foreseen = Some((way(tree, at), asks));
    }

    /// Chooses the source of draft tokens after `at`, given the table's, and pays for the model.
    fn asks(&mut self, tree: &TokenTree, at: Option<NodeId>, table: &[DraftToken]) -> DraftSource {
        let (usual, best) = (self.model.usual(), table.first().map_or(0.0, |guess| guess.probability));
        let Some(price) = self.price.as_mut().filter(|_| usual > best) else { return DraftSource::Table };
        let gain = tree.confidence(at) * (usual - best);
        if price.pay(self.model.guess_s(tree, at), (tree, at), gain) {
            DraftSource::Model
        } else {
            DraftSource::Table
        }
    }
}

impl<M: CostedDraft + Draft<Error = Infallible>> Draft for HybridDrafter<M> {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        // Predictions further along the accepted path remain valid.
        let rest = |way: Vec<u32>| Some(way.strip_prefix(tokens)?.to_vec()).filter(|rest| !rest.is_empty());
        self.of_model = std::mem::take(&mut self.of_model).into_iter().filter_map(rest).collect();
        self.foreseen = None;
        self.table.accept(tokens)?;
        self.model.accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        let table = self.table.guesses(tree, at)?;
        let way = way(tree, at);
        let asks = match self.foreseen.take() {
            Some((foreseen, asks)) if foreseen == way => asks,
            _ => self.asks(tree, at, &table),
        };
        if asks == DraftSource::Table {
            return Ok(table);
        }
        let mut guesses = self.model.guesses(tree, at)?;
        self.of_model.extend(guesses.iter().map(|guess| [&way[..], &[guess.token]].concat()));
        let mut left = 1.0 - guesses.iter().map(|guess| guess.probability).sum::<f64>();
        for mut guess in table {
            if guesses.iter().all(|known| known.token != guess.token) {
                guess.probability = guess.probability.min(left);
                left -= guess.probability;
                guesses.push(guess);
            }
        }
        guesses.sort_by(|a, b| b.probability.total_cmp(&a.probability));
        guesses.truncate(MAX_GUESSES);
        Ok(guesses)
    }

    fn takes_time(&self) -> bool {
        self.model.takes_time()
    }
}

/// Returns the tokens after the root up to `node`.
fn way(tree: &TokenTree, node: Option<NodeId>) -> Vec<u32> {
    node.into_iter().flat_map(|node| tree.path(node).iter()).map(|node| tree.token(node)).collect()
}

#[cfg(test)]
mod tests;

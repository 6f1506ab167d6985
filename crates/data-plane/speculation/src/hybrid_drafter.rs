//! A text's own past, and a model where that does not know.
//!
//! A table costs nothing to ask, so it is asked first. The model is asked where it is likely to know better, by so much that
//! the time it takes is worth it.

use std::{collections::HashSet, convert::Infallible};

use crate::{
    draft::{CostedDraft, Draft, DraftToken, MAX_GUESSES},
    ngram::Ngram,
    tree::{NodeId, TokenTree},
    verify_selection::{StepEstimate, is_worth_asking},
};

/// What a guess of the model may cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DraftCost {
    /// It is made before a step, which waits for it: it is to be worth that.
    Worth {
        /// The step that it is for.
        step: StepEstimate,
        /// Seconds that there are for guesses.
        left_s: f64,
        /// Whether it is to be asked once even where nothing promises that it is worth it, to hear how it does by now.
        probe: ProbePolicy,
    },
    /// Nobody waits for it, for so many seconds.
    Free {
        /// Seconds.
        left_s: f64,
    },
}

impl DraftCost {
    /// Takes the price of a guess that takes `guess_s` seconds, as far as that is known, and comes true with `gain` more than what there
    /// is without it. False: it is too dear. `at` is where it is asked for.
    pub fn pay(&mut self, guess_s: Option<f64>, (tree, at): (&TokenTree, Option<NodeId>), gain: f64) -> bool {
        match self {
            Self::Worth { step, left_s, probe } => {
                // What nobody has timed yet is tried once to see what it takes.
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
                // How long what nobody has timed yet would hold somebody up is not known either.
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

/// See [`DraftCost::Worth`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbePolicy {
    /// Once.
    Due,
    /// Not now.
    No,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct HybridDrafter<M> {
    table: Ngram,
    model: M,
    price: Option<DraftCost>,
    /// The ways to what the model guessed behind the last token that the target said.
    of_model: HashSet<Vec<u32>>,
    /// The way to where it was foreseen to be asked, and whether it will ask the model there.
    foreseen: Option<(Vec<u32>, DraftSource)>,
}

/// Who is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DraftSource {
    Table,
    Model,
}

impl<M: CostedDraft> HybridDrafter<M> {
    /// Both know the same text; the model is not asked before it has a [price](Self::set_price).
    #[must_use]
    pub fn new(table: Ngram, model: M) -> Self {
        Self { table, model, price: None, of_model: HashSet::new(), foreseen: None }
    }

    /// The table.
    #[must_use]
    pub fn table(&self) -> &Ngram {
        &self.table
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The model, for its own business.
    pub fn model_mut(&mut self) -> &mut M {
        &mut self.model
    }

    /// From now on the model is asked where this allows it.
    pub fn set_price(&mut self, price: DraftCost) {
        self.price = Some(price);
    }

    /// Whether the model guessed anything behind the last token that the target said.
    #[must_use]
    pub fn was_asked(&self) -> bool {
        !self.of_model.is_empty()
    }

    /// Whether the model guessed this node of a tree that was drafted last.
    #[must_use]
    pub fn is_of_model(&self, tree: &TokenTree, node: NodeId) -> bool {
        self.of_model.contains(&way(tree, Some(node)))
    }

    /// It is about to be asked what comes behind `at`: if it is to ask the model there, that may answer others along.
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

    /// Whom to ask behind `at`, where the table has these guesses; the model is paid for.
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
        // What was guessed further on is still there where the target came by.
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

/// The tokens from behind the root to `node`.
fn way(tree: &TokenTree, node: Option<NodeId>) -> Vec<u32> {
    node.into_iter().flat_map(|node| tree.path(node).iter()).map(|node| tree.token(node)).collect()
}

#[cfg(test)]
mod tests;

//! Tokens drafted for a step, to be verified in it (EdgeLLM; DESIGN section 11).
//!
//! Whoever decodes may have a tree of drafted tokens behind the one that is pending: its rows are computed with all others, and what
//! the model would have said anyway is kept. How many rows that is worth follows from what a row adds to a step and from how often such
//! drafts came true; what others wait longer for it has a bound ([`speculation::worth`]).

use std::{fmt, time::Duration};

use ids::{AdapterId, TenantId};
use model::forward::{ForwardPass, LogitRows};
use policy::perf::{fit::Fit, line::Line};
use shmproto::message::SpeculationStats;
use speculation::{
    draft::Draft,
    growth::{Pacer, grow},
    ngram::{Ngram, Survival},
    recent::Recent,
    tree::TokenTree,
    worth::{Step, worth},
};

pub use super::commission::Author;
use super::{
    Engine,
    commission::Commission,
    schedule::Portion,
    sequence::{Fork, Sequence},
};

/// Most drafted tokens of a sequence in a step.
pub const MAX_DRAFT_TOKENS: usize = speculation::tree::MAX_NODES;

/// Tenants' adapters of which it is remembered how often drafts came true.
const MAX_REMEMBERED: usize = 1024;

/// What a row adds to a step, as a part of a step of one row, until steps of several sizes were seen.
const SUPPOSED_SLOPE: f64 = 0.1;

/// Makes an author for a prompt; what was learned is of those who asked for the same adapter before.
type MakeAuthor = Box<dyn FnMut(&[u32], Survival) -> Box<dyn Author> + Send>;

/// Whose text it is: how far a draft is to be trusted depends on that (D4.11).
type Whose = (Option<AdapterId>, TenantId);

/// Who drafts, and what drafts and rows have been worth so far. The default drafts nothing.
#[derive(Default)]
pub struct Drafts {
    on: Option<Drafting>,
    pace: Pace,
    forks: Vec<Fork>,
}

struct Drafting {
    make: MakeAuthor,
    max_tokens: usize,
    learned: Recent<Whose, Survival>,
}

impl fmt::Debug for Drafts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drafts")
            .field("on", &self.on.is_some())
            .field("pace", &self.pace)
            .finish_non_exhaustive()
    }
}

impl Drafts {
    /// Sequences draft for themselves, out of what they said before: at most `max_tokens` a step.
    #[must_use]
    pub fn ngram(max_tokens: usize) -> Self {
        Self::by(max_tokens, |prompt, learned| Box::new(Ngram::new(prompt, learned)))
    }

    /// `make` says who drafts for a prompt, at most `max_tokens` a step.
    #[must_use]
    pub fn by(
        max_tokens: usize,
        make: impl FnMut(&[u32], Survival) -> Box<dyn Author> + Send + 'static,
    ) -> Self {
        let learned = Recent::new(MAX_REMEMBERED);
        let max_tokens = max_tokens.min(MAX_DRAFT_TOKENS);
        Self { on: Some(Drafting { make: Box::new(make), max_tokens, learned }), ..Self::default() }
    }

    /// A step of so many rows, each with logits, took so long.
    pub(super) fn observe(&mut self, rows: usize, took: Duration) {
        self.pace.observe(rows, took);
    }

    /// What may come next in a sequence; nothing while it is not known what rows cost.
    fn propose<A>(&mut self, sequence: &mut Sequence<A>) -> Option<TokenTree> {
        let drafting = self.on.as_mut()?;
        let max_tokens = drafting.max_tokens.min(sequence.left().saturating_sub(1));
        let whose = sequence.whose();
        let text = &sequence.tokens[sequence.task.virtual_tokens..];
        let commission = sequence.commission.get_or_insert_with(|| Commission {
            author: (drafting.make)(text, drafting.learned.of(&whose).clone()),
            known: text.len(),
        });
        let Ok(()) = commission.author.accept(&text[commission.known..]);
        commission.known = text.len();
        let (mut tree, mut pacer) = (TokenTree::new(), Pacer::default());
        // A table costs nothing to ask, so what is worth a row is decided when the tree is there.
        let Ok(()) = grow(&mut tree, (&mut pacer, &mut commission.author), max_tokens, |_| false);
        (!tree.is_empty()).then_some(tree)
    }

    /// A sequence has come to its end: what was learned from it is of use to the next.
    pub(super) fn learn<A>(&mut self, sequence: &mut Sequence<A>) {
        let whose = sequence.whose();
        if let (Some(drafting), Some(commission)) = (&mut self.on, sequence.commission.take())
            && let Some(learned) = commission.author.learned()
        {
            drafting.learned.of(&whose).clone_from(learned);
        }
    }
}

impl<P: ForwardPass> Engine<P> {
    /// Adds to a plan what is worth being verified in the same step.
    pub(super) fn draft(&mut self, plan: &mut [Portion]) {
        let Some(cost) = self.drafts.on.as_ref().and(self.drafts.pace.line()) else { return };
        if !self.computing.pass.branches() {
            return;
        }
        let mut trees = Vec::new();
        for (index, portion) in plan.iter().enumerate() {
            let sequence = self.queues.running_mut(portion.sequence);
            if sequence.is_decoding()
                && let Some(tree) = self.drafts.propose(sequence)
            {
                trees.push((index, tree));
            }
        }
        let drafted: Vec<_> = trees.iter().map(|(_, tree)| tree).collect();
        let rows = plan.iter().map(|portion| portion.count).sum();
        let kept = worth(&Step { cost, rows, sequences: plan.len() }, &drafted).kept;
        // Nobody is to give way because others draft.
        let reserve = self.queues.running().len();
        for ((index, tree), kept) in trees.iter().zip(kept).filter(|(_, kept)| !kept.is_empty()) {
            let portion = &mut plan[*index];
            let sequence = self.queues.running_mut(portion.sequence);
            sequence.grow(tree.pruned(kept), &mut self.kv, reserve, &mut self.drafts.forks);
            if let Some(grown) = &sequence.grown {
                (portion.count, portion.logits) = (grown.rows(), LogitRows::All);
            }
            if let Some(provisional) = sequence.provisional() {
                self.outboxes.foretell(sequence.caller, provisional);
            }
        }
    }

    /// Gives branches what their sequences have in the blocks that they part in.
    pub(super) fn fork(&mut self) -> Result<(), P::Error> {
        for Fork { from, to } in std::mem::take(&mut self.drafts.forks) {
            self.computing.pass.copy_block(from, to)?;
        }
        Ok(())
    }
}

/// What steps take, by their rows.
#[derive(Debug, Default)]
struct Pace {
    fit: Fit<Line>,
    /// Rows of the smallest and the largest step.
    seen: Option<(usize, usize)>,
}

impl Pace {
    fn observe(&mut self, rows: usize, took: Duration) {
        self.fit.observe(rows as f64, took.as_secs_f64());
        let (least, most) = self.seen.unwrap_or((rows, rows));
        self.seen = Some((least.min(rows), most.max(rows)));
    }

    fn line(&self) -> Option<Line> {
        let (line, (least, most)) = (self.fit.line()?, self.seen?);
        if least < most {
            return Some(line);
        }
        let step = line.at(least as f64);
        let alpha = SUPPOSED_SLOPE * step / least as f64;
        Some(Line { alpha, beta: step - alpha * least as f64 })
    }
}

/// Counts a verification of so many tokens.
pub(super) fn count(stats: &mut SpeculationStats, drafted: usize, accepted: usize) {
    stats.verifications += 1;
    stats.drafted += drafted as u64;
    stats.accepted += accepted as u64;
}

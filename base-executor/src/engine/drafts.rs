//! Draft tokens of a step, verified in the same step (EdgeLLM).
//!
//! A decoding sequence may have a token tree after its pending token. The tree's rows are computed with all
//! others, and the tokens that the model would emit anyway are accepted. The number of rows follows from
//! their cost and the acceptance so far; other sequences' delay is bounded
//! ([`speculation::verify_selection`]).

use std::time::Duration;

use model::{forward::ForwardPass, weight_stream_stats::PIPELINE};
use shmproto::message::{ACCEPTED_BOUNDS, DraftKind, SpeculationStats};
use speculation::{
    baselines::BaselineRule,
    draft_budget::DraftBudget,
    lru::LruTable,
    tree::{NodeSet, TokenTree},
    verification::VerificationResult,
    verify_selection::{StepEstimate, VerifySelection, worth},
};
use types::{AdapterId, TenantId};

use super::{
    Engine, SCORED_TOKENS,
    drafter_state::DrafterState,
    overlapped_drafting::OverlappedDrafters,
    schedule::ScheduledTokens,
    sequence::{BranchBlocks, Sequence},
    step_cost::StepCost,
};
use crate::drafter::{AcceptanceStats, DrafterFactory};

/// Maximum number of draft tokens per sequence and step.
pub(crate) const MAX_DRAFT_TOKENS: usize = speculation::tree::MAX_NODES;

/// Maximum number of pairs of tenant and adapter with acceptance statistics.
const MAX_REMEMBERED: usize = 1024;

/// Number of steps after which an unused drafter model is probed once.
pub(super) const PROBE_STEPS: u32 = 64;

/// Adapter and tenant of a text, on which the acceptance of draft tokens depends.
type AcceptanceKey = (Option<AdapterId>, TenantId);

/// Drafters, with the measured worth of drafts and rows. The default drafts nothing.
#[derive(Debug)]
pub struct Drafts {
    pub(super) max_tokens: usize,
    /// Drafter factory when no draft adapter is used.
    usual: Option<DrafterFactory>,
    /// Draft adapter that replaces it, where allowed.
    own: DraftAdapterMode,
    learned: LruTable<AcceptanceKey, AcceptanceStats>,
    step_cost: StepCost,
    pub(super) budget: DraftBudget,
    /// Number of steps since a drafter model was used.
    pub(super) unasked: u32,
    forks: Vec<BranchBlocks>,
    last_step: LastStepStats,
    pub(super) overlapped: OverlappedDrafters,
    /// Another rule for the amount of verification, for comparison.
    pub(super) rule: Option<BaselineRule>,
    /// Whether slow drafts are kept, and continue while a step waits for its weights.
    pub(super) goes_on: bool,
}

/// Whether draft adapters draft.
#[derive(Debug)]
enum DraftAdapterMode {
    /// Draft adapters are not used.
    No,
    /// The draft adapter that was loaded last is used, if there is one.
    Last(Option<(AdapterId, DrafterFactory)>),
}

/// Stats of the latest step.
#[derive(Debug, Default)]
struct LastStepStats {
    /// The step without drafts; `None` before the first drafting.
    step: Option<StepEstimate>,
    /// Confidence that one more token would need.
    least_confidence: f64,
}

impl Default for Drafts {
    fn default() -> Self {
        Self {
            max_tokens: 0,
            usual: None,
            own: DraftAdapterMode::No,
            learned: LruTable::new(MAX_REMEMBERED),
            step_cost: StepCost::default(),
            budget: DraftBudget::default(),
            // The first opportunity is a probe.
            unasked: PROBE_STEPS,
            forks: Vec::new(),
            last_step: LastStepStats::default(),
            overlapped: OverlappedDrafters::default(),
            rule: None,
            goes_on: true,
        }
    }
}

impl Drafts {
    /// Creates settings with `usual` as the drafter, if any, and at most `max_tokens` per sequence and step.
    #[must_use]
    pub fn by(max_tokens: usize, usual: Option<DrafterFactory>) -> Self {
        Self { max_tokens: max_tokens.min(MAX_DRAFT_TOKENS), usual, ..Self::default() }
    }

    /// Lets the draft adapter that was loaded last replace the usual drafter.
    #[must_use]
    pub(crate) fn or_itself(self) -> Self {
        Self { own: DraftAdapterMode::Last(None), ..self }
    }

    /// Sets another rule for the amount of verification, regardless of cost; for comparison.
    #[must_use]
    pub fn ruled(self, rule: BaselineRule) -> Self {
        Self { rule: Some(rule), ..self }
    }

    /// Disables drafting during verification; for comparison.
    #[must_use]
    pub fn without_drafting_ahead(self) -> Self {
        Self { goes_on: false, ..self }
    }

    fn factory(&mut self) -> Option<&mut DrafterFactory> {
        match &mut self.own {
            DraftAdapterMode::Last(Some((_, factory))) => Some(factory),
            DraftAdapterMode::Last(None) | DraftAdapterMode::No => self.usual.as_mut(),
        }
    }

    fn are_on(&self) -> bool {
        self.usual.is_some() || matches!(self.own, DraftAdapterMode::Last(Some(_)))
    }

    /// Records a step of `rows` rows, each with logits, that took `took`.
    pub(super) fn observe(&mut self, rows: usize, took: Duration) {
        self.step_cost.observe(rows, took);
    }

    /// Returns the expected duration of a step of `rows` rows.
    fn takes(&self, rows: usize) -> Duration {
        let step_s = self.step_cost.line().map_or(0.0, |line| line.at(rows as f64));
        Duration::try_from_secs_f64(step_s).unwrap_or_default()
    }

    /// Returns the drafter of a sequence, and creates it first if needed; `None` without drafting.
    pub(super) fn take_drafter<A>(&mut self, sequence: &mut Sequence<A>) -> Option<DrafterState> {
        if sequence.drafter_state.is_none() {
            let learned = self.learned.of(&sequence.whose()).clone();
            let text = sequence.text();
            let (drafter, known) = (self.factory()?.make(text, learned), text.len());
            sequence.drafter_state = Some(DrafterState { drafter, known, ahead: None });
        }
        sequence.drafter_state.take()
    }

    /// Keeps the statistics of an ended sequence for later ones.
    pub(super) fn remember<A>(&mut self, sequence: &mut Sequence<A>) {
        if let Some(state) = sequence.drafter_state.take()
            && let Some(learned) = state.drafter.learned()
        {
            *self.learned.of(&sequence.whose()) = learned;
        }
    }

    /// Records the verification of a sequence's tree.
    pub(super) fn record_verification(
        &mut self,
        stats: &mut SpeculationStats,
        state: Option<&DrafterState>,
        (tree, verdict): (&TokenTree, &VerificationResult),
    ) {
        let &VerificationResult { correct, all, .. } = verdict;
        tracing::trace!(target: PIPELINE, correct, all, "verdict");
        self.rule.iter_mut().for_each(|rule| rule.learn(verdict));
        let of_model = |node| state.is_some_and(|state| state.drafter.is_of_model(tree, node));
        let drafted = tree.nodes().filter(|&node| of_model(node)).count();
        let accepted = verdict.accepted.iter().filter(|&&node| of_model(node)).count();
        stats.verifications += 1;
        stats.drafted += tree.len() as u64;
        stats.accepted += verdict.accepted.len() as u64;
        let class = ACCEPTED_BOUNDS.partition_point(|&bound| bound < verdict.accepted.len() as u64);
        stats.accepted_counts[class] += 1;
        stats.model_drafted += drafted as u64;
        stats.model_accepted += accepted as u64;
        if let Some(step) = &self.last_step.step {
            let token_s = step.plain_s() / step.sequences.max(1) as f64;
            self.budget.earn(token_s * accepted as f64 - step.cost.alpha * drafted as f64);
        }
    }

    /// Chooses the nodes of `trees` that are verified in `step`.
    fn choose(&mut self, step: &StepEstimate, trees: &[&TokenTree]) -> Vec<NodeSet> {
        let VerifySelection { kept, least_confidence } = match &self.rule {
            None => worth(step, trees),
            Some(rule) => VerifySelection {
                kept: trees.iter().map(|tree| NodeSet::first(tree.len())).collect(),
                least_confidence: rule.threshold(),
            },
        };
        for tree in trees {
            let (confidence, alpha) = (tree.tree_confidence(), least_confidence);
            tracing::trace!(target: PIPELINE, confidence, alpha, "fallback");
        }
        self.last_step = LastStepStats { step: Some(*step), least_confidence };
        kept
    }

    /// Fills in the drafter and the needed confidence.
    pub(super) fn fill_stats(&self, stats: &mut SpeculationStats) {
        stats.least_confidence = self.last_step.least_confidence as f32;
        (stats.kind, stats.adapter) = match (&self.own, &self.usual) {
            (DraftAdapterMode::Last(Some((id, factory))), _) => (factory.kind(), id.0),
            (_, Some(factory)) => (factory.kind(), [0; 32]),
            (_, None) => (DraftKind::Nobody, [0; 32]),
        };
    }
}

impl<P: ForwardPass> Engine<P> {
    /// Adds draft tokens that are worth verification to a plan.
    pub(super) fn draft(&mut self, plan: &mut [ScheduledTokens]) {
        self.attach_expected(plan);
        let Some(cost) = self.drafts.step_cost.line().filter(|_| self.drafts.are_on()) else { return };
        if plan.is_empty() || !self.computing.pass.branches() {
            return;
        }
        let rows = plan.iter().map(|portion| portion.count).sum();
        let mut step = StepEstimate { cost, rows, sequences: plan.len(), drafting_s: 0.0 };
        self.drafts.budget.add_step(step.plain_s());
        self.drafts.unasked = self.drafts.unasked.saturating_add(1);
        let mut growing = Vec::new();
        for (index, portion) in plan.iter().enumerate() {
            let sequence = self.queues.running_mut(portion.sequence);
            if sequence.is_decoding() && !sequence.is_replay() {
                growing.extend(self.drafts.begin((index, sequence), &mut self.stats.speculation));
            }
        }
        self.drafts.grow(&mut growing, &mut step, &*self.clock);
        let mut trees = Vec::new();
        for one in growing {
            let portion = one.portion;
            let (state, tree) = self.drafts.finish(one);
            self.queues.running_mut(plan[portion].sequence).drafter_state = Some(state);
            if !tree.is_empty() {
                trees.push((portion, tree));
            }
        }
        let micros = (step.drafting_s * 1e6) as u64;
        self.stats.speculation.drafting_us = self.stats.speculation.drafting_us.saturating_add(micros);
        self.choose(plan, &step, &trees);
    }

    /// Adds the expected tokens of replays to the plan. All replays of a step share the rows of logits that
    /// scored prompts may have, which bounds the step's memory and the delay of other sequences.
    fn attach_expected(&mut self, plan: &mut [ScheduledTokens]) {
        let reserve = self.queues.running().len();
        let mut rows_left = SCORED_TOKENS;
        for portion in plan {
            let sequence = self.queues.running_mut(portion.sequence);
            if !sequence.is_replay() || !sequence.is_decoding() {
                continue;
            }
            // The pending token needs a row too.
            let tree = sequence.expected_tree(rows_left.saturating_sub(1));
            if !tree.is_empty() {
                sequence.grow(tree, &mut self.kv, reserve, &mut self.drafts.forks);
                portion.take_tree(sequence);
                rows_left = rows_left.saturating_sub(portion.count);
            }
        }
    }

    /// Adds the chosen draft tokens to the plan.
    fn choose(&mut self, plan: &mut [ScheduledTokens], step: &StepEstimate, trees: &[(usize, TokenTree)]) {
        let drafted: Vec<_> = trees.iter().map(|(_, tree)| tree).collect();
        let kept = self.drafts.choose(step, &drafted);
        for (index, _) in trees {
            if let Some(id) = self.queues.running()[plan[*index].sequence].adapter_id() {
                self.tiers.host.note_least_confidence(id, self.drafts.last_step.least_confidence);
            }
        }
        // No sequence is to be preempted because others draft.
        let reserve = self.queues.running().len();
        for ((index, tree), kept) in trees.iter().zip(kept).filter(|(_, kept)| !kept.is_empty()) {
            let portion = &mut plan[*index];
            let sequence = self.queues.running_mut(portion.sequence);
            sequence.grow(tree.pruned(kept), &mut self.kv, reserve, &mut self.drafts.forks);
            portion.take_tree(sequence);
            if let Some(provisional) = sequence.provisional() {
                self.outboxes.send_provisional(sequence.caller, provisional);
            }
        }
    }

    /// Lets the drafters of `plan` continue during its pass over `rows` rows.
    pub(super) fn begin_overlapped_drafting(&mut self, plan: &[ScheduledTokens], rows: usize) {
        let (takes, queues) = (self.drafts.takes(rows), &mut self.queues);
        let drafters = plan.iter().filter_map(|portion| {
            let state = &mut queues.running_mut(portion.sequence).drafter_state;
            Some((portion.sequence, state.take_if(|state| state.ahead.is_some())?))
        });
        self.drafts.overlapped.begin(drafters, takes);
    }

    /// Returns the drafters to their sequences.
    pub(super) fn end_overlapped_drafting(&mut self) {
        for (sequence, state) in self.drafts.overlapped.end() {
            self.queues.running_mut(sequence).drafter_state = Some(state);
        }
    }

    /// Uses this draft adapter from now on, if allowed, instead of the previous one.
    pub(super) fn use_draft_adapter(&mut self, id: AdapterId, factory: DrafterFactory) {
        if let DraftAdapterMode::Last(last) = &mut self.drafts.own {
            let before = last.replace((id, factory));
            tracing::info!(adapter = %id, "a draft adapter is in use");
            self.drop_drafters();
            drop(before);
        }
    }

    /// Stops drafting with an unloaded draft adapter.
    pub(super) fn stop_draft_adapter(&mut self, id: AdapterId) {
        if let DraftAdapterMode::Last(last) = &mut self.drafts.own
            && let Some(before) = last.take_if(|(drafts, _)| *drafts == id)
        {
            self.drop_drafters();
            drop(before);
        }
    }

    /// Ends all drafters and keeps their statistics.
    fn drop_drafters(&mut self) {
        for sequence in self.queues.iter_mut() {
            self.drafts.remember(sequence);
        }
    }

    /// Copies the partly filled block of each branching sequence to its branches.
    pub(super) fn fork(&mut self) -> Result<(), P::Error> {
        for BranchBlocks { from, to } in std::mem::take(&mut self.drafts.forks) {
            self.computing.pass.copy_block(from, to)?;
        }
        Ok(())
    }
}

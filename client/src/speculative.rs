//! Speculative decoding of a split client: tokens are drafted locally and verified in one set of round trips.
//!
//! A pass through all sites takes its round trips and the executor's computing time, plus a little for each
//! row. The client measures both times, which determine the minimum confidence of a draft token. On a link of
//! many milliseconds nearly any draft token is worth a row; in shared memory only good ones are. The measured
//! cost replaces EdgeLLM's rule, which learns this threshold from verdicts alone.
//!
//! The drafter is [`Ngram`](speculation::ngram::Ngram), from the text so far, or a smaller model
//! (`model_draft`). A model continues drafting in another thread while its draft tokens are on their way:
//!
//! ```text
//!   network  -|-- 121 round trips: verify --|-- 121 round trips: verify --|-
//!   draft    g g g g g g g g g g g g g g g  g g g g g g g g g g g g g g g g
//!            after tokens that may be rejected (speculation::draft_ahead)
//! ```
//!
//! Drafting in another thread happens only if the executor is remote, because on one machine drafting would
//! take cores from the executor.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use scheduling::perf::{fit::Fit, linear_fit::LinearFit};
use speculation::{
    draft::{Draft, DraftToken},
    draft_ahead::{DraftAhead, RerootedDraft},
    draft_deadline::DraftDeadline,
    tree::{MAX_NODES, NodeId, TokenTree},
    tree_expansion::{BranchSelector, grow},
    verification::VerificationResult,
    verify_selection::{StepEstimate, is_worth_asking, worth},
};

pub use speculation::baselines::BaselineRule;

/// Drafter of a split client, in this process; it never fails.
pub type ClientDrafter<'a> = &'a mut (dyn Draft<Error = Infallible> + Send);

/// Assumed cost of a row, as a part of a pass, until a tree was verified; good draft tokens are tried.
const FIRST_ROW_PART: f64 = 1.0 / 16.0;

/// Policy for the number of draft tokens per verification.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum DraftPolicy {
    /// As many as are worthwhile, by the measured cost of passes.
    #[default]
    Worth,
    /// Another rule that ignores the cost; for comparison.
    Compared(BaselineRule),
}

#[derive(Debug, Clone, Default)]
pub(crate) struct PassCost {
    timings: Fit,
    has_trees: bool,
}

impl PassCost {
    pub(crate) fn observe(&mut self, rows: usize, took: Duration) {
        self.has_trees |= rows > 1;
        self.timings.observe(rows as f64, took.as_secs_f64());
    }

    /// Returns the line from rows to seconds; `None` before the first pass.
    fn line(&self) -> Option<LinearFit> {
        let line = self.timings.line()?;
        let one_s = line.at(1.0);
        let assumed = LinearFit { alpha: one_s * FIRST_ROW_PART, beta: one_s * (1.0 - FIRST_ROW_PART) };
        Some(if self.has_trees { line } else { assumed })
    }

    /// Returns the expected duration of a pass of `rows` rows; `None` before the first pass.
    pub(crate) fn takes(&self, rows: usize) -> Option<Duration> {
        Duration::try_from_secs_f64(self.line()?.at(rows as f64)).ok()
    }
}

/// Drafting stats of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DraftingStats {
    /// Number of verified token trees.
    pub trees: u64,
    /// Number of verified draft tokens.
    pub nodes: u64,
    /// Number of accepted draft tokens.
    pub accepted: u64,
    /// Minimum confidence of a draft token in the last decision.
    pub threshold: f64,
    /// Time spent on drafting while nothing else could run.
    pub drafting: Duration,
    /// Number of draft tokens predicted during a verification.
    pub ahead: u64,
    /// Number of these that followed the accepted tokens and were reused.
    pub kept: u64,
    /// Time that drafting during verifications took.
    pub hidden: Duration,
}

pub(crate) struct Drafting<'a> {
    guesser: ClientDrafter<'a>,
    effort: DraftPolicy,
    /// Fit from drafted nodes to seconds.
    guesses: Fit,
    /// Draft that includes the tree in verification.
    ahead: Option<DraftAhead>,
    /// Rest of that draft after the tokens that the target has confirmed.
    settled: RerootedDraft,
    time: DraftDeadline,
    pub(crate) figures: DraftingStats,
}

struct TimedClientDrafter<'a> {
    guesser: ClientDrafter<'a>,
    time: &'a mut DraftDeadline,
}

impl Draft for TimedClientDrafter<'_> {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.guesser.accept(tokens)
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        let begun = Instant::now();
        let guesses = self.guesser.guesses(tree, at);
        self.time.observe(begun.elapsed());
        guesses
    }
}

impl<'a> Drafting<'a> {
    pub(crate) fn new(guesser: ClientDrafter<'a>, effort: DraftPolicy) -> Self {
        Self {
            guesser,
            effort,
            guesses: Fit::default(),
            ahead: None,
            settled: RerootedDraft::default(),
            time: DraftDeadline::default(),
            figures: DraftingStats::default(),
        }
    }

    /// Returns the tree to verify, with at most `max_nodes` nodes and depth `max_depth`; it may be empty.
    pub(crate) fn tree(&mut self, sweeps: &PassCost, max_nodes: usize, max_depth: usize) -> TokenTree {
        let begun = Instant::now();
        let RerootedDraft { mut tree, mut selector, .. } = std::mem::take(&mut self.settled);
        let growing = (&mut tree, &mut selector);
        let proposed = match (self.effort, sweeps.line()) {
            _ if max_nodes.min(max_depth) == 0 => TokenTree::new(),
            (DraftPolicy::Compared(rule), _) => self.ruled(&rule, growing, max_nodes),
            (DraftPolicy::Worth, Some(cost)) => self.worthy(cost, growing, max_nodes),
            // The cost of a pass is not known yet.
            (DraftPolicy::Worth, None) => TokenTree::new(),
        };
        self.ahead = Some(DraftAhead::new(tree, selector));
        self.figures.drafting += begun.elapsed();
        proposed.pruned(proposed.nodes().filter(|&node| proposed.depth(Some(node)) <= max_depth).collect())
    }

    /// Grows the tree by `rule`, and returns its most confident nodes.
    fn ruled(
        &mut self,
        rule: &BaselineRule,
        (tree, selector): (&mut TokenTree, &mut BranchSelector),
        max_nodes: usize,
    ) -> TokenTree {
        self.figures.threshold = rule.threshold();
        let mut timed = TimedClientDrafter { guesser: &mut *self.guesser, time: &mut self.time };
        let Ok(()) = rule.grow(tree, (selector, &mut timed), max_nodes.min(MAX_NODES));
        tree.pruned(tree.likeliest(max_nodes))
    }

    /// Grows the tree while worth its time; returns the nodes worth their rows where a pass costs `cost`.
    fn worthy(
        &mut self,
        cost: LinearFit,
        (tree, selector): (&mut TokenTree, &mut BranchSelector),
        max_nodes: usize,
    ) -> TokenTree {
        // A node that is not drafted yet costs drafting time too.
        let guess_s = self.guesses.line().map_or(0.0, |line| line.alpha);
        let (begun, known) = (Instant::now(), tree.len());
        let so_far = || StepEstimate { drafting_s: begun.elapsed().as_secs_f64(), ..step(cost) };
        let is_due = |tree: &TokenTree| !is_worth_asking(&so_far(), guess_s, tree, tree.next_confidence());
        let mut timed = TimedClientDrafter { guesser: &mut *self.guesser, time: &mut self.time };
        let Ok(()) = grow(tree, (selector, &mut timed), max_nodes, is_due);
        if tree.len() > known {
            self.guesses.observe((tree.len() - known) as f64, begun.elapsed().as_secs_f64());
        }
        let likeliest = tree.pruned(tree.likeliest(max_nodes));
        let worth = worth(&so_far(), &[&likeliest]);
        self.figures.threshold = worth.least_confidence;
        likeliest.pruned(worth.kept[0])
    }

    /// Whether drafting continues while a pass runs on another machine.
    pub(crate) fn goes_on(&self) -> bool {
        let is_paced = match &self.effort {
            DraftPolicy::Worth => true,
            DraftPolicy::Compared(rule) => rule.is_paced(),
        };
        is_paced && self.guesser.takes_time()
    }

    /// Runs `sweep`, which takes about `takes`, and drafts in another thread until it ends.
    pub(crate) fn meanwhile<T>(&mut self, takes: Option<Duration>, sweep: impl FnOnce() -> T) -> T {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let go_on = || self.resume_drafting(takes, &is_over);
            // If no thread can start, nothing is drafted meanwhile.
            let _ = thread::Builder::new().name("draft".to_owned()).spawn_scoped(scope, go_on);
            let swept = sweep();
            is_over.store(true, Relaxed);
            swept
        })
    }

    /// Drafts until the pass, which takes about `takes`, `is_over`.
    fn resume_drafting(&mut self, takes: Option<Duration>, is_over: &AtomicBool) {
        let begun = Instant::now();
        let RerootedDraft { tree, selector, .. } = std::mem::take(&mut self.settled);
        let mut ahead = self.ahead.take().unwrap_or_else(|| DraftAhead::new(tree, selector));
        let before = ahead.tree().len();
        match takes {
            Some(takes) => {
                self.time.begin(takes);
                let mut timed = TimedClientDrafter { guesser: &mut *self.guesser, time: &mut self.time };
                let left = || takes.saturating_sub(begun.elapsed());
                while !is_over.load(Relaxed) && timed.time.allows(left()) {
                    let (left, step) = (left(), Instant::now());
                    let Ok(has_grown) = ahead.step(&mut timed);
                    timed.time.spend(left, step.elapsed());
                    if !has_grown {
                        break;
                    }
                }
            }
            // During prefill the drafter reads the prompt too, which it needs for its first prediction.
            None => {
                let Ok(_) = ahead.step(&mut *self.guesser);
            }
        }
        self.figures.ahead += (ahead.tree().len() - before) as u64;
        self.figures.hidden += begun.elapsed();
        self.ahead = Some(ahead);
    }

    /// Records the target's `tokens` and its verdict on the tree.
    pub(crate) fn accept(&mut self, tokens: &[u32], tree: &TokenTree, verdict: &VerificationResult) {
        self.figures.trees += u64::from(!tree.is_empty());
        self.figures.nodes += tree.len() as u64;
        self.figures.accepted += verdict.accepted.len() as u64;
        if let DraftPolicy::Compared(rule) = &mut self.effort {
            rule.learn(verdict);
        }
        self.settled =
            self.ahead.take().map_or(RerootedDraft::default(), |ahead| ahead.reroot(tokens).if_any());
        self.figures.kept += self.settled.kept as u64;
        let Ok(()) = self.guesser.accept(tokens);
    }
}

/// Returns the estimate for a pass of one sequence, for which no other sequence waits.
fn step(cost: LinearFit) -> StepEstimate {
    StepEstimate { cost, rows: 1, sequences: 1, drafting_s: 0.0 }
}

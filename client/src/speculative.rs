//! Drafting at home: a split client guesses tokens and has them verified in one set of round trips (CHECKLIST D3.3).
//!
//! A *sweep*, once through all sites, takes its round trips and the executor's computing whatever it brings, and a little more
//! for each row. Both are measured, and what a row must promise follows: on a link of many milliseconds nearly any guess is
//! worth one, in shared memory only good ones are. That is EdgeLLM's threshold, in the place of a rule that learns it from
//! verdicts alone and does not know what a sweep costs.
//!
//! Who guesses is [`Ngram`](speculation::ngram::Ngram), what the text said before, or a smaller model (`model_draft`). A model goes on
//! guessing, in a thread beside, while its guesses are on their way:
//!
//! ```text
//!   network  -|-- 121 round trips: verify --|-- 121 round trips: verify --|-
//!   draft    g g g g g g g g g g g g g g  g g g g g g g g g g g g g g g g    behind tokens that may not come (speculation::draft_ahead)
//! ```
//!
//! That is done only where the executor computes on another machine: here it would take the cores that the answer waits for.

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

/// Whoever guesses for a split client. It is in this process and does not fail.
pub type ClientDrafter<'a> = &'a mut (dyn Draft<Error = Infallible> + Send);

/// As long as no tree was verified, a row is taken to cost this part of a sweep: enough for good guesses to be tried.
const FIRST_ROW_PART: f64 = 1.0 / 16.0;

/// How much is verified at once.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum DraftPolicy {
    /// As much as is worth it, by what sweeps take.
    #[default]
    Worth,
    /// By another rule, whatever it costs; for comparison.
    Compared(BaselineRule),
}

/// What sweeps take, measured.
#[derive(Debug, Clone, Default)]
pub(crate) struct PassCost {
    timings: Fit,
    has_trees: bool,
}

impl PassCost {
    /// A sweep of so many rows took so long.
    pub(crate) fn observe(&mut self, rows: usize, took: Duration) {
        self.has_trees |= rows > 1;
        self.timings.observe(rows as f64, took.as_secs_f64());
    }

    /// Rows to seconds; `None` before the first.
    fn line(&self) -> Option<LinearFit> {
        let line = self.timings.line()?;
        let one_s = line.at(1.0);
        let assumed = LinearFit { alpha: one_s * FIRST_ROW_PART, beta: one_s * (1.0 - FIRST_ROW_PART) };
        Some(if self.has_trees { line } else { assumed })
    }

    /// What a sweep of so many rows takes; `None` before the first.
    pub(crate) fn takes(&self, rows: usize) -> Option<Duration> {
        Duration::try_from_secs_f64(self.line()?.at(rows as f64)).ok()
    }
}

/// What came of drafting in an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DraftingStats {
    /// Sweeps that verified something.
    pub trees: u64,
    /// Tokens that were verified.
    pub nodes: u64,
    /// Those of them that came true.
    pub accepted: u64,
    /// The confidence that a token had to have to be worth its row, when last asked.
    pub threshold: f64,
    /// Time spent on guessing while nothing else could be done.
    pub drafting: Duration,
    /// Tokens that were guessed while others were verified.
    pub ahead: u64,
    /// Those of them that came behind what the target said, and were not guessed again.
    pub kept: u64,
    /// Time that guessing them took.
    pub hidden: Duration,
}

/// One answer's drafts.
pub(crate) struct Drafting<'a> {
    guesser: ClientDrafter<'a>,
    effort: DraftPolicy,
    /// Nodes guessed to seconds.
    guesses: Fit,
    /// What there was guessed, of which a part is being verified.
    ahead: Option<DraftAhead>,
    /// What is left of it behind what the target said since.
    settled: RerootedDraft,
    time: DraftDeadline,
    pub(crate) figures: DraftingStats,
}

/// Whoever guesses, timed.
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

    /// What is to be verified, of at most `max_nodes`, none deeper than `max_depth`; empty where nothing is worth it.
    pub(crate) fn tree(&mut self, sweeps: &PassCost, max_nodes: usize, max_depth: usize) -> TokenTree {
        let begun = Instant::now();
        let RerootedDraft { mut tree, mut pacer, .. } = std::mem::take(&mut self.settled);
        let growing = (&mut tree, &mut pacer);
        let proposed = match (self.effort, sweeps.line()) {
            _ if max_nodes.min(max_depth) == 0 => TokenTree::new(),
            (DraftPolicy::Compared(rule), _) => self.ruled(&rule, growing, max_nodes),
            (DraftPolicy::Worth, Some(cost)) => self.worthy(cost, growing, max_nodes),
            // What a sweep takes is not known yet.
            (DraftPolicy::Worth, None) => TokenTree::new(),
        };
        self.ahead = Some(DraftAhead::new(tree, pacer));
        self.figures.drafting += begun.elapsed();
        proposed.pruned(proposed.nodes().filter(|&node| proposed.depth(Some(node)) <= max_depth).collect())
    }

    /// What `rule` says of the tree, which it lets grow.
    fn ruled(
        &mut self,
        rule: &BaselineRule,
        (tree, pacer): (&mut TokenTree, &mut BranchSelector),
        max_nodes: usize,
    ) -> TokenTree {
        self.figures.threshold = rule.threshold();
        let mut timed = TimedClientDrafter { guesser: &mut *self.guesser, time: &mut self.time };
        let Ok(()) = rule.grow(tree, (pacer, &mut timed), max_nodes.min(MAX_NODES));
        tree.pruned(tree.likeliest(max_nodes))
    }

    /// What of the tree, which grows as far as that is worth its time, is worth its rows where sweeps take `cost`.
    fn worthy(
        &mut self,
        cost: LinearFit,
        (tree, pacer): (&mut TokenTree, &mut BranchSelector),
        max_nodes: usize,
    ) -> TokenTree {
        // What is not guessed yet costs the guess too.
        let guess_s = self.guesses.line().map_or(0.0, |line| line.alpha);
        let (begun, known) = (Instant::now(), tree.len());
        let so_far = || StepEstimate { drafting_s: begun.elapsed().as_secs_f64(), ..step(cost) };
        let is_due = |tree: &TokenTree| !is_worth_asking(&so_far(), guess_s, tree, tree.next_confidence());
        let mut timed = TimedClientDrafter { guesser: &mut *self.guesser, time: &mut self.time };
        let Ok(()) = grow(tree, (pacer, &mut timed), max_nodes, is_due);
        if tree.len() > known {
            self.guesses.observe((tree.len() - known) as f64, begun.elapsed().as_secs_f64());
        }
        let likeliest = tree.pruned(tree.likeliest(max_nodes));
        let worth = worth(&so_far(), &[&likeliest]);
        self.figures.threshold = worth.least_confidence;
        likeliest.pruned(worth.kept[0])
    }

    /// Whether it goes on guessing while a sweep is on its way to another machine.
    pub(crate) fn goes_on(&self) -> bool {
        let is_paced = match &self.effort {
            DraftPolicy::Worth => true,
            DraftPolicy::Compared(rule) => rule.is_paced(),
        };
        is_paced && self.guesser.takes_time()
    }

    /// Makes a `sweep` that takes about so long, and goes on guessing until it is over.
    pub(crate) fn meanwhile<T>(&mut self, takes: Option<Duration>, sweep: impl FnOnce() -> T) -> T {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let go_on = || self.resume_drafting(takes, &is_over);
            // Where there is no thread to be had, nothing is guessed meanwhile.
            let _ = thread::Builder::new().name("draft".to_owned()).spawn_scoped(scope, go_on);
            let swept = sweep();
            is_over.store(true, Relaxed);
            swept
        })
    }

    /// Goes on guessing until a sweep `is_over` that takes about so long.
    fn resume_drafting(&mut self, takes: Option<Duration>, is_over: &AtomicBool) {
        let begun = Instant::now();
        let RerootedDraft { tree, pacer, .. } = std::mem::take(&mut self.settled);
        let mut ahead = self.ahead.take().unwrap_or_else(|| DraftAhead::new(tree, pacer));
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
            // A prompt's: the draft reads it too, which it would have to before its first guess.
            None => {
                let Ok(_) = ahead.step(&mut *self.guesser);
            }
        }
        self.figures.ahead += (ahead.tree().len() - before) as u64;
        self.figures.hidden += begun.elapsed();
        self.ahead = Some(ahead);
    }

    /// The target has said `tokens`, and this of the tree.
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

/// A sweep of one sequence: nobody else waits for it.
fn step(cost: LinearFit) -> StepEstimate {
    StepEstimate { cost, rows: 1, sequences: 1, drafting_s: 0.0 }
}

//! Drafting at home: a split client guesses tokens and has them verified in one set of round trips (CHECKLIST D3.3).
//!
//! A *sweep*, once through all sites, takes its round trips and the executor's computing whatever it brings, and a little more
//! for each row. Both are measured, and what a row must promise follows: on a link of many milliseconds nearly any guess is
//! worth one, in shared memory only good ones are. That is EdgeLLM's threshold, in the place of a rule that learns it from
//! verdicts alone and does not know what a sweep costs.
//!
//! Who guesses is [`Ngram`](speculation::ngram::Ngram), what the text said before, or a smaller model (`model_draft`).

use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use policy::perf::{fit::Fit, line::Line};
use speculation::{
    draft::Draft,
    growth::{Pacer, grow},
    tree::{MAX_NODES, TokenTree},
    verdict::Verdict,
    worth::{Step, is_worth_asking, worth},
};

pub use speculation::baseline::Rule;

/// Whoever guesses for a split client. It is in this process and does not fail.
pub type Guesser<'a> = &'a mut dyn Draft<Error = Infallible>;

/// As long as no tree was verified, a row is taken to cost this part of a sweep: enough for good guesses to be tried.
const FIRST_ROW_PART: f64 = 1.0 / 16.0;

/// How much is verified at once.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Effort {
    /// As much as is worth it, by what sweeps take.
    #[default]
    Worth,
    /// By another rule, whatever it costs; for comparison.
    Compared(Rule),
}

/// What sweeps take, measured.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sweeps {
    timings: Fit,
    has_trees: bool,
}

impl Sweeps {
    /// A sweep of so many rows took so long.
    pub(crate) fn observe(&mut self, rows: usize, took: Duration) {
        self.has_trees |= rows > 1;
        self.timings.observe(rows as f64, took.as_secs_f64());
    }

    /// Rows to seconds; `None` before the first.
    fn line(&self) -> Option<Line> {
        let line = self.timings.line()?;
        let one_s = line.at(1.0);
        let assumed = Line { alpha: one_s * FIRST_ROW_PART, beta: one_s * (1.0 - FIRST_ROW_PART) };
        Some(if self.has_trees { line } else { assumed })
    }
}

/// What came of drafting in an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Drafted {
    /// Sweeps that verified something.
    pub trees: u64,
    /// Tokens that were verified.
    pub nodes: u64,
    /// Those of them that came true.
    pub accepted: u64,
    /// The confidence that a token had to have to be worth its row, when last asked.
    pub threshold: f64,
    /// Time spent on guessing.
    pub drafting: Duration,
}

/// One answer's drafts.
pub(crate) struct Drafting<'a> {
    guesser: Guesser<'a>,
    effort: Effort,
    /// Nodes guessed to seconds.
    guesses: Fit,
    pub(crate) figures: Drafted,
}

impl<'a> Drafting<'a> {
    pub(crate) fn new(guesser: Guesser<'a>, effort: Effort) -> Self {
        Self { guesser, effort, guesses: Fit::default(), figures: Drafted::default() }
    }

    /// What is to be verified, of at most `max_nodes`, none deeper than `max_depth`; empty where nothing is worth it.
    pub(crate) fn tree(&mut self, sweeps: &Sweeps, max_nodes: usize, max_depth: usize) -> TokenTree {
        let begun = Instant::now();
        let tree = match (self.effort, sweeps.line()) {
            _ if max_nodes.min(max_depth) == 0 => TokenTree::new(),
            (Effort::Compared(rule), _) => {
                self.figures.threshold = rule.threshold();
                let mut tree = TokenTree::new();
                let growing = (&mut Pacer::default(), &mut *self.guesser);
                let Ok(()) = rule.grow(&mut tree, growing, max_nodes.min(MAX_NODES));
                tree
            }
            (Effort::Worth, Some(cost)) => self.worthy(cost, max_nodes),
            // What a sweep takes is not known yet.
            (Effort::Worth, None) => TokenTree::new(),
        };
        self.figures.drafting += begun.elapsed();
        tree.pruned(tree.nodes().filter(|&node| tree.depth(Some(node)) <= max_depth).collect())
    }

    /// What is worth its rows where sweeps take `cost`.
    fn worthy(&mut self, cost: Line, max_nodes: usize) -> TokenTree {
        // What is not guessed yet costs the guess too.
        let guess_s = self.guesses.line().map_or(0.0, |line| line.alpha);
        let begun = Instant::now();
        let so_far = || Step { drafting_s: begun.elapsed().as_secs_f64(), ..step(cost) };
        let is_due = |tree: &TokenTree| !is_worth_asking(&so_far(), guess_s, tree, tree.next_confidence());
        let mut tree = TokenTree::new();
        let growing = (&mut Pacer::default(), &mut *self.guesser);
        let Ok(()) = grow(&mut tree, growing, max_nodes, is_due);
        if !tree.is_empty() {
            self.guesses.observe(tree.len() as f64, begun.elapsed().as_secs_f64());
        }
        let worth = worth(&so_far(), &[&tree]);
        self.figures.threshold = worth.least_confidence;
        tree.pruned(worth.kept[0])
    }

    /// The target has said `tokens`, and this of the tree.
    pub(crate) fn accept(&mut self, tokens: &[u32], tree: &TokenTree, verdict: &Verdict) {
        self.figures.trees += u64::from(!tree.is_empty());
        self.figures.nodes += tree.len() as u64;
        self.figures.accepted += verdict.accepted.len() as u64;
        if let Effort::Compared(rule) = &mut self.effort {
            rule.learn(verdict);
        }
        let Ok(()) = self.guesser.accept(tokens);
    }
}

/// A sweep of one sequence: nobody else waits for it.
fn step(cost: Line) -> Step {
    Step { cost, rows: 1, sequences: 1, drafting_s: 0.0 }
}

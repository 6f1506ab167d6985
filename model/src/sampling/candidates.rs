//! The few tokens that top-k, top-p and min-p leave, found without sorting the vocabulary.

use std::collections::BinaryHeap;

use super::{SamplingRequest, by_rank, softmax::Weights};

/// A token in a heap whose top is the lowest-ranked of the tokens kept so far.
#[derive(Debug, Clone, Copy)]
struct Ranked {
    logit: f32,
    token: u32,
}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        by_rank((self.logit, self.token), (other.logit, other.token))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ranked {}

/// All logits with their tokens, what is not a number as minus infinity.
fn tokens(logits: &[f32]) -> impl Iterator<Item = Ranked> + '_ {
    (0u32..).zip(logits).map(|(token, &logit)| Ranked {
        logit: if logit.is_nan() { f32::NEG_INFINITY } else { logit },
        token,
    })
}

/// The `count` highest-ranked tokens, best first, in one pass with a heap of that size.
pub(super) fn largest(logits: &[f32], count: usize) -> Vec<u32> {
    best(logits, count)
        .into_iter()
        .map(|ranked| ranked.token)
        .collect()
}

fn best(logits: &[f32], count: usize) -> Vec<Ranked> {
    let count = count.min(logits.len());
    let mut heap: BinaryHeap<Ranked> = tokens(logits).take(count).collect();
    // Nearly every token fails this first comparison, which needs no heap.
    let mut bar = heap.peek().map_or(f32::INFINITY, |lowest| lowest.logit);
    for ranked in tokens(logits).skip(count) {
        if ranked.logit > bar {
            if let Some(mut lowest) = heap.peek_mut() {
                *lowest = ranked;
            }
            bar = heap.peek().map_or(f32::INFINITY, |lowest| lowest.logit);
        }
    }
    heap.into_sorted_vec()
}

/// Every token with at least `weight`, highest-ranked first.
fn at_least(weights: &Weights<'_>, weight: f32) -> Vec<Ranked> {
    // A little lower than asked, because the logarithm rounds: callers cut exactly.
    let bar = weights.logit_of_weight(weight * 0.999);
    let mut found: Vec<Ranked> = tokens(weights.logits)
        .filter(|ranked| ranked.logit >= bar)
        .collect();
    found.sort_unstable();
    found
}

/// Enough of the highest-ranked tokens to hold `mass` of weight.
fn holding(weights: &Weights<'_>, mass: f64) -> Vec<Ranked> {
    // Measuring is cheaper than sorting, so the bar is lowered until enough is above it. Sharp distributions, which
    // is what models give, need one or two steps; the last bar is below every weight.
    const BARS: [f32; 6] = [0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-30];
    let enough = BARS.into_iter().find(|&bar| weights.total_at_least(bar) >= mass);
    at_least(weights, enough.unwrap_or(0.0))
}

/// What the filters leave: tokens with their weights, highest-ranked first, at least one.
#[derive(Debug, Clone)]
pub(super) struct Candidates(Vec<(u32, f64)>);

impl Candidates {
    /// Applies the filters of `request`; `None` if it has none and every token stays.
    pub(super) fn select(weights: &Weights<'_>, request: &SamplingRequest) -> Option<Self> {
        let vocabulary = weights.logits.len();
        let top_k = usize::try_from(request.top_k).unwrap_or(usize::MAX);
        let (found, total) = if (1..vocabulary).contains(&top_k) {
            let found = best(weights.logits, top_k);
            let total = found
                .iter()
                .map(|ranked| f64::from(weights.of(ranked.logit)))
                .sum();
            (found, total)
        } else if request.top_p < 1.0 {
            let total = weights.total();
            (holding(weights, f64::from(request.top_p) * total), total)
        } else if request.min_p > 0.0 {
            (at_least(weights, request.min_p), f64::INFINITY)
        } else {
            return None;
        };
        let weighted = found
            .into_iter()
            .map(|ranked| (ranked.token, f64::from(weights.of(ranked.logit))));
        Some(Self::cut(weighted, total, request))
    }

    /// The prefix of `ranked` that top-p and min-p leave. `total` is the weight top-p is a fraction of. A token
    /// stays if those before it hold less than `top_p` (transformers' `TopPLogitsWarper`) and it has `min_p` of
    /// the first one's weight (`MinPLogitsWarper`); the first one always stays.
    fn cut(ranked: impl Iterator<Item = (u32, f64)>, total: f64, request: &SamplingRequest) -> Self {
        let enough = if request.top_p < 1.0 {
            f64::from(request.top_p) * total
        } else {
            f64::INFINITY
        };
        let least = f64::from(request.min_p);
        let mut before = 0.0;
        let kept = ranked.enumerate().take_while(|&(index, (_, weight))| {
            let keep = index == 0 || (before < enough && weight >= least);
            before += weight;
            keep
        });
        Self(kept.map(|(_, candidate)| candidate).collect())
    }

    /// The token at `draw` (in [0, 1)) of the distribution over what is left.
    pub(super) fn pick(&self, draw: f64) -> u32 {
        let mut rest = draw * self.0.iter().map(|&(_, weight)| weight).sum::<f64>();
        for &(token, weight) in &self.0 {
            if rest < weight {
                return token;
            }
            rest -= weight;
        }
        // Rounding may leave `rest` just beyond the end: then it is the last token that has any weight.
        let possible = self.0.iter().rev().find(|&&(_, weight)| weight > 0.0);
        possible.or(self.0.first()).map_or(0, |&(token, _)| token)
    }
}

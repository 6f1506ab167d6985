//! Finds the few tokens that top-k, top-p and min-p leave, without sorting the vocabulary.

use std::{cmp::Ordering, collections::BinaryHeap};

use super::{
    request::Sampling,
    softmax::{Scale, TokenWeights, clean},
};

/// A token in filter order, smallest first: larger logits first, then lower ids.
#[derive(Debug, Clone, Copy)]
struct RankedLogit {
    /// Logit after `clean`, so never NaN.
    logit: f32,
    token: u32,
}

impl Ord for RankedLogit {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_logit = other.logit.partial_cmp(&self.logit).unwrap_or(Ordering::Equal);
        by_logit.then(self.token.cmp(&other.token))
    }
}

impl PartialOrd for RankedLogit {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for RankedLogit {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for RankedLogit {}

fn tokens(logits: &[f32]) -> impl Iterator<Item = RankedLogit> + '_ {
    (0u32..).zip(logits).map(|(token, &logit)| RankedLogit { logit: clean(logit), token })
}

/// Returns the `count` tokens with the largest logits, best first, lower ids first on ties.
pub(super) fn largest(logits: &[f32], count: usize) -> Vec<u32> {
    best(logits, count).into_iter().map(|ranked| ranked.token).collect()
}

/// Returns the `count` highest-ranked tokens, best first, in one pass with a heap of that size.
fn best(logits: &[f32], count: usize) -> Vec<RankedLogit> {
    let count = count.min(logits.len());
    let mut heap: BinaryHeap<RankedLogit> = tokens(logits).take(count).collect();
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

/// Returns every token with at least `weight`, best first, and perhaps some just below it, which callers cut.
fn at_least(logits: &[f32], scale: Scale, weight: f32) -> Vec<RankedLogit> {
    let bar = scale.logit_of(weight * 0.999);
    let mut found: Vec<RankedLogit> = tokens(logits).filter(|ranked| ranked.logit >= bar).collect();
    found.sort_unstable();
    found
}

/// Returns enough of the highest-ranked tokens to hold `mass` of the weights, best first.
fn holding(logits: &[f32], scale: Scale, weights: &TokenWeights, mass: f64) -> Vec<RankedLogit> {
    // Measuring is cheaper than sorting, so the bar is lowered until enough weight is above it. Sharp
    // distributions, as models usually give, need one or two steps; the last bar is below every weight.
    const BARS: [f32; 10] = [0.3, 0.1, 0.03, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-30];
    let enough = BARS.into_iter().find(|&bar| weights.total_at_least(bar) >= mass);
    at_least(logits, scale, enough.unwrap_or(0.0))
}

/// Tokens that the filters leave, with weights, best first; at least one.
#[derive(Debug, Clone)]
pub(super) struct Candidates(Vec<(u32, f64)>);

impl Candidates {
    /// Applies the filters of `request` to clean `logits`; `None` means that no filter is set.
    pub(super) fn select(logits: &[f32], scale: Scale, request: &Sampling) -> Option<Self> {
        let top_k = usize::try_from(request.top_k).unwrap_or(usize::MAX);
        let weight = |ranked: &RankedLogit| f64::from(scale.weight(ranked.logit));
        let (found, total) = if (1..logits.len()).contains(&top_k) {
            let found = best(logits, top_k);
            let total = found.iter().map(weight).sum();
            (found, total)
        } else if request.top_p < 1.0 {
            let weights = TokenWeights::new(logits, scale);
            let total = weights.total();
            (holding(logits, scale, &weights, f64::from(request.top_p) * total), total)
        } else if request.min_p > 0.0 {
            (at_least(logits, scale, request.min_p), f64::INFINITY)
        } else {
            return None;
        };
        let weighted = found.iter().map(|ranked| (ranked.token, weight(ranked)));
        Some(Self::cut(weighted, total, request))
    }

    /// Returns the prefix of `ranked` that top-p and min-p leave; `top_p` is a fraction of `total`. A token
    /// stays if the tokens before it hold less than `top_p` (transformers' `TopPLogitsWarper`) and it has
    /// `min_p` of the first one's weight (`MinPLogitsWarper`). The first token always stays.
    fn cut(ranked: impl Iterator<Item = (u32, f64)>, total: f64, request: &Sampling) -> Self {
        let enough = if request.top_p < 1.0 { f64::from(request.top_p) * total } else { f64::INFINITY };
        let least = f64::from(request.min_p);
        let mut before = 0.0;
        let kept = ranked.enumerate().take_while(|&(index, (_, weight))| {
            let keep = index == 0 || (before < enough && weight >= least);
            before += weight;
            keep
        });
        Self(kept.map(|(_, candidate)| candidate).collect())
    }

    /// Returns the token at `draw` (in [0, 1)) of the remaining distribution, if any weight is not zero.
    pub(super) fn pick(&self, draw: f64) -> Option<u32> {
        let mut rest = draw * self.0.iter().map(|&(_, weight)| weight).sum::<f64>();
        let mut chosen = None;
        // Rounding may leave `rest` just beyond the end; then the last token with weight is chosen.
        for &(token, weight) in self.0.iter().filter(|&&(_, weight)| weight > 0.0) {
            chosen = Some(token);
            if rest < weight {
                break;
            }
            rest -= weight;
        }
        chosen
    }
}

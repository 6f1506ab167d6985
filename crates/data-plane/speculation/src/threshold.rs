//! The confidence threshold of verification, adjusted by its results (EdgeLLM §III-C, L-08, L-09).
//!
//! T_c, the tree's confidence, is the chance that its best branch is accepted to its end. Drafting continues
//! while T_c is at least alpha; then the target verifies (*fallback*). Alpha is halved after a fully accepted
//! branch. After an error it rises by the [`ThresholdRule`].

use crate::{tree::TokenTree, verification::VerificationResult};

/// Initial alpha; the paper finds that the value hardly matters (Fig. 12).
pub const INITIAL_ALPHA: f64 = 0.01;

/// Bounds of alpha: below, a tree would be full before it is due; above, each token is verified alone.
const ALPHA_RANGE: (f64, f64) = (1e-6, 0.9);

/// Factor on alpha when everything was accepted (Eq. 3; the best of those in Fig. 12).
const TRUST: f64 = 0.5;

/// The rule for alpha after an error. The most matching branch has N_all tokens, N_correct accepted tokens
/// and confidence C.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThresholdRule {
    /// `alpha / C^((N_all - N_correct) / N_all)`, as the paper's text says: alpha divided by "the average
    /// cumulative confidence of all tokens subsequent to the incorrectly generated one". C^(1/N_all) is the
    /// mean probability of a token of the branch, and N_all - N_correct tokens were rejected.
    #[default]
    Exp,
    /// `(N_all - N_correct) / N_all`: Eq. 3 as printed. The rule ignores the former alpha. After a wrong
    /// first token alpha is 1, so each token is then verified alone.
    Printed,
    /// `alpha` divided by the product of the actual probabilities of the rejected tokens.
    Suffix,
}

/// Alpha of one adapter and client, with its rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    rule: ThresholdRule,
    alpha: f64,
}

impl Default for Threshold {
    fn default() -> Self {
        Self::new(ThresholdRule::default())
    }
}

impl Threshold {
    /// Creates a threshold with [`INITIAL_ALPHA`].
    #[must_use]
    pub fn new(rule: ThresholdRule) -> Self {
        Self { rule, alpha: INITIAL_ALPHA }
    }

    /// Returns alpha, the confidence below which a tree is verified.
    #[must_use]
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// Whether `tree` is to be verified now; asked after every draft token.
    #[must_use]
    pub fn is_due(&self, tree: &TokenTree) -> bool {
        tree.tree_confidence() < self.alpha
    }

    /// Adjusts alpha to a verification result. A result without draft tokens changes nothing.
    pub fn learn(&mut self, verdict: &VerificationResult) {
        let &VerificationResult { all, correct, confidence, suffix, .. } = verdict;
        if all == 0 {
            return;
        }
        let wrong_part = all.saturating_sub(correct) as f64 / all as f64;
        let alpha = match self.rule {
            _ if correct >= all => self.alpha * TRUST,
            ThresholdRule::Exp => self.alpha / confidence.powf(wrong_part),
            ThresholdRule::Printed => wrong_part,
            ThresholdRule::Suffix => self.alpha / suffix,
        };
        // A division by zero gives infinity, which is clamped. NaN cannot occur, since alpha is never zero.
        self.alpha = alpha.clamp(ALPHA_RANGE.0, ALPHA_RANGE.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result for a chain of tokens with these probabilities and `correct` accepted tokens.
    fn verdict(probabilities: &[f64], correct: usize) -> VerificationResult {
        VerificationResult {
            accepted: Vec::new(),
            bonus: Some(0),
            all: probabilities.len(),
            correct,
            confidence: probabilities.iter().product(),
            suffix: probabilities[correct..].iter().product(),
        }
    }

    /// By hand: a chain of 0.9 0.8 0.5 0.4 (C = 0.144), with alpha 0.01 before.
    #[test]
    fn alpha_moves_as_each_rule_says() {
        let chain = [0.9, 0.8, 0.5, 0.4];
        let golden = [
            // (right, exp, printed, suffix)
            (4, 0.005, 0.005, 0.005),
            // 0.01 / 0.144^(1/4), 1/4, 0.01 / 0.4
            (3, 0.016_233, 0.25, 0.025),
            // 0.01 / 0.144^(1/2), 2/4, 0.01 / 0.2
            (2, 0.026_352, 0.5, 0.05),
            // 0.01 / 0.144^(3/4), 3/4, 0.01 / 0.16
            (1, 0.042_778, 0.75, 0.062_5),
            // 0.01 / 0.144, 1 (clamped to 0.9), 0.01 / 0.144
            (0, 0.069_444, 0.9, 0.069_444),
        ];
        for (correct, exp, printed, suffix) in golden {
            for (rule, expected) in [
                (ThresholdRule::Exp, exp),
                (ThresholdRule::Printed, printed),
                (ThresholdRule::Suffix, suffix),
            ] {
                let mut threshold = Threshold::new(rule);
                threshold.learn(&verdict(&chain, correct));
                assert!((threshold.alpha() - expected).abs() < 1e-6, "{rule:?} {correct}: {threshold:?}");
            }
        }
    }

    #[test]
    fn as_printed_one_wrong_first_token_undoes_all_that_was_learned() {
        let tokens_until_due = |rule| {
            let mut threshold = Threshold::new(rule);
            for _ in 0..10 {
                threshold.learn(&verdict(&[0.8; 12], 12));
            }
            threshold.learn(&verdict(&[0.8; 12], 0));
            let (mut tree, mut chain) = (TokenTree::new(), None);
            while !threshold.is_due(&tree) && !tree.is_full() {
                chain = tree.push(chain, 1, 0.8);
            }
            tree.len()
        };
        assert_eq!(tokens_until_due(ThresholdRule::Printed), 1, "each token is verified alone");
        assert!(tokens_until_due(ThresholdRule::Exp) > 20, "one error in 132 tokens");
    }

    #[test]
    fn alpha_stays_within_its_bounds_whatever_comes() {
        for rule in [ThresholdRule::Exp, ThresholdRule::Printed, ThresholdRule::Suffix] {
            let mut threshold = Threshold::new(rule);
            (0..100).for_each(|_| threshold.learn(&verdict(&[0.5; 4], 4)));
            assert_eq!(threshold.alpha(), ALPHA_RANGE.0);
            (0..100).for_each(|_| threshold.learn(&verdict(&[0.0; 4], 0)));
            assert_eq!(threshold.alpha(), ALPHA_RANGE.1);
            threshold.learn(&verdict(&[], 0));
            assert_eq!(threshold.alpha(), ALPHA_RANGE.1, "nothing was guessed");
        }
    }
}

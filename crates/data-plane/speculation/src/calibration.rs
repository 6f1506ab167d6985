//! Measured acceptance of a model's draft tokens, by the probability that the model gives them.
//!
//! A drafter model's probability is not the acceptance probability. A small model is overconfident, a model
//! with a shortlist does not know the other tokens, and a sampling target picks the likeliest token less
//! often. The acceptance is therefore measured, as in [`ngram`](crate::ngram).

use crate::{acceptance_rate::RateEstimate, draft::DraftToken};

/// Least probability of each class of probabilities that are counted together.
const CLASSES: [f64; 8] = [0.0, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9, 0.97];

/// Prior acceptance of the likeliest draft token of a position.
const USUAL: f64 = 0.6;

/// Acceptance of a model's draft tokens. A sequence learns the table and hands it to the next sequence of the
/// same adapter and client ([`LruTable`](crate::lru::LruTable)).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Calibration {
    /// Counts by class, for the likeliest draft token of a position and for the others.
    counted: [[RateEstimate; 2]; CLASSES.len()],
    /// Count of the likeliest draft token of all positions.
    usual: RateEstimate,
}

impl Calibration {
    /// Returns the acceptance probability of a token of this rank (0: likeliest) and model probability.
    #[must_use]
    pub fn of(&self, probability: f64, rank: usize) -> f64 {
        self.counted[class(probability)][rank.min(1)].chance(probability.clamp(0.0, 1.0))
    }

    /// Returns the acceptance probability of the likeliest draft token at a position still unknown.
    #[must_use]
    pub fn usual(&self) -> f64 {
        self.usual.chance(USUAL)
    }

    /// Turns the model's tokens and probabilities `said`, likeliest first, into draft tokens.
    pub fn guesses<'a>(
        &'a self,
        said: impl Iterator<Item = (u32, f64)> + 'a,
    ) -> impl Iterator<Item = DraftToken> + 'a {
        let mut left = 1.0_f64;
        said.enumerate().map(move |(rank, (token, probability))| {
            // The draft tokens exclude each other, so their probabilities sum to at most 1.
            let probability = self.of(probability, rank).min(left);
            left -= probability;
            DraftToken { token, probability }
        })
    }

    /// Counts a position where the model predicted `said` and the target emitted `truth`.
    pub fn count(&mut self, said: &[(u32, f64)], truth: u32) {
        for (rank, &(token, probability)) in said.iter().enumerate() {
            self.counted[class(probability)][rank.min(1)].count(token == truth);
        }
        if let Some(&(first, _)) = said.first() {
            self.usual.count(first == truth);
        }
    }
}

fn class(probability: f64) -> usize {
    CLASSES.iter().rposition(|&least| least <= probability).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_believed_until_it_was_counted_and_what_was_counted_after() {
        let mut calibration = Calibration::default();
        let near = |chance: f64, wanted: f64| (chance - wanted).abs() < 1e-9;
        assert!(near(calibration.of(0.95, 0), 0.95) && near(calibration.of(0.3, 2), 0.3));
        for round in 0..200 {
            calibration.count(&[(1, 0.95), (2, 0.03)], if round % 2 == 0 { 1 } else { 2 });
        }
        let said = [calibration.of(0.95, 0), calibration.of(0.03, 1), calibration.usual()];
        assert!(said.iter().all(|chance| (chance - 0.5).abs() < 0.15), "half of both came true: {said:?}");
        assert!(near(calibration.of(0.85, 0), 0.85), "others were not counted");
    }

    #[test]
    fn guesses_of_a_place_exclude_each_other() {
        let mut calibration = Calibration::default();
        (0..50).for_each(|_| calibration.count(&[(7, 0.5), (8, 0.3)], 7));
        let guesses: Vec<_> = calibration.guesses([(1, 0.5), (2, 0.3), (3, 0.2)].into_iter()).collect();
        let sum: f64 = guesses.iter().map(|guess| guess.probability).sum();
        assert!(guesses[0].probability > 0.9 && sum <= 1.0 + 1e-12, "{guesses:?}");
    }
}

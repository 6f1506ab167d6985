//! How often what a model guesses comes true, by how sure it sounds.
//!
//! A model's own probability says how it would go on, not how the target does: a small one is too sure of itself, one that guesses among
//! a shortlist does not know what is not on it, and a target that samples picks the likeliest less often than one that does not. So
//! it is counted, as [`ngram`](crate::ngram) does.

use crate::{acceptance_rate::RateEstimate, draft::DraftToken};

/// Probabilities that are counted together: the first begins at 0, each ends where the next begins.
const CLASSES: [f64; 8] = [0.0, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9, 0.97];

/// What is expected of the likeliest guess of a place before any was counted.
const USUAL: f64 = 0.6;

/// How far a model's guesses are to be trusted. It is learned within a sequence, and handed on to the next of the same adapter
/// and client ([`LruTable`](crate::lru::LruTable)).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Calibration {
    /// By class, the likeliest guess of a place and the others.
    counted: [[RateEstimate; 2]; CLASSES.len()],
    /// The likeliest of all places.
    usual: RateEstimate,
}

impl Calibration {
    /// The chance that the guess of this rank, 0 the likeliest, comes true where the model gives it this probability.
    #[must_use]
    pub fn of(&self, probability: f64, rank: usize) -> f64 {
        self.counted[class(probability)][rank.min(1)].chance(probability.clamp(0.0, 1.0))
    }

    /// The chance that the likeliest guess of a place comes true of which nothing is known yet.
    #[must_use]
    pub fn usual(&self) -> f64 {
        self.usual.chance(USUAL)
    }

    /// Makes what the model says, the likeliest first, into guesses.
    pub fn guesses<'a>(
        &'a self,
        said: impl Iterator<Item = (u32, f64)> + 'a,
    ) -> impl Iterator<Item = DraftToken> + 'a {
        let mut left = 1.0_f64;
        said.enumerate().map(move |(rank, (token, probability))| {
            // They exclude each other.
            let probability = self.of(probability, rank).min(left);
            left -= probability;
            DraftToken { token, probability }
        })
    }

    /// At a place where the model `said` so, the target said `truth`.
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

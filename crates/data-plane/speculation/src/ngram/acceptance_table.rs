//! How often what followed a match came again.

use crate::acceptance_rate::RateEstimate;

/// Lengths of matches that are counted together: the first is 1, each ends before the next begins.
const CLASSES: [usize; 7] = [1, 2, 3, 4, 6, 10, 18];

/// What is expected of each before anything was counted, for the likeliest guess and for the others: what came out for prose;
/// programs repeat more, logs and JSON much more (docs/performance/speculation.md).
const EXPECTED: [[f64; 2]; 7] =
    [[0.13, 0.05], [0.30, 0.05], [0.48, 0.05], [0.57, 0.05], [0.67, 0.05], [0.78, 0.04], [0.85, 0.02]];

/// How often guesses came true, by the length of their match, newer ones counting more. It is learned within a sequence, and
/// handed on to the next of the same adapter and client ([`LruTable`](crate::lru::LruTable)).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AcceptanceTable {
    counted: [[RateEstimate; 2]; CLASSES.len()],
}

impl AcceptanceTable {
    /// The chance that the guess of this rank, 0 the likeliest, behind so many equal tokens comes true.
    #[must_use]
    pub fn of(&self, matched: usize, rank: usize) -> f64 {
        let (class, rank) = places(matched, rank);
        self.counted[class][rank].chance(EXPECTED[class][rank])
    }

    /// Such a guess came true, or did not.
    pub(super) fn count(&mut self, matched: usize, rank: usize, is_right: bool) {
        let (class, rank) = places(matched, rank);
        self.counted[class][rank].count(is_right);
    }
}

fn places(matched: usize, rank: usize) -> (usize, usize) {
    (CLASSES.iter().rposition(|&least| least <= matched).unwrap_or(0), rank.min(1))
}

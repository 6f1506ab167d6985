//! Measured acceptance of the n-gram drafter's draft tokens.

use crate::acceptance_rate::RateEstimate;

/// Least match length of each class of lengths that are counted together.
const CLASSES: [usize; 7] = [1, 2, 3, 4, 6, 10, 18];

/// Prior acceptance of each class, for the likeliest draft token and for the others, as measured on prose.
/// Programs repeat more, logs and JSON much more (docs/performance/speculation.md).
const EXPECTED: [[f64; 2]; 7] =
    [[0.13, 0.05], [0.30, 0.05], [0.48, 0.05], [0.57, 0.05], [0.67, 0.05], [0.78, 0.04], [0.85, 0.02]];

/// Acceptance of draft tokens by match length, with more weight on newer ones. A sequence learns the table
/// and hands it to the next sequence of the same adapter and client ([`LruTable`](crate::lru::LruTable)).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AcceptanceTable {
    counted: [[RateEstimate; 2]; CLASSES.len()],
}

impl AcceptanceTable {
    /// Returns the acceptance probability of the token of rank `rank` (0: likeliest) after a match.
    #[must_use]
    pub fn of(&self, matched: usize, rank: usize) -> f64 {
        let (class, rank) = places(matched, rank);
        self.counted[class][rank].chance(EXPECTED[class][rank])
    }

    /// Counts whether such a draft token was accepted.
    pub(super) fn count(&mut self, matched: usize, rank: usize, is_right: bool) {
        let (class, rank) = places(matched, rank);
        self.counted[class][rank].count(is_right);
    }
}

fn places(matched: usize, rank: usize) -> (usize, usize) {
    (CLASSES.iter().rposition(|&least| least <= matched).unwrap_or(0), rank.min(1))
}

//! A running acceptance rate with more weight on newer draft tokens.

/// Number of draft tokens that the prior counts for.
const WEIGHT: f64 = 6.0;

/// Factor on older counts per new draft token. The last thirty or so matter.
const DECAY: f64 = 0.97;

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RateEstimate {
    guesses: f64,
    right: f64,
}

impl RateEstimate {
    /// Returns the acceptance probability of the next draft token, given the prior `expected`.
    pub(crate) fn chance(self, expected: f64) -> f64 {
        (self.right + expected * WEIGHT) / (self.guesses + WEIGHT)
    }

    /// Counts whether one draft token was accepted.
    pub(crate) fn count(&mut self, is_right: bool) {
        self.guesses = self.guesses * DECAY + 1.0;
        self.right = self.right * DECAY + f64::from(u8::from(is_right));
    }
}

//! How often guesses of a kind came true, newer ones counting more.

/// Guesses that an expectation counts for.
const WEIGHT: f64 = 6.0;

/// What a guess counts when another one comes: about the last thirty matter.
const DECAY: f64 = 0.97;

/// See the module.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RateEstimate {
    guesses: f64,
    right: f64,
}

impl RateEstimate {
    /// The chance that the next comes true, where so much was `expected` before any was counted.
    pub(crate) fn chance(self, expected: f64) -> f64 {
        (self.right + expected * WEIGHT) / (self.guesses + WEIGHT)
    }

    /// One came true, or did not.
    pub(crate) fn count(&mut self, is_right: bool) {
        self.guesses = self.guesses * DECAY + 1.0;
        self.right = self.right * DECAY + f64::from(u8::from(is_right));
    }
}

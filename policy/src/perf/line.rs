//! Straight lines through timings: `seconds = alpha · work + beta`, neither of them negative (CaraServe §5, C-12).

/// Longest time that is taken in or predicted; keeps all arithmetic far from the ends of `f64`.
const MAX_SECONDS: f64 = 1e9;

/// Shortest time a clock tells from nothing.
const MIN_SECONDS: f64 = 1e-9;

/// Most work that is taken in.
const MAX_WORK: f64 = 1e19;

/// One timing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// How much there was to do.
    pub work: f64,
    /// How long it took.
    pub seconds: f64,
}

impl Sample {
    /// A timing; what is no number, negative or beyond all measure is brought to the nearest that can be.
    #[must_use]
    pub fn new(work: f64, seconds: f64) -> Self {
        Self { work: within(work, 0.0, MAX_WORK), seconds: within(seconds, MIN_SECONDS, MAX_SECONDS) }
    }
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Seconds for a unit of work; not negative.
    pub alpha: f64,
    /// Seconds for being asked at all; not negative.
    pub beta: f64,
}

impl Line {
    /// The line of least squares among those that are nowhere negative; `None` without samples. Samples of one size
    /// say nothing about `beta`: the line then goes through zero.
    #[must_use]
    pub fn least_squares(samples: &[Sample]) -> Option<Self> {
        Self::weighted(samples.iter().map(|&sample| (sample, 1.0)))
    }

    /// As [`least_squares`](Self::least_squares), each sample with a positive weight.
    pub(super) fn weighted(samples: impl Iterator<Item = (Sample, f64)> + Clone) -> Option<Self> {
        let (mut weights, mut works, mut times) = (0.0, 0.0, 0.0);
        for (Sample { work, seconds }, weight) in samples.clone() {
            weights += weight;
            works += weight * work;
            times += weight * seconds;
        }
        if weights <= 0.0 {
            return None;
        }
        let (mean_work, mean_time) = (works / weights, times / weights);
        // About the means, so that nothing cancels.
        let (mut variance, mut covariance, mut squares, mut products) = (0.0, 0.0, 0.0, 0.0);
        for (Sample { work, seconds }, weight) in samples {
            variance += weight * (work - mean_work) * (work - mean_work);
            covariance += weight * (work - mean_work) * (seconds - mean_time);
            squares += weight * work * work;
            products += weight * work * seconds;
        }
        let flat = Self { alpha: 0.0, beta: mean_time };
        let through_zero = if squares > 0.0 { Self { alpha: products / squares, beta: 0.0 } } else { flat };
        if variance <= squares * 1e-12 {
            return Some(through_zero);
        }
        let alpha = covariance / variance;
        let beta = mean_time - alpha * mean_work;
        Some(match (alpha >= 0.0, beta >= 0.0) {
            (true, true) => Self { alpha, beta },
            (true, false) => through_zero,
            (false, _) => flat,
        })
    }

    /// Seconds that `work` takes: finite and not negative.
    #[must_use]
    pub fn at(self, work: f64) -> f64 {
        (self.alpha * within(work, 0.0, MAX_WORK) + self.beta).min(MAX_SECONDS)
    }

    /// The part of the samples' variance that the line explains, from 0 (no better than their mean) to 1.
    #[must_use]
    pub fn r_squared(self, samples: &[Sample]) -> f64 {
        let mean = samples.iter().map(|sample| sample.seconds).sum::<f64>() / samples.len().max(1) as f64;
        let sum_of = |error: &dyn Fn(&Sample) -> f64| samples.iter().map(|s| error(s).powi(2)).sum::<f64>();
        let unexplained = sum_of(&|sample| sample.seconds - self.at(sample.work));
        let variance = sum_of(&|sample| sample.seconds - mean);
        if unexplained <= f64::MIN_POSITIVE {
            return 1.0;
        }
        if variance <= 0.0 {
            return 0.0;
        }
        (1.0 - unexplained / variance).clamp(0.0, 1.0)
    }
}

/// `number`, or the end of `low..=high` that is nearer; `low` for what is no number.
pub(super) fn within(number: f64, low: f64, high: f64) -> f64 {
    if number.is_nan() { low } else { number.clamp(low, high) }
}

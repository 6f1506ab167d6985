//! Lines through timings: `seconds = alpha · work + beta`, neither coefficient negative (CaraServe §5, C-12).

use std::fmt;

/// Longest time that is accepted or predicted; the bound keeps all arithmetic far from the ends of `f64`.
pub(super) const MAX_SECONDS: f64 = 1e9;

/// Shortest time that a clock can measure, in seconds.
const MIN_SECONDS: f64 = 1e-9;

/// Largest work that is accepted.
pub(super) const MAX_WORK: f64 = 1e19;

/// Function from work to seconds that can be fitted to timings.
pub trait CostCurve: Copy + fmt::Debug {
    /// Amount of work, in one or several terms.
    type Work: Copy + fmt::Debug;
    /// Class of works of about equal size.
    type Bucket: Copy + Ord + fmt::Debug;

    /// Returns the bucket of `work`.
    fn bucket(work: Self::Work) -> Self::Bucket;
    /// Returns the value by which timings of one bucket are compared.
    fn pace(sample: TimingSample<Self::Work>) -> f64;
    /// Fits the curve by least squares to samples with positive weights; `None` without samples.
    fn weighted(samples: impl Iterator<Item = (TimingSample<Self::Work>, f64)> + Clone) -> Option<Self>;
    /// Returns the seconds that `work` takes: finite and not negative.
    fn at(self, work: Self::Work) -> f64;
}

/// Timing of one piece of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimingSample<W = f64> {
    /// Amount of work that was done.
    pub work: W,
    /// Duration of the work in seconds.
    pub seconds: f64,
}

impl TimingSample {
    /// Creates a timing; clamps both numbers into their valid ranges, NaN to the lower end.
    #[must_use]
    pub fn new(work: f64, seconds: f64) -> Self {
        Self { work: within(work, 0.0, MAX_WORK), seconds: within(seconds, MIN_SECONDS, MAX_SECONDS) }
    }
}

/// Line from work to seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearFit {
    /// Seconds per unit of work; not negative.
    pub alpha: f64,
    /// Fixed seconds per piece of work; not negative.
    pub beta: f64,
}

impl LinearFit {
    /// Fits the line that is nowhere negative by least squares; `None` without samples. If all samples have
    /// one size, the line goes through zero, because they do not determine `beta`.
    #[must_use]
    pub fn least_squares(samples: &[TimingSample]) -> Option<Self> {
        Self::of_weighted(samples.iter().map(|&sample| (sample, 1.0)))
    }

    /// Fits as [`least_squares`](Self::least_squares), with a positive weight for each sample.
    pub(super) fn of_weighted(samples: impl Iterator<Item = (TimingSample, f64)> + Clone) -> Option<Self> {
        let (mut weights, mut works, mut times) = (0.0, 0.0, 0.0);
        for (TimingSample { work, seconds }, weight) in samples.clone() {
            weights += weight;
            works += weight * work;
            times += weight * seconds;
        }
        if weights <= 0.0 {
            return None;
        }
        let (mean_work, mean_time) = (works / weights, times / weights);
        // Sums about the means avoid cancellation.
        let (mut variance, mut covariance, mut squares, mut products) = (0.0, 0.0, 0.0, 0.0);
        for (TimingSample { work, seconds }, weight) in samples {
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

    /// Returns the seconds that `work` takes: finite and not negative.
    #[must_use]
    pub fn at(self, work: f64) -> f64 {
        (self.alpha * within(work, 0.0, MAX_WORK) + self.beta).min(MAX_SECONDS)
    }

    /// Returns the fraction of variance that the line explains, from 0 (no better than the mean) to 1.
    #[must_use]
    pub fn r_squared(self, samples: &[TimingSample]) -> f64 {
        r_squared(self, samples)
    }
}

impl<const N: usize> TimingSample<[f64; N]> {
    /// Creates a timing of several kinds of work at once; clamps all numbers into their valid ranges.
    #[must_use]
    pub fn of_terms(terms: [f64; N], seconds: f64) -> Self {
        let seconds = within(seconds, MIN_SECONDS, MAX_SECONDS);
        Self { work: terms.map(|term| within(term, 0.0, MAX_WORK)), seconds }
    }
}

impl CostCurve for LinearFit {
    type Work = f64;
    type Bucket = u32;

    /// Returns the octave: works in one octave differ by less than a factor of two.
    fn bucket(work: f64) -> u32 {
        work.max(1.0).log2() as u32
    }

    fn pace(sample: TimingSample) -> f64 {
        sample.seconds / sample.work.max(1.0)
    }

    fn weighted(samples: impl Iterator<Item = (TimingSample, f64)> + Clone) -> Option<Self> {
        Self::of_weighted(samples)
    }

    fn at(self, work: f64) -> f64 {
        Self::at(self, work)
    }
}

/// Returns the fraction, from 0 (no better than their mean) to 1, of the samples' variance that a curve
/// explains. For samples that were not fitted, the result measures how well the curve predicts.
#[must_use]
pub fn r_squared<C: CostCurve>(curve: C, samples: &[TimingSample<C::Work>]) -> f64 {
    let mean = samples.iter().map(|sample| sample.seconds).sum::<f64>() / samples.len().max(1) as f64;
    let unexplained: f64 = samples.iter().map(|s| (s.seconds - curve.at(s.work)).powi(2)).sum();
    let variance: f64 = samples.iter().map(|s| (s.seconds - mean).powi(2)).sum();
    if unexplained <= f64::MIN_POSITIVE {
        return 1.0;
    }
    if variance <= 0.0 {
        return 0.0;
    }
    (1.0 - unexplained / variance).clamp(0.0, 1.0)
}

/// Clamps `number` into `low..=high`; NaN gives `low`.
pub(super) fn within(number: f64, low: f64, high: f64) -> f64 {
    if number.is_nan() { low } else { number.clamp(low, high) }
}

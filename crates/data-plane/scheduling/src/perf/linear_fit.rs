//! Straight lines through timings: `seconds = alpha · work + beta`, neither of them negative (CaraServe §5, C-12).

use std::fmt;

/// Longest time that is taken in or predicted; keeps all arithmetic far from the ends of `f64`.
pub(super) const MAX_SECONDS: f64 = 1e9;

/// Shortest time a clock tells from nothing.
const MIN_SECONDS: f64 = 1e-9;

/// Most work that is taken in.
pub(super) const MAX_WORK: f64 = 1e19;

/// What times follow from work.
pub trait CostCurve: Copy + fmt::Debug {
    /// How much there is to do.
    type Work: Copy + fmt::Debug;
    /// Work of about the same size.
    type Bucket: Copy + Ord + fmt::Debug;

    /// Which of them it is.
    fn bucket(work: Self::Work) -> Self::Bucket;
    /// What timings of one bucket are compared by.
    fn pace(sample: TimingSample<Self::Work>) -> f64;
    /// The curve of least squares, each sample with a positive weight; `None` without samples.
    fn weighted(samples: impl Iterator<Item = (TimingSample<Self::Work>, f64)> + Clone) -> Option<Self>;
    /// Seconds that `work` takes: finite and not negative.
    fn at(self, work: Self::Work) -> f64;
}

/// One timing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimingSample<W = f64> {
    /// How much there was to do.
    pub work: W,
    /// How long it took.
    pub seconds: f64,
}

impl TimingSample {
    /// A timing; what is no number, negative or beyond all measure is brought to the nearest that can be.
    #[must_use]
    pub fn new(work: f64, seconds: f64) -> Self {
        Self { work: within(work, 0.0, MAX_WORK), seconds: within(seconds, MIN_SECONDS, MAX_SECONDS) }
    }
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearFit {
    /// Seconds for a unit of work; not negative.
    pub alpha: f64,
    /// Seconds for being asked at all; not negative.
    pub beta: f64,
}

impl LinearFit {
    /// The line of least squares among those that are nowhere negative; `None` without samples. Samples of one size
    /// say nothing about `beta`: the line then goes through zero.
    #[must_use]
    pub fn least_squares(samples: &[TimingSample]) -> Option<Self> {
        Self::of_weighted(samples.iter().map(|&sample| (sample, 1.0)))
    }

    /// As [`least_squares`](Self::least_squares), each sample with a positive weight.
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
        // About the means, so that nothing cancels.
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

    /// Seconds that `work` takes: finite and not negative.
    #[must_use]
    pub fn at(self, work: f64) -> f64 {
        (self.alpha * within(work, 0.0, MAX_WORK) + self.beta).min(MAX_SECONDS)
    }

    /// The part of the samples' variance that the line explains, from 0 (no better than their mean) to 1.
    #[must_use]
    pub fn r_squared(self, samples: &[TimingSample]) -> f64 {
        r_squared(self, samples)
    }
}

impl<const N: usize> TimingSample<[f64; N]> {
    /// A timing of several kinds of work at once, each brought to what can be.
    #[must_use]
    pub fn of_terms(terms: [f64; N], seconds: f64) -> Self {
        let seconds = within(seconds, MIN_SECONDS, MAX_SECONDS);
        Self { work: terms.map(|term| within(term, 0.0, MAX_WORK)), seconds }
    }
}

impl CostCurve for LinearFit {
    type Work = f64;
    type Bucket = u32;

    /// Work of the same octave differs by less than a factor of two.
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

/// The part of the samples' variance that a curve explains, from 0 (no better than their mean) to 1. Of samples that the
/// curve was not drawn through, it says how well the curve foretells.
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

/// `number`, or the end of `low..=high` that is nearer; `low` for what is no number.
pub(super) fn within(number: f64, low: f64, high: f64) -> f64 {
    if number.is_nan() { low } else { number.clamp(low, high) }
}

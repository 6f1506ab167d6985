//! A line, or a plane, that follows its timings as they come in.
//!
//! A few of the newest timings are kept for each octave of work. So a thousand decode steps do not displace
//! the timings of prompts, and new timings of a size replace old ones of the same size. A refit has two
//! stages:
//!
//! 1. A first curve goes through the octaves' medians, which occasional interruptions of a core do not move.
//! 2. Timings far off that curve, compared with the median error, are left out. The rest give the curve by
//!    least squares of the *relative* errors: a timer's noise grows with the time, and short and long passes
//!    matter alike.

use std::collections::{BTreeMap, VecDeque};

use super::linear_fit::{CostCurve, LinearFit, TimingSample, r_squared};

/// Number of timings kept per octave of work.
const KEPT_PER_OCTAVE: usize = 9;

/// Maximum number of octaves; when full, the octave with the oldest timings goes.
const MAX_OCTAVES: usize = 128;

/// Number of later timings after which a timing has half its weight.
const HALF_LIFE: f64 = 1_024.0;

/// Lowest weight of a timing, because an old timing is better than none of its size.
const LEAST_WEIGHT: f64 = 1.0 / 1_024.0;

/// Number of first timings that each cause a refit.
const EAGER_TIMINGS: u64 = 32;

/// Number of timings between later refits.
const REFIT_EVERY: u64 = 8;

/// Outlier threshold in median errors: three standard deviations if the errors were normal.
const OUTLIER_MEDIANS: f64 = 3.0 * 1.4826;

/// Smallest relative error that can make a timing an outlier.
const LEAST_TOLERANCE: f64 = 1e-6;

#[derive(Debug, Clone, Copy)]
struct FitSample<W> {
    sample: TimingSample<W>,
    /// Index of the timing in order of arrival, from 0.
    number: u64,
}

/// Curve that is refitted as timings arrive.
#[derive(Debug, Clone)]
pub struct Fit<C: CostCurve = LinearFit> {
    octaves: BTreeMap<C::Bucket, VecDeque<FitSample<C::Work>>>,
    seen: u64,
    curve: Option<C>,
    r_squared: f64,
    outliers: usize,
}

impl<C: CostCurve> Default for Fit<C> {
    fn default() -> Self {
        Self { octaves: BTreeMap::new(), seen: 0, curve: None, r_squared: 0.0, outliers: 0 }
    }
}

impl Fit<LinearFit> {
    /// Adds a timing: `work` took `seconds`.
    pub fn observe(&mut self, work: f64, seconds: f64) {
        self.add_sample(TimingSample::new(work, seconds));
    }

    /// Returns the line; `None` before the first timing.
    #[must_use]
    pub fn line(&self) -> Option<LinearFit> {
        self.curve
    }
}

impl<C: CostCurve> Fit<C> {
    /// Adds a timing of any work type.
    pub fn add_sample(&mut self, sample: TimingSample<C::Work>) {
        let key = C::bucket(sample.work);
        if self.octaves.len() == MAX_OCTAVES && !self.octaves.contains_key(&key) {
            self.forget_an_octave();
        }
        let octave = self.octaves.entry(key).or_default();
        if octave.len() == KEPT_PER_OCTAVE {
            octave.pop_front();
        }
        octave.push_back(FitSample { sample, number: self.seen });
        self.seen = self.seen.saturating_add(1);
        if self.seen <= EAGER_TIMINGS || self.seen.is_multiple_of(REFIT_EVERY) {
            self.refit();
        }
    }

    /// Returns the curve; `None` before the first timing.
    #[must_use]
    pub fn curve(&self) -> Option<C> {
        self.curve
    }

    /// Returns the fraction of the timings' variance that the curve explains without outliers, from 0 to 1.
    #[must_use]
    pub fn r_squared(&self) -> f64 {
        self.r_squared
    }

    /// Returns how many kept timings are not outliers of the last refit.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.octaves.values().map(VecDeque::len).sum::<usize>().saturating_sub(self.outliers)
    }

    /// Returns how many timings the last refit left out.
    #[must_use]
    pub fn outliers(&self) -> usize {
        self.outliers
    }

    fn forget_an_octave(&mut self) {
        let newest = |octave: &VecDeque<FitSample<C::Work>>| octave.back().map(|one| one.number);
        let oldest = self.octaves.iter().min_by_key(|(_, octave)| newest(octave)).map(|(&key, _)| key);
        oldest.map(|key| self.octaves.remove(&key));
    }

    fn refit(&mut self) {
        let seen: Vec<FitSample<C::Work>> = self.octaves.values().flatten().copied().collect();
        let Some(first) = self.through_medians() else { return };
        let errors: Vec<f64> = seen.iter().map(|one| relative_error(first, one.sample)).collect();
        let tolerance = (median(&errors) * OUTLIER_MEDIANS).max(LEAST_TOLERANCE);
        let kept: Vec<FitSample<C::Work>> =
            seen.iter().zip(&errors).filter(|&(_, &error)| error <= tolerance).map(|(&one, _)| one).collect();
        let weighted =
            kept.iter().map(|one| (one.sample, self.weight(one) / square(first.at(one.sample.work))));
        let curve = C::weighted(weighted).unwrap_or(first);
        let samples: Vec<TimingSample<C::Work>> = kept.iter().map(|one| one.sample).collect();
        self.r_squared = r_squared(curve, &samples);
        self.outliers = seen.len() - kept.len();
        self.curve = Some(curve);
    }

    /// Fits a curve through the median timing of each octave, by its pace.
    fn through_medians(&self) -> Option<C> {
        let medians: Vec<(TimingSample<C::Work>, f64)> =
            self.octaves.values().filter_map(|octave| self.middle(octave)).collect();
        C::weighted(medians.iter().copied())
    }

    fn middle(&self, octave: &VecDeque<FitSample<C::Work>>) -> Option<(TimingSample<C::Work>, f64)> {
        let mut by_pace: Vec<&FitSample<C::Work>> = octave.iter().collect();
        by_pace.sort_unstable_by(|a, b| C::pace(a.sample).total_cmp(&C::pace(b.sample)));
        let middle = by_pace.get(by_pace.len() / 2)?;
        let weights: f64 = octave.iter().map(|one| self.weight(one)).sum();
        Some((middle.sample, weights / square(middle.sample.seconds)))
    }

    fn weight(&self, one: &FitSample<C::Work>) -> f64 {
        let age = self.seen.saturating_sub(one.number) as f64;
        (-age / HALF_LIFE).exp2().max(LEAST_WEIGHT)
    }
}

fn relative_error<C: CostCurve>(curve: C, sample: TimingSample<C::Work>) -> f64 {
    let predicted = TimingSample::new(0.0, curve.at(sample.work)).seconds;
    (sample.seconds - predicted).abs() / predicted
}

/// Returns the square of a time, large enough to have a finite inverse.
fn square(seconds: f64) -> f64 {
    let seconds = TimingSample::new(0.0, seconds).seconds;
    seconds * seconds
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

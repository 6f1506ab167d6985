//! A line, or a plane, that follows its timings as they come in.
//!
//! Timings are kept by the octave of their work, a few of the newest for each. So a thousand decode steps do not
//! drive out what is known about prompts, and old timings of a size go when new ones of that size come. Two things
//! happen at a refit:
//!
//! 1. A first curve goes through the octaves' medians, which a core that was taken away now and then does not move.
//! 2. Timings far off that curve, measured by what is usual, are left out; the rest give the curve by least squares of
//!    the *relative* errors: a timer's noise grows with the time, and short and long passes matter alike.

use std::collections::{BTreeMap, VecDeque};

use super::linear_fit::{CostCurve, LinearFit, TimingSample, r_squared};

/// Timings kept for each octave of work.
const KEPT_PER_OCTAVE: usize = 9;

/// Octaves that are kept: of those of a plane, the ones with the oldest timings go.
const MAX_OCTAVES: usize = 128;

/// Timings after which a timing counts half.
const HALF_LIFE: f64 = 1_024.0;

/// The least a timing counts: better an old one than none of its size.
const LEAST_WEIGHT: f64 = 1.0 / 1_024.0;

/// Timings at the beginning each of which gives a new line.
const EAGER_TIMINGS: u64 = 32;

/// Timings between refits after that.
const REFIT_EVERY: u64 = 8;

/// Median errors beyond which a timing is left out: three standard deviations, were the errors normal.
const OUTLIER_MEDIANS: f64 = 3.0 * 1.4826;

/// The least relative error that counts as far off.
const LEAST_TOLERANCE: f64 = 1e-6;

#[derive(Debug, Clone, Copy)]
struct FitSample<W> {
    sample: TimingSample<W>,
    /// How many timings came before it.
    number: u64,
}

/// See the module.
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
    /// Takes a timing in.
    pub fn observe(&mut self, work: f64, seconds: f64) {
        self.add_sample(TimingSample::new(work, seconds));
    }

    /// The line; `None` before the first timing.
    #[must_use]
    pub fn line(&self) -> Option<LinearFit> {
        self.curve
    }
}

impl<C: CostCurve> Fit<C> {
    /// Takes a timing in.
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

    /// The curve; `None` before the first timing.
    #[must_use]
    pub fn curve(&self) -> Option<C> {
        self.curve
    }

    /// How much of the timings' variance the line explains, outliers left out: 0 to 1.
    #[must_use]
    pub fn r_squared(&self) -> f64 {
        self.r_squared
    }

    /// Timings the line was drawn through last.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.octaves.values().map(VecDeque::len).sum::<usize>().saturating_sub(self.outliers)
    }

    /// Timings that were left out last.
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

    /// A curve through one timing of each octave: the one in the middle by its time for the work.
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

/// The square of a time, never so small that its inverse is beyond measure.
fn square(seconds: f64) -> f64 {
    let seconds = TimingSample::new(0.0, seconds).seconds;
    seconds * seconds
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

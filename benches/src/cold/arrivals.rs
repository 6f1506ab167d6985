//! Times, adapters and lengths of requests, drawn from a seed, so that every mode gets the same load.
//!
//! Lengths are those of Alpaca in the checklist: 19.3 tokens in and 58.5 out on average, lognormal. The
//! lengths are not scaled: one core runs this model about as fast as the paper's GPU runs its own.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng};

/// Mean and deviation of the logarithm of the prompt's tokens.
const PROMPT_LN: (f64, f64) = (2.81, 0.55);
/// Mean and deviation of the logarithm of the answer's tokens.
const ANSWER_LN: (f64, f64) = (3.62, 0.95);
/// Maximum length of a prompt and of an answer, in tokens.
const LONGEST: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Popularity {
    /// Each request has another adapter, in turn, from number `first` of `count`.
    Distinct {
        /// Adapter number of the first request.
        first: usize,
    },
    /// Zipf's law: the probability of adapter k is proportional to k^-s.
    Zipf {
        /// Exponent; the paper's own groups are near 0.26.
        s: f64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ColdLoad {
    /// Average requests per second, at exponentially distributed intervals.
    pub(crate) rate: f64,
    pub(crate) requests: usize,
    pub(crate) adapters: usize,
    pub(crate) popularity: Popularity,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestArrival {
    pub(crate) at: Duration,
    /// Index of the adapter; `None` is the base.
    pub(crate) adapter: Option<usize>,
    pub(crate) prompt: usize,
    pub(crate) answer: usize,
    pub(crate) seed: u64,
}

impl ColdLoad {
    pub(crate) fn arrivals(&self, seed: u64) -> Vec<RequestArrival> {
        let mut random = StdRng::seed_from_u64(seed);
        let mut at = 0.0;
        (0..self.requests)
            .map(|number| {
                at += -(1.0 - random.random::<f64>()).ln() / self.rate;
                RequestArrival {
                    at: Duration::from_secs_f64(at),
                    adapter: Some(self.popularity.adapter(number, self.adapters, &mut random)),
                    prompt: length(PROMPT_LN, &mut random),
                    answer: length(ANSWER_LN, &mut random),
                    seed: (seed << 20) + number as u64,
                }
            })
            .collect()
    }
}

impl Popularity {
    fn adapter(self, number: usize, count: usize, random: &mut StdRng) -> usize {
        match self {
            Self::Distinct { first } => first + number % (count - first),
            Self::Zipf { s } => {
                let weight = |rank: usize| ((rank + 1) as f64).powf(-s);
                let mut left = random.random::<f64>() * (0..count).map(weight).sum::<f64>();
                let found = (0..count).find(|&rank| {
                    left -= weight(rank);
                    left < 0.0
                });
                found.unwrap_or(count - 1)
            }
        }
    }
}

/// Draws a length from its lognormal distribution (Box-Muller).
fn length((mean, deviation): (f64, f64), random: &mut StdRng) -> usize {
    let (radius, angle) = (1.0 - random.random::<f64>(), random.random::<f64>());
    let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
    ((mean + deviation * normal).exp().round() as usize).clamp(2, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(popularity: Popularity) -> ColdLoad {
        ColdLoad { rate: 5.0, requests: 20_000, adapters: 128, popularity }
    }

    #[test]
    fn lengths_and_rate_are_those_that_were_asked_for() {
        let arrivals = load(Popularity::Distinct { first: 0 }).arrivals(7);
        let mean = |of: fn(&RequestArrival) -> usize| {
            arrivals.iter().map(|arrival| of(arrival) as f64).sum::<f64>() / arrivals.len() as f64
        };
        assert!((mean(|arrival| arrival.prompt) / 19.3 - 1.0).abs() < 0.05);
        // The cap on the length lowers the mean.
        assert!((mean(|arrival| arrival.answer) / 55.0 - 1.0).abs() < 0.05);
        let last = arrivals.last().unwrap().at.as_secs_f64();
        assert!((arrivals.len() as f64 / last / 5.0 - 1.0).abs() < 0.05);
        assert_eq!(arrivals, load(Popularity::Distinct { first: 0 }).arrivals(7));
    }

    #[test]
    fn distinct_adapters_come_in_turn() {
        let arrivals = load(Popularity::Distinct { first: 28 }).arrivals(1);
        assert_eq!([0, 99, 100].map(|number: usize| arrivals[number].adapter), [28, 127, 28].map(Some));
    }

    #[test]
    fn skewed_popularity_is_as_skewed_as_it_says() {
        let arrivals = load(Popularity::Zipf { s: 0.26 }).arrivals(3);
        let share = arrivals.iter().filter(|arrival| arrival.adapter < Some(50)).count() as f64 / 20_000.0;
        // 200 of 512 adapters get half of all requests, and so do about 50 of 128.
        assert!((share - 0.5).abs() < 0.03, "{share}");
    }
}

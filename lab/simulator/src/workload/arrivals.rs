//! Arrival times: Poisson, or in bursts for each adapter separately as in the functions of MAF 2019.

use std::time::Duration;

use super::popularity::{self, Popularity};
use crate::random::RandomStream;

/// Coefficients of variation of gaps between calls of an application, with their cumulative shares (MAF
/// 2019, read off its plots).
const CV_QUANTILES: [(f64, f64); 7] =
    [(0.25, 0.0), (0.5, 0.22), (1.0, 0.58), (2.0, 0.73), (4.0, 0.87), (8.0, 0.94), (10.0, 1.0)];

/// Interval in seconds at which shares and rates change.
const EPOCH_S: f64 = 60.0;

/// Correlation of a minute's rate with the next, and deviations of the log rates of all and of each adapter.
const MINUTES: (f64, f64, f64) = (0.9, 0.2, 0.5);

/// Parameters of the arrivals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Demand {
    /// Number of adapters in the workload.
    pub adapters: usize,
    /// Distribution of requests over adapters.
    pub popularity: Popularity,
    /// Share of the mass that moves every minute.
    pub drift: f64,
    /// Total arrivals per second.
    pub per_s: f64,
    /// Time after which no request arrives.
    pub end: Duration,
}

/// History before the first arrival of each adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ArrivalHistory {
    /// No history: each adapter begins at a random time within a first gap. Many rare adapters begin in a
    /// burst.
    #[default]
    Nothing,
    /// Stationary history: the gap that contains the start is size-biased.
    Always,
}

/// Arrival of a conversation or request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdapterArrival {
    /// Arrival time since the start.
    pub at: Duration,
    /// Index among the adapters.
    pub adapter: usize,
}

impl Demand {
    fn epochs(&self, seed: u64) -> Vec<Vec<f64>> {
        let mut stream = RandomStream::new(seed, "popularity", 0);
        let mut shares = self.popularity.shares(self.adapters, &mut stream);
        let epochs = (self.end.as_secs_f64() / EPOCH_S).ceil() as usize;
        let mut next = || {
            let now = shares.clone();
            popularity::drift(&mut shares, self.drift, &mut stream);
            now
        };
        (0..epochs.max(1)).map(|_| next()).collect()
    }

    /// Draws independent arrivals; each picks its adapter by the shares of its minute.
    #[must_use]
    pub fn poisson(&self, seed: u64) -> Vec<AdapterArrival> {
        let (epochs, mut stream) = (self.epochs(seed), RandomStream::new(seed, "arrivals", 0));
        let (mut arrivals, mut at) = (Vec::new(), 0.0);
        loop {
            at += stream.exponential() / self.per_s;
            if at >= self.end.as_secs_f64() {
                return arrivals;
            }
            let shares = &epochs[(at / EPOCH_S) as usize];
            let adapter = popularity::pick(shares, stream.uniform());
            arrivals.push(AdapterArrival { at: Duration::from_secs_f64(at), adapter });
        }
    }

    /// Draws arrivals from per-minute counts, the only data of MAF 2019: the rates of all and of each
    /// adapter change every minute, and arrivals within it are independent.
    #[must_use]
    pub fn minutes(&self, seed: u64) -> Vec<AdapterArrival> {
        let epochs = self.epochs(seed);
        let (carried, of_all, of_each) = MINUTES;
        let common = modulation(&mut RandomStream::new(seed, "minutes", 0), epochs.len(), carried, of_all);
        let own: Vec<Vec<f64>> = (0..self.adapters)
            .map(|adapter| {
                let mut stream = RandomStream::new(seed, "own minutes", adapter as u64);
                modulation(&mut stream, epochs.len(), carried, of_each)
            })
            .collect();
        let (mut stream, mut arrivals) = (RandomStream::new(seed, "arrivals", 0), Vec::new());
        for (minute, (shares, common)) in epochs.iter().zip(common).enumerate() {
            let mut sum = 0.0;
            let sums: Vec<f64> = shares
                .iter()
                .zip(&own)
                .map(|(share, own)| {
                    sum += share * own[minute];
                    sum
                })
                .collect();
            let start = minute as f64 * EPOCH_S;
            let end = (start + EPOCH_S).min(self.end.as_secs_f64());
            let mut at = start;
            loop {
                at += stream.exponential() / (self.per_s * common);
                if at >= end {
                    break;
                }
                let place = stream.uniform() * sum;
                let adapter = sums.partition_point(|sum| *sum <= place).min(self.adapters - 1);
                arrivals.push(AdapterArrival { at: Duration::from_secs_f64(at), adapter });
            }
        }
        arrivals
    }

    /// Draws arrivals of each adapter separately: gamma gaps with a drawn coefficient of variation, at a
    /// rate that changes every minute.
    #[must_use]
    pub fn bursts(&self, seed: u64, before: ArrivalHistory) -> Vec<AdapterArrival> {
        let epochs = self.epochs(seed);
        let (carried, of_all, of_each) = MINUTES;
        let common = modulation(&mut RandomStream::new(seed, "minutes", 0), epochs.len(), carried, of_all);
        let mut arrivals = Vec::new();
        for adapter in 0..self.adapters {
            let mut stream = RandomStream::new(seed, "bursts", adapter as u64);
            let own = modulation(&mut stream, epochs.len(), carried, of_each);
            let rates: Vec<f64> = epochs
                .iter()
                .zip(common.iter().zip(&own))
                .map(|(shares, (common, own))| self.per_s * shares[adapter] * common * own)
                .collect();
            let cv = coefficient_of_variation(stream.uniform());
            // The first gap is cut at a random time; otherwise all adapters would begin at once.
            let first = match before {
                ArrivalHistory::Nothing => stream.gamma(cv),
                ArrivalHistory::Always => stream.long_gamma(cv),
            };
            let mut due = first * stream.uniform();
            let mut start = 0.0;
            for rate in rates {
                while due < rate * EPOCH_S {
                    let at = start + due / rate;
                    if at < self.end.as_secs_f64() {
                        arrivals.push(AdapterArrival { at: Duration::from_secs_f64(at), adapter });
                    }
                    due += stream.gamma(cv);
                }
                due -= rate * EPOCH_S;
                start += EPOCH_S;
            }
        }
        arrivals.sort_by_key(|arrival| (arrival.at, arrival.adapter));
        arrivals
    }
}

/// Returns factors of mean 1 for each minute, whose logarithm is autoregressive.
fn modulation(stream: &mut RandomStream, minutes: usize, carried: f64, sigma: f64) -> Vec<f64> {
    let mut log = stream.normal() * sigma;
    let mut next = || {
        let factor = (log - sigma * sigma / 2.0).exp();
        log = carried * log + sigma * (1.0 - carried * carried).sqrt() * stream.normal();
        factor
    };
    (0..minutes).map(|_| next()).collect()
}

fn coefficient_of_variation(quantile: f64) -> f64 {
    let above = CV_QUANTILES.iter().position(|(_, share)| quantile <= *share).unwrap_or(6).max(1);
    let ((low, from), (high, to)) = (CV_QUANTILES[above - 1], CV_QUANTILES[above]);
    low + (high - low) * (quantile - from) / (to - from)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand {
        adapters: 50,
        popularity: Popularity::Zipf(0.9),
        drift: 0.1,
        per_s: 20.0,
        end: Duration::from_secs(3000),
    };

    #[test]
    fn poisson_arrivals_come_at_their_rate_with_gaps_as_long_as_they_vary() {
        let arrivals = DEMAND.poisson(3);
        let rate = arrivals.len() as f64 / 3000.0;
        assert!((rate / 20.0 - 1.0).abs() < 0.02, "{rate}");
        let gaps: Vec<f64> =
            arrivals.windows(2).map(|pair| (pair[1].at - pair[0].at).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        assert!((deviation / mean - 1.0).abs() < 0.03);
    }

    #[test]
    fn bursts_come_at_the_same_rate_but_vary_more_from_minute_to_minute() {
        let per_minute = |arrivals: &[AdapterArrival]| {
            let mut counts = vec![0.0_f64; 50];
            arrivals.iter().for_each(|arrival| counts[(arrival.at.as_secs() / 60) as usize] += 1.0);
            let mean = counts.iter().sum::<f64>() / 50.0;
            (mean, counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / 50.0 / mean)
        };
        let (mean, dispersion) = per_minute(&DEMAND.bursts(3, ArrivalHistory::Nothing));
        assert!((mean / 1200.0 - 1.0).abs() < 0.25, "{mean}");
        let (_, of_poisson) = per_minute(&DEMAND.poisson(3));
        assert!(dispersion > 5.0 && of_poisson < 2.0, "{dispersion} {of_poisson}");
    }

    #[test]
    fn rare_adapters_do_not_begin_together() {
        let rare = Demand { adapters: 2000, per_s: 10.0, popularity: Popularity::Uniform, ..DEMAND };
        let within = |from: u64, to: u64, seed: u64| {
            let arrivals = rare.bursts(seed, ArrivalHistory::Always);
            arrivals.iter().filter(|arrival| (from..to).contains(&arrival.at.as_secs())).count()
        };
        let [first, later] = [(0, 60), (1500, 2100)]
            .map(|(from, to)| (1..9).map(|seed| within(from, to, seed)).sum::<usize>() as f64);
        assert!(
            (first * 10.0 / later - 1.0).abs() < 0.35,
            "{first} in the first minute, {later} in ten later ones"
        );
    }

    #[test]
    fn by_the_minute_rates_move_and_within_a_minute_nothing_is_bunched() {
        let arrivals = DEMAND.minutes(3);
        let rate = arrivals.len() as f64 / 3000.0;
        assert!((rate / 20.0 - 1.0).abs() < 0.15, "{rate}");
        let counts = |seconds: u64, from: u64, to: u64| {
            let mut counts = vec![0.0_f64; ((to - from) / seconds) as usize];
            let within =
                arrivals.iter().map(|arrival| arrival.at.as_secs()).filter(|at| (from..to).contains(at));
            within.for_each(|at| counts[((at - from) / seconds) as usize] += 1.0);
            let mean = counts.iter().sum::<f64>() / counts.len() as f64;
            counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / counts.len() as f64 / mean
        };
        assert!(counts(60, 0, 3000) > 5.0, "minutes differ");
        let within: f64 = (0..50).map(|minute| counts(1, minute * 60, minute * 60 + 60)).sum::<f64>() / 50.0;
        assert!((0.8..1.2).contains(&within), "{within}");
    }

    #[test]
    fn variation_follows_the_measured_quantiles() {
        assert_eq!(coefficient_of_variation(0.58), 1.0);
        assert_eq!(coefficient_of_variation(0.94), 8.0);
        assert_eq!(coefficient_of_variation(0.0), 0.25);
    }
}

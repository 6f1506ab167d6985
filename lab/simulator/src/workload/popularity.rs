//! Distribution of requests over adapters, and its drift.

use std::{fmt, str::FromStr};

use crate::random::RandomStream;

/// Maximum share of an adapter under a lognormal distribution, or twice the equal share if that is more.
const CAP: f64 = 0.05;

/// Deviation of the log rates that fits the functions of MAF 2019.
const MAF_SIGMA: f64 = 3.6;

/// A family of distributions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Popularity {
    /// All adapters have equal shares.
    Uniform,
    /// The k-th adapter has a share of `k^-s`.
    Zipf(f64),
    /// Lognormal rates as in MAF 2019, capped.
    Maf,
}

/// Error of an unknown distribution name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a popularity; use uniform, zipf:S with a number S, or maf")]
pub struct UnknownPopularity(String);

impl FromStr for Popularity {
    type Err = UnknownPopularity;

    fn from_str(text: &str) -> Result<Self, UnknownPopularity> {
        match text.split_once(':') {
            None if text == "uniform" => Ok(Self::Uniform),
            None if text == "maf" => Ok(Self::Maf),
            Some(("zipf", s)) => match s.parse() {
                Ok(s) if f64::is_finite(s) && s >= 0.0 => Ok(Self::Zipf(s)),
                _ => Err(UnknownPopularity(text.to_owned())),
            },
            _ => Err(UnknownPopularity(text.to_owned())),
        }
    }
}

impl fmt::Display for Popularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(s) => write!(f, "zipf:{s}"),
            Self::Maf => f.write_str("maf"),
        }
    }
}

impl Popularity {
    /// Returns shares of `count` adapters in random order, which sum to 1.
    #[must_use]
    pub fn shares(self, count: usize, stream: &mut RandomStream) -> Vec<f64> {
        let mut shares: Vec<f64> = match self {
            Self::Uniform => vec![1.0; count],
            Self::Zipf(s) => (1..=count).map(|rank| (rank as f64).powf(-s)).collect(),
            Self::Maf => (0..count).map(|_| stream.lognormal(0.0, MAF_SIGMA)).collect(),
        };
        normalize(&mut shares);
        if self == Self::Maf {
            cap(&mut shares, CAP.max(2.0 / count as f64));
        }
        for last in (1..count).rev() {
            shares.swap(last, stream.below(last + 1));
        }
        shares
    }
}

/// Exchanges shares of random pairs until `mass` has moved; the distribution stays, and other adapters
/// become popular.
pub fn drift(shares: &mut [f64], mass: f64, stream: &mut RandomStream) {
    let mut moved = 0.0;
    for _ in 0..shares.len() {
        if moved >= mass {
            return;
        }
        let (one, other) = (stream.below(shares.len()), stream.below(shares.len()));
        moved += (shares[one] - shares[other]).abs();
        shares.swap(one, other);
    }
}

/// Returns an index drawn by the shares; `at` is in [0, 1).
#[must_use]
pub fn pick(shares: &[f64], at: f64) -> usize {
    let mut left = at;
    let found = shares.iter().position(|share| {
        left -= share;
        left < 0.0
    });
    found.unwrap_or(shares.len() - 1)
}

fn normalize(shares: &mut [f64]) {
    let all: f64 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= all);
}

/// Moves the excess above the cap to the other shares, in proportion.
fn cap(shares: &mut [f64], cap: f64) {
    for _ in 0..shares.len() {
        let above: f64 = shares.iter().map(|share| (share - cap).max(0.0)).sum();
        if above < 1e-12 {
            return;
        }
        let below: f64 = shares.iter().filter(|share| **share < cap).sum();
        for share in shares.iter_mut() {
            *share = if *share < cap { *share * (1.0 + above / below) } else { cap };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(popularity: Popularity, count: usize) -> Vec<f64> {
        let mut shares = popularity.shares(count, &mut RandomStream::new(7, "shares", 0));
        shares.sort_by(|a, b| b.total_cmp(a));
        shares
    }

    #[test]
    fn shares_sum_to_one_and_follow_their_laws() {
        for popularity in [Popularity::Uniform, Popularity::Zipf(0.9), Popularity::Maf] {
            let shares = sorted(popularity, 100);
            assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{popularity}");
        }
        let zipf = sorted(Popularity::Zipf(0.9), 100);
        assert!((zipf[0] / zipf[9] - 10_f64.powf(0.9)).abs() < 1e-9);
        assert!(sorted(Popularity::Maf, 100)[0] <= 0.05 + 1e-9);
    }

    #[test]
    fn the_top_hundredth_of_512_with_exponent_26_has_what_was_measured() {
        let half: f64 = sorted(Popularity::Zipf(0.26), 512)[..200].iter().sum();
        assert!((half - 0.5).abs() < 0.02, "{half}");
    }

    #[test]
    fn drift_moves_so_much_and_keeps_the_law() {
        let mut stream = RandomStream::new(7, "drift", 0);
        let mut shares = Popularity::Zipf(0.9).shares(100, &mut stream);
        let before = shares.clone();
        drift(&mut shares, 0.1, &mut stream);
        let moved: f64 =
            shares.iter().zip(&before).map(|(one, other)| (one - other).abs()).sum::<f64>() / 2.0;
        assert!((0.05..0.3).contains(&moved), "{moved}");
        let sort = |mut shares: Vec<f64>| {
            shares.sort_by(f64::total_cmp);
            shares
        };
        assert_eq!(sort(shares), sort(before));
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["uniform", "zipf:0.9", "maf"] {
            assert_eq!(name.parse::<Popularity>().unwrap().to_string(), name);
        }
        assert!("zipf".parse::<Popularity>().is_err() && "zipf:-1".parse::<Popularity>().is_err());
    }
}

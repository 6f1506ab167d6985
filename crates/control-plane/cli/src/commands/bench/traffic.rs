//! Generates the traffic of a run: models, arrival times and prompts.

use std::{fmt, str::FromStr, time::Duration};

use rand::{
    Rng as _, SeedableRng as _,
    rngs::StdRng,
    seq::{IndexedRandom as _, SliceRandom as _},
};

use crate::client::ServedModel;

/// Models that a run asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Selection {
    /// The base model alone.
    Base,
    /// Models with these names.
    Named(Vec<String>),
    /// Random adapters, as many as given, chosen by the seed.
    Random(usize),
    /// Random adapters chosen by the seed, with requests spread by the distribution.
    Spread(Distribution, usize),
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SelectionError {
    #[error("the gateway serves no base model")]
    NoBase,
    #[error("`{0}` is not served")]
    Unknown(String),
    #[error("{wanted} adapters were asked for, {served} are served")]
    TooFew { wanted: usize, served: usize },
}

impl FromStr for Selection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((how, count)) = text.split_once(':') {
            let distribution = Distribution::of_word(how);
            let selection: fn(Distribution, usize) -> Self = match (how, distribution) {
                ("random", _) => |_, count| Self::Random(count),
                (_, Some(_)) => Self::Spread,
                _ => return Err("write random:N, zipf:N, uniform:N or round-robin:N".into()),
            };
            return match count.parse() {
                Ok(count) if count > 0 => {
                    Ok(selection(distribution.unwrap_or(Distribution::RoundRobin), count))
                }
                _ => Err(format!("write {how}:N with N of at least 1")),
            };
        }
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        match names.iter().any(String::is_empty) {
            true => Err("write names separated by commas".into()),
            false => Ok(Self::Named(names)),
        }
    }
}

impl fmt::Display for Selection {
    /// Formats the selection as on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base => f.write_str("base"),
            Self::Named(names) => f.write_str(&names.join(",")),
            Self::Random(count) => write!(f, "random:{count}"),
            Self::Spread(distribution, count) => write!(f, "{}:{count}", distribution.as_str()),
        }
    }
}

impl Selection {
    /// Returns the distribution that the selection itself names.
    pub(super) fn distribution(&self) -> Option<Distribution> {
        match self {
            Self::Spread(distribution, _) => Some(*distribution),
            Self::Base | Self::Named(_) | Self::Random(_) => None,
        }
    }

    /// Returns the names of the selected models, all of which are served.
    pub(super) fn resolve(&self, served: &[ServedModel], seed: u64) -> Result<Vec<String>, SelectionError> {
        match self {
            Self::Base => {
                let base = served.iter().find(|model| !model.is_adapter()).ok_or(SelectionError::NoBase)?;
                Ok(vec![base.id.clone()])
            }
            Self::Named(names) => {
                match names.iter().find(|name| !served.iter().any(|model| model.id == **name)) {
                    Some(unknown) => Err(SelectionError::Unknown(unknown.clone())),
                    None => Ok(names.clone()),
                }
            }
            Self::Random(wanted) | Self::Spread(_, wanted) => {
                let mut adapters: Vec<String> =
                    served.iter().filter(|model| model.is_adapter()).map(|model| model.id.clone()).collect();
                if adapters.len() < *wanted {
                    return Err(SelectionError::TooFew { wanted: *wanted, served: adapters.len() });
                }
                adapters.shuffle(&mut StdRng::seed_from_u64(seed));
                adapters.truncate(*wanted);
                Ok(adapters)
            }
        }
    }
}

/// Distribution of requests over models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Distribution {
    /// Each as likely as any other.
    Uniform,
    /// The k-th with weight 1/k: few are busy, many are rare.
    Zipf,
    /// One after the other.
    RoundRobin,
}

impl Distribution {
    /// Parses the word of a distribution, as in `zipf:N`.
    fn of_word(word: &str) -> Option<Self> {
        [Self::Uniform, Self::Zipf, Self::RoundRobin]
            .into_iter()
            .find(|distribution| distribution.as_str() == word)
    }

    /// Returns the index of the model of each request, below `models`.
    pub(super) fn picks(self, models: usize, requests: usize, seed: u64) -> Vec<usize> {
        let mut random = StdRng::seed_from_u64(seed);
        let weights: Vec<f64> = (1..=models).map(|rank| 1.0 / rank as f64).collect();
        let total: f64 = weights.iter().sum();
        let mut zipf = || {
            let mut left = random.random_range(0.0..total);
            let found = weights.iter().position(|weight| {
                left -= weight;
                left < 0.0
            });
            found.unwrap_or(models - 1)
        };
        match self {
            Self::RoundRobin => (0..requests).map(|request| request % models).collect(),
            Self::Zipf => (0..requests).map(|_| zipf()).collect(),
            Self::Uniform => (0..requests).map(|_| random.random_range(0..models)).collect(),
        }
    }

    /// Returns the word on the command line.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
            Self::RoundRobin => "round-robin",
        }
    }
}

/// Returns the send time of each request, from a Poisson process of `per_s` requests per second. Arrivals
/// are independent of answers, so a slow server gets no relief.
pub(super) fn arrivals(per_s: f64, requests: usize, seed: u64) -> Vec<Duration> {
    // The seed differs from the one that picks adapters, so the random streams are independent.
    let mut random = StdRng::seed_from_u64(seed ^ 0x9e37_79b9_7f4a_7c15);
    let mut at_s = 0.0;
    let mut next = || {
        // 1 - u is never 0, so its logarithm is finite.
        at_s -= (1.0 - random.random_range(0.0..1.0_f64)).ln() / per_s;
        Duration::from_secs_f64(at_s)
    };
    (0..requests).map(|_| next()).collect()
}

/// Words that, with the space before them, are one token each in common vocabularies.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not",
    "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one",
    "you", "we", "all", "her", "she", "there", "would", "their", "him", "been", "has", "when", "who", "will",
    "more", "no", "if", "out", "so", "said", "what", "up", "its", "about", "into", "than", "them", "can",
    "only", "other", "new", "some", "time", "these",
];

/// Returns a prompt of about `tokens` tokens, unique for each `seed` and `request`.
pub(super) fn prompt(tokens: usize, seed: u64, request: usize) -> String {
    let mut random = StdRng::seed_from_u64(seed ^ (request as u64).rotate_left(32));
    let words = (0..tokens).map(|_| *WORDS.choose(&mut random).unwrap_or(&"the"));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(adapters: usize) -> Vec<ServedModel> {
        let base = serde_json::json!({"id": "base"});
        let adapters = (0..adapters).map(|i| serde_json::json!({"id": format!("a{i}"), "parent": "base"}));
        serde_json::from_value(std::iter::once(base).chain(adapters).collect()).unwrap()
    }

    #[test]
    fn selections_are_names_or_a_random_number_of_adapters() {
        assert_eq!("a, b".parse(), Ok(Selection::Named(vec!["a".into(), "b".into()])));
        assert_eq!("random:3".parse(), Ok(Selection::Random(3)));
        assert_eq!("zipf:64".parse(), Ok(Selection::Spread(Distribution::Zipf, 64)));
        assert_eq!("round-robin:2".parse(), Ok(Selection::Spread(Distribution::RoundRobin, 2)));
        for wrong in ["random:0", "random:x", "zipf:0", "base:adapter", "a,,b", ""] {
            assert!(wrong.parse::<Selection>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn random_adapters_are_different_ones_and_the_same_for_the_same_seed() {
        let mut drawn = Selection::Random(5).resolve(&served(8), 1).unwrap();
        assert_eq!(drawn, Selection::Random(5).resolve(&served(8), 1).unwrap());
        assert_ne!(drawn, Selection::Random(5).resolve(&served(8), 2).unwrap());
        drawn.sort();
        drawn.dedup();
        assert_eq!(drawn.len(), 5);
        assert!(!drawn.contains(&"base".to_owned()));
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        let error = Selection::Named(vec!["a0".into(), "zebra".into()]).resolve(&served(1), 0).unwrap_err();
        assert_eq!(error, SelectionError::Unknown("zebra".into()));
        let error = Selection::Random(2).resolve(&served(1), 0).unwrap_err();
        assert_eq!(error, SelectionError::TooFew { wanted: 2, served: 1 });
    }

    #[test]
    fn round_robin_visits_all_equally_and_zipf_prefers_the_first() {
        assert_eq!(Distribution::RoundRobin.picks(3, 5, 0), [0, 1, 2, 0, 1]);
        let count = |picks: &[usize], model| picks.iter().filter(|pick| **pick == model).count();
        let picks = Distribution::Zipf.picks(4, 10_000, 7);
        // Weights 1, 1/2, 1/3, 1/4 of 25/12: 4800, 2400, 1600, 1200 expected.
        for (model, expected) in [(0, 4800_usize), (1, 2400), (2, 1600), (3, 1200)] {
            let counted = count(&picks, model);
            assert!(counted.abs_diff(expected) < 250, "model {model}: {counted}");
        }
        let picks = Distribution::Uniform.picks(4, 10_000, 7);
        assert!((0..4).all(|model| count(&picks, model).abs_diff(2500) < 250));
    }

    #[test]
    fn arrivals_come_at_the_rate_asked_for_in_bursts_and_the_same_for_the_same_seed() {
        let arrivals_of = |seed| arrivals(50.0, 20_000, seed);
        let times = arrivals_of(3);
        assert_eq!(times, arrivals_of(3));
        assert_ne!(times, arrivals_of(4));
        assert!(times.is_sorted());
        let mean_s = times[19_999].as_secs_f64() / 20_000.0;
        assert!((mean_s - 0.02).abs() < 0.001, "{mean_s}");
        // Gaps of a Poisson process are exponential: 1 - 1/e of them are shorter than the mean.
        let short = times.windows(2).filter(|pair| (pair[1] - pair[0]).as_secs_f64() < 0.02).count();
        assert!(short.abs_diff(12_642) < 300, "{short}");
    }

    #[test]
    fn prompts_have_the_length_asked_for_and_differ_between_requests() {
        assert_eq!(prompt(9, 0, 0).split(' ').count(), 9);
        assert_ne!(prompt(9, 0, 0), prompt(9, 0, 1));
        assert_eq!(prompt(9, 3, 1), prompt(9, 3, 1));
    }
}

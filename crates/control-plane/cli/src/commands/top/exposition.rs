//! Reads labelled histograms from the Prometheus text format, limited to the forms that the gateway writes.

use std::collections::BTreeMap;

/// Cumulative histogram of one label value.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Histogram {
    sum: f64,
    count: u64,
    /// Upper bounds in rising order, each with the number of values at or below it; the last bound is
    /// infinite.
    buckets: Vec<(f64, u64)>,
}

/// Returns the histograms of the metric `name` in `text`, keyed by the value of their label `label`.
pub(super) fn histograms(text: &str, name: &str, label: &str) -> BTreeMap<String, Histogram> {
    let mut found: BTreeMap<String, Histogram> = BTreeMap::new();
    for line in text.lines() {
        let Some((kind, labels, value)) = line.strip_prefix(name).and_then(sample) else { continue };
        let Some(of) = labels.get(label) else { continue };
        let histogram = found.entry(of.clone()).or_default();
        match kind {
            "_sum" => histogram.sum = value,
            "_count" => histogram.count = whole(value),
            "_bucket" => {
                let bound = labels.get("le").and_then(|bound| bound.replace("+Inf", "inf").parse().ok());
                histogram.buckets.extend(bound.map(|bound: f64| (bound, whole(value))));
            }
            _ => {}
        }
    }
    found.values_mut().for_each(|it| it.buckets.sort_by(|one, other| one.0.total_cmp(&other.0)));
    found
}

impl Histogram {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the values counted after `before`; all values if the histogram was reset since then.
    pub(super) fn since(&self, before: &Self) -> Self {
        if before.count > self.count || before.buckets.len() != self.buckets.len() {
            return self.clone();
        }
        let pairs = self.buckets.iter().zip(&before.buckets);
        let buckets = pairs.map(|(now, then)| (now.0, now.1.saturating_sub(then.1))).collect();
        Self { sum: (self.sum - before.sum).max(0.0), count: self.count - before.count, buckets }
    }

    /// Returns the mean, or `None` without values.
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    pub(super) fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// Returns the value below which a share `share` of the values lies, interpolated linearly between two
    /// bounds as Prometheus does. A quantile beyond the last finite bound is that bound.
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.count as f64;
        let at = self.buckets.iter().position(|&(_, at_most)| self.count > 0 && at_most as f64 >= rank)?;
        let (below, so_far) = at.checked_sub(1).map_or((0.0, 0), |before| self.buckets[before]);
        let (bound, at_most) = self.buckets[at];
        if !bound.is_finite() {
            return Some(below);
        }
        let inside = at_most.saturating_sub(so_far).max(1) as f64;
        Some(below + (bound - below) * ((rank - so_far as f64) / inside).clamp(0.0, 1.0))
    }
}

/// Parses the rest of a sample line after its metric name: suffix such as `_sum`, labels and value.
fn sample(rest: &str) -> Option<(&str, BTreeMap<String, String>, f64)> {
    let (kind, rest) = rest.split_once('{')?;
    let (labels, rest) = labels(rest)?;
    Some((kind, labels, rest.trim().parse().ok()?))
}

/// Parses labels up to the closing brace and returns the remaining text with them.
fn labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut found = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches(',');
        if let Some(behind) = rest.strip_prefix('}') {
            return Some((found, behind));
        }
        let (name, text) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = text.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    c => c,
                }),
                (_, c) => value.push(c),
            }
        };
        found.insert(name.to_owned(), value);
        rest = &text[end + 1..];
    }
}

/// Truncates a count, which the format writes as a decimal number.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
fn whole(value: f64) -> u64 {
    value.max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# TYPE ttft histogram
ttft_bucket{adapter="pirate",le="0.1"} 2
ttft_bucket{adapter="pirate",le="0.2"} 4
ttft_bucket{adapter="pirate",le="+Inf"} 4
ttft_sum{adapter="pirate"} 0.5
ttft_count{adapter="pirate"} 4
ttft_sum{adapter="a\"b}"} 3
ttft_count{adapter="a\"b}"} 1
ttft_sum 7
ttft_broken{adapter="x
other_sum{adapter="pirate"} 9
"#;

    #[test]
    fn histograms_are_found_by_label_whatever_stands_in_it() {
        let found = histograms(TEXT, "ttft", "adapter");
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a\"b}", "pirate"]);
        assert_eq!(found["a\"b}"].mean(), Some(3.0));
        let pirate = &found["pirate"];
        assert_eq!((pirate.count(), pirate.mean()), (4, Some(0.125)));
        assert_eq!(pirate.quantile(0.5), Some(0.1));
        assert!((pirate.quantile(0.75).unwrap() - 0.15).abs() < 1e-9);
    }

    #[test]
    fn what_came_since_is_told_alone_and_what_began_anew_whole() {
        let now = histograms(TEXT, "ttft", "adapter")["pirate"].clone();
        let before = Histogram { sum: 0.1, count: 2, buckets: vec![(0.1, 2), (0.2, 2), (f64::INFINITY, 2)] };
        let since = now.since(&before);
        assert_eq!((since.count(), since.mean()), (2, Some(0.2)));
        assert!((since.quantile(0.5).unwrap() - 0.15).abs() < 1e-9, "both were above the first bound");
        assert_eq!(before.since(&now), before);
        assert_eq!(now.since(&now).quantile(0.5), None);
    }

    #[test]
    fn beyond_the_last_bound_nothing_is_made_up() {
        let slow = Histogram { sum: 9.0, count: 1, buckets: vec![(0.1, 0), (f64::INFINITY, 1)] };
        assert_eq!(slow.quantile(0.95), Some(0.1));
    }
}

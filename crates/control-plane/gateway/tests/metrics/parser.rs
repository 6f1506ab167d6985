//! A strict parser of Prometheus's text format, which accepts only what every scraper accepts.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MetricSample {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

#[derive(Debug, Default)]
pub(crate) struct Family {
    pub(crate) kind: String,
    pub(crate) help: String,
    pub(crate) samples: Vec<MetricSample>,
}

/// Parses `text`, or returns the broken rule.
pub(crate) fn parse(text: &str) -> Result<BTreeMap<String, Family>, String> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let (mut current, mut seen) = (String::new(), BTreeSet::new());
    if !text.ends_with('\n') {
        return Err("the text does not end in a newline".to_owned());
    }
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or_else(|| format!("no help: {line}"))?;
            let family = Family { help: help.to_owned(), ..Family::default() };
            if families.insert(name.to_owned(), family).is_some() {
                return Err(format!("{name} comes twice"));
            }
            name.clone_into(&mut current);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or_else(|| format!("no type: {line}"))?;
            let family = families.get_mut(name).filter(|family| name == current && family.kind.is_empty());
            kind.clone_into(&mut family.ok_or_else(|| format!("a type out of place: {line}"))?.kind);
        } else {
            let sample = sample(line)?;
            let family = families.get_mut(&current).ok_or_else(|| format!("no family: {line}"))?;
            if !belongs(&sample, &current, &family.kind) {
                return Err(format!("not of {current} ({}): {line}", family.kind));
            }
            if !seen.insert((sample.name.clone(), sample.labels.clone())) {
                return Err(format!("a series comes twice: {line}"));
            }
            family.samples.push(sample);
        }
    }
    for (name, family) in &families {
        check(name, family)?;
    }
    Ok(families)
}

fn belongs(sample: &MetricSample, name: &str, kind: &str) -> bool {
    match kind {
        "counter" | "gauge" => sample.name == name,
        "histogram" => {
            ["_bucket", "_sum", "_count"].iter().any(|suffix| sample.name == format!("{name}{suffix}"))
        }
        _ => false,
    }
}

fn check(name: &str, family: &Family) -> Result<(), String> {
    if family.samples.is_empty() || family.help.is_empty() {
        return Err(format!("{name} has no samples or no help"));
    }
    match family.kind.as_str() {
        "counter" => match family.samples.iter().find(|sample| sample.value.is_nan() || sample.value < 0.0) {
            Some(sample) => Err(format!("a counter cannot be that: {sample:?}")),
            None => Ok(()),
        },
        "histogram" => check_histogram(name, family),
        _ => Ok(()),
    }
}

/// Checks that every series has ascending bounds, monotonic counts, an infinite bucket equal to its count,
/// and a sum.
fn check_histogram(name: &str, family: &Family) -> Result<(), String> {
    let mut series: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
    for sample in family.samples.iter().filter(|sample| sample.name.ends_with("_bucket")) {
        let mut labels = sample.labels.clone();
        let bound = labels.remove("le").ok_or_else(|| format!("a bucket without le: {sample:?}"))?;
        series.entry(labels).or_default().push((number(&bound)?, sample.value));
    }
    let one = |suffix: &str, labels: &BTreeMap<String, String>| {
        let name = format!("{name}{suffix}");
        family
            .samples
            .iter()
            .find(|sample| sample.name == name && sample.labels == *labels)
            .map(|sample| sample.value)
    };
    for (labels, buckets) in &series {
        let ascending = buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let last = buckets.last().filter(|last| last.0.is_infinite()).map(|last| last.1);
        if !ascending || last.is_none() || last != one("_count", labels) || one("_sum", labels).is_none() {
            return Err(format!("{name}{labels:?} is no histogram: {buckets:?}"));
        }
    }
    let counts = family.samples.iter().filter(|sample| sample.name.ends_with("_count")).count();
    if counts == series.len() { Ok(()) } else { Err(format!("{name} has a count without buckets")) }
}

fn sample(line: &str) -> Result<MetricSample, String> {
    let bad = |why: &str| format!("{why}: {line}");
    let (head, value) = line.rsplit_once(' ').ok_or_else(|| bad("no value"))?;
    let (name, labels) = match head.split_once('{') {
        None => (head, BTreeMap::new()),
        Some((name, rest)) => (name, labels(rest.strip_suffix('}').ok_or_else(|| bad("no closing brace"))?)?),
    };
    if !is_name(name) {
        return Err(bad("no name"));
    }
    Ok(MetricSample { name: name.to_owned(), labels, value: number(value)? })
}

pub(crate) fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && name.chars().all(allowed)
}

fn labels(mut text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut labels = BTreeMap::new();
    while !text.is_empty() {
        let (name, rest) = text.split_once("=\"").ok_or_else(|| format!("no label: {text}"))?;
        let (value, rest) = quoted(rest)?;
        if !is_name(name) || name.contains(':') || labels.insert(name.to_owned(), value).is_some() {
            return Err(format!("a label that cannot be: {name}"));
        }
        text = match rest.strip_prefix(',') {
            Some("") => return Err("a comma at the end".to_owned()),
            Some(rest) => rest,
            None if rest.is_empty() => rest,
            None => return Err(format!("no comma: {rest}")),
        };
    }
    Ok(labels)
}

/// A value up to its closing quote, unescaped, and the rest.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => value.push(match chars.next() {
                Some((_, 'n')) => '\n',
                Some((_, c @ ('"' | '\\'))) => c,
                other => return Err(format!("an escape that is none: {other:?}")),
            }),
            c => value.push(c),
        }
    }
    Err("a quote that does not close".to_owned())
}

fn number(text: &str) -> Result<f64, String> {
    match text {
        "+Inf" => Ok(f64::INFINITY),
        "-Inf" => Ok(f64::NEG_INFINITY),
        text if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
            text.parse().map_err(|error| format!("{text}: {error}"))
        }
        _ => Err(format!("no number: {text}")),
    }
}

#[test]
fn the_reader_refuses_what_a_scraper_would() {
    let head = "# HELP a x\n# TYPE a gauge\n";
    for bad in [
        format!("{head}a 1"),
        format!("{head}a 1\na 2\n"),
        format!("{head}b 1\n"),
        format!("{head}a{{l=\"x}} 1\n"),
        format!("{head}a one\n"),
        format!("{head}a 1\n{head}a 2\n"),
        "a 1\n".to_owned(),
        "# HELP a x\n# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\na_sum 1\na_count 1\n"
            .to_owned(),
        "# HELP a x\n# TYPE a histogram\na_bucket{le=\"+Inf\"} 1\na_sum 1\na_count 2\n".to_owned(),
    ] {
        assert!(parse(&bad).is_err(), "{bad}");
    }
    let good = parse(&format!("{head}a{{l=\"q\\\"\\\\\\n\"}} 2.5\n")).unwrap();
    assert_eq!(good["a"].samples[0].labels["l"], "q\"\\\n");
}

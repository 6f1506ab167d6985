//! The text format of Prometheus (0.0.4).

use std::{fmt::Write as _, sync::MutexGuard};

use super::{
    store::{Family, Labels, Series, Snapshot},
    table::{Metric, MetricKind},
};

pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A label that all lines of a family have beside the metric's own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExtraLabel<'a> {
    pub name: &'static str,
    /// Label value before escaping.
    pub value: &'a str,
}

/// Appends a family under `name`, or nothing if the family is empty.
pub(crate) fn write_family(
    out: &mut String,
    name: &str,
    metric: &Metric,
    extra: Option<ExtraLabel<'_>>,
    rows: &[SeriesRows<'_>],
) {
    if rows.iter().all(|rows| rows.family.is_empty()) {
        return;
    }
    write_head(out, name, metric.kind, metric.help);
    let each = rows
        .iter()
        .flat_map(|rows| rows.family.iter().map(|(labels, series)| (rows.executor, labels, series)));
    for (executor, labels, series) in each {
        let executor = executor.map(|value| ExtraLabel { name: "executor", value });
        let extra: Vec<_> = extra.into_iter().chain(executor).collect();
        let labels = label_list(metric.labels, labels, &extra);
        match series {
            Series::Number(number) => write_line(out, name, "", &labels, number.get()),
            Series::Histogram(histogram) => write_histogram(out, name, &labels, &histogram.snapshot()),
        }
    }
}

#[derive(Debug)]
pub(crate) struct SeriesRows<'a> {
    /// Reporting executor, if there are several.
    pub executor: Option<&'a str>,
    /// The locked family, so that no series is added while they are written.
    pub family: MutexGuard<'a, Family>,
}

/// Appends the `HELP` and `TYPE` lines of a family.
pub(crate) fn write_head(out: &mut String, name: &str, kind: MetricKind, help: &str) {
    let kind = match kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram(_) => "histogram",
    };
    let help = help.replace('\\', "\\\\").replace('\n', "\\n");
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Returns labels in the form `a="x",b="y"`.
#[must_use]
pub(crate) fn label_list(names: &[&str], values: &Labels, extra: &[ExtraLabel<'_>]) -> String {
    let extra = extra.iter().map(|extra| (extra.name, extra.value));
    let own = names.iter().copied().zip(values.iter().map(String::as_str));
    let pairs: Vec<String> =
        extra.chain(own).map(|(name, value)| format!("{name}=\"{}\"", escape(value))).collect();
    pairs.join(",")
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn write_histogram(out: &mut String, name: &str, labels: &str, snapshot: &Snapshot) {
    let separator = if labels.is_empty() { "" } else { "," };
    for (bound, count) in &snapshot.buckets {
        let _ = writeln!(out, "{name}_bucket{{{labels}{separator}le=\"{bound}\"}} {count}");
    }
    let _ = writeln!(out, "{name}_bucket{{{labels}{separator}le=\"+Inf\"}} {}", snapshot.count);
    write_line(out, name, "_sum", labels, snapshot.sum_s);
    let braced = braced(labels);
    let _ = writeln!(out, "{name}_count{braced} {}", snapshot.count);
}

fn write_line(out: &mut String, name: &str, suffix: &str, labels: &str, value: f64) {
    let _ = writeln!(out, "{name}{suffix}{} {value}", braced(labels));
}

fn braced(labels: &str) -> String {
    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") }
}

//! Draws charts of a run.

use std::time::Duration;

use crate::{
    chart::{self, ChartLine},
    engine::CacheSample,
};

/// Draws the device's content over time, until `end`.
pub(super) fn device(title: &str, series: &[CacheSample], end: Duration, marks: &[(f64, &str)]) -> String {
    let line = |name: &str, value: fn(&CacheSample) -> usize| {
        let until = series.iter().filter(|sample| sample.at < end);
        let points = until.map(|sample| (sample.at.as_secs_f64(), value(sample) as f64)).collect();
        ChartLine { name: name.to_owned(), points }
    };
    let lines = [
        line("running sequences", |sample| sample.counts.used),
        line("history", |sample| sample.counts.cached),
        line("adapters", |sample| sample.counts.adapters),
        line("free", |sample| sample.counts.free),
    ];
    chart::lines(&format!("{title}: the device"), ("seconds", "blocks"), &lines, marks)
}

//! The texts of a dashboard snapshot's cells, shared by the line output and the drawn page.

use super::stats::{DashboardSnapshot, TopExecutor, TopRow, TopStatus};
use crate::terminal::printable;

pub(super) const EXECUTORS: [&str; 5] = ["EXECUTOR", "STATE", "REQS", "TOK/S", "WORKERS"];

pub(super) const MODELS: [&str; 7] = ["MODEL", "TIER", "REQS", "TOK/S", "FIRST TOKEN", "95 %", "ANSWERS"];

/// Returns name and text of the facts about the whole deployment.
pub(super) fn facts(look: &DashboardSnapshot) -> [(&'static str, String); 3] {
    let TopStatus { version, uptime_s, ready, requests, tokens_per_s, .. } = &look.status;
    let state = if *ready { "serving" } else { "not ready" };
    [
        ("model", format!("{}, {state} for {uptime_s} s, version {}", look.model(), printable(version))),
        ("requests", format!("{} running, {} waiting", requests.running, requests.waiting)),
        (
            "tokens/s",
            format!("{:.1} generated, {:.1} of prompts", tokens_per_s.generated, tokens_per_s.prompt),
        ),
    ]
}

pub(super) fn executor(one: &TopExecutor) -> [String; 5] {
    let requests = match one.requests.waiting {
        0 => one.requests.running.to_string(),
        waiting => format!("{} (+{waiting} waiting)", one.requests.running),
    };
    [one.name.clone(), one.state(), requests, format!("{:.1}", one.tokens_per_s.generated), one.workers()]
}

pub(super) fn model(row: &TopRow) -> [String; 7] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    [
        row.name.clone(),
        or_dash(row.tier.clone()),
        or_dash(row.requests.map(|requests| requests.to_string())),
        or_dash(row.tokens_per_s.map(|rate| format!("{rate:.1}"))),
        or_dash(row.first_token.mean_ms.map(millis)),
        or_dash(row.first_token.p95_ms.map(millis)),
        row.first_token.count.to_string(),
    ]
}

fn millis(millis: f64) -> String {
    format!("{millis:.0} ms")
}

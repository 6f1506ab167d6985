//! The texts of a dashboard snapshot's cells, shared by the line output and the drawn page.

use control_protocol::status::{DeploymentStatus, ExecutorStats, ExecutorStatus};

use super::stats::{self, DashboardSnapshot, TopRow};
use crate::terminal::printable;

pub(super) const EXECUTORS: [&str; 5] = ["EXECUTOR", "STATE", "REQS", "TOK/S", "WORKERS"];

pub(super) const MODELS: [&str; 7] = ["MODEL", "TIER", "REQS", "TOK/S", "FIRST TOKEN", "95 %", "ANSWERS"];

/// Returns name and text of the facts about the whole deployment.
pub(super) fn rows(look: &DashboardSnapshot) -> [(&'static str, String); 3] {
    let DeploymentStatus { version, uptime_s, ready, stats, .. } = &look.status;
    let ExecutorStats { requests, tokens_per_s, .. } = stats;
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

pub(super) fn executor(one: &ExecutorStatus) -> [String; 5] {
    let ExecutorStats { requests, tokens_per_s, .. } = &one.stats;
    let running = match requests.waiting {
        0 => requests.running.to_string(),
        waiting => format!("{} (+{waiting} waiting)", requests.running),
    };
    let rate = format!("{:.1}", tokens_per_s.generated);
    [one.name.clone(), stats::state(one), running, rate, stats::workers(one)]
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

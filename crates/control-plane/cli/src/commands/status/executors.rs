//! Table of several executors for `status`.

use control_protocol::status::{ExecutorStats, ExecutorStatus};

use super::{device_text, memory, missing_workers};
use crate::terminal::{
    TextStyle, printable,
    table::{size, table},
};

/// Formats the table of executors, followed by the reasons of unused ones.
pub(super) fn all(ink: TextStyle, executors: &[ExecutorStatus]) -> Vec<String> {
    if executors.is_empty() {
        return Vec::new();
    }
    let head = ["EXECUTOR", "STATE", "DEVICE", "REQS", "TOK/S", "BLOCKS", "ADAPTERS", "SENT", "TAKEN OVER"];
    let rows: Vec<_> = executors.iter().map(row).collect();
    let mut parts = vec![table(ink, head, &rows)];
    parts.extend(executors.iter().filter_map(trouble));
    parts
}

fn row(executor: &ExecutorStatus) -> [String; 9] {
    let ExecutorStats { requests, tokens_per_s, memory, adapters, device, .. } = &executor.stats;
    let dash = || "-".to_owned();
    let sequences = executor.sequences;
    [
        called(executor),
        executor.state.as_deref().map_or_else(String::new, printable),
        device.as_ref().map_or_else(dash, device_text),
        format!("{} (+{} waiting)", requests.running, requests.waiting),
        format!("{:.1}", tokens_per_s.generated),
        memory.as_ref().map_or_else(dash, memory::device),
        format!("{}, {}", adapters.resident, size(adapters.bytes)),
        sequences.sent.to_string(),
        sequences.taken_over.to_string(),
    ]
}

fn called(executor: &ExecutorStatus) -> String {
    match &executor.address {
        Some(address) => printable(&format!("{} ({address})", executor.name)),
        None => printable(&executor.name),
    }
}

fn trouble(executor: &ExecutorStatus) -> Option<String> {
    let missing = || executor.stats.workers.as_ref().and_then(missing_workers);
    let why = executor.detail.as_deref().map(printable).or_else(missing)?;
    Some(format!("{}: {why}", called(executor)))
}

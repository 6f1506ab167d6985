//! Table of several executors for `status`.

use serde::Deserialize;

use super::{Adapters, DeviceStatus, MemoryStatus, RequestCounts, Workers};
use crate::terminal::{
    TextStyle, printable,
    table::{size, table},
};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ExecutorStatus {
    name: String,
    /// Address of an executor on another host.
    address: Option<String>,
    state: String,
    detail: Option<String>,
    requests: RequestCounts,
    tokens_per_s: ExecutorRates,
    adapters: Adapters,
    device: DeviceStatus,
    memory: MemoryStatus,
    workers: Workers,
    sequences: Sequences,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ExecutorRates {
    generated: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Sequences {
    sent: u64,
    taken_over: u64,
}

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
    let ExecutorStatus { requests, adapters, sequences, .. } = executor;
    [
        called(executor),
        printable(&executor.state),
        executor.device.text(),
        format!("{} (+{} waiting)", requests.running, requests.waiting),
        format!("{:.1}", executor.tokens_per_s.generated),
        executor.memory.device(),
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
    let why =
        executor.detail.clone().map(|detail| printable(&detail)).or_else(|| executor.workers.missing())?;
    Some(format!("{}: {why}", called(executor)))
}

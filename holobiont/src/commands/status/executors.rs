//! Several executors, a line each.

use serde::Deserialize;

use super::{Adapters, Device, Memory, Requests, Workers};
use crate::terminal::{
    Ink, printable,
    table::{size, table},
};

/// One of several executors.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Executor {
    name: String,
    /// Where it is, on another host.
    address: Option<String>,
    state: String,
    detail: Option<String>,
    requests: Requests,
    tokens_per_s: Rates,
    adapters: Adapters,
    device: Device,
    memory: Memory,
    workers: Workers,
    sequences: Sequences,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Rates {
    generated: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Sequences {
    sent: u64,
    taken_over: u64,
}

/// All of them, and below why one is not used.
pub(super) fn all(ink: Ink, executors: &[Executor]) -> Vec<String> {
    if executors.is_empty() {
        return Vec::new();
    }
    let head = ["EXECUTOR", "STATE", "DEVICE", "REQS", "TOK/S", "BLOCKS", "ADAPTERS", "SENT", "TAKEN OVER"];
    let rows: Vec<_> = executors.iter().map(row).collect();
    let mut parts = vec![table(ink, head, &rows)];
    parts.extend(executors.iter().filter_map(trouble));
    parts
}

fn row(executor: &Executor) -> [String; 9] {
    let Executor { requests, adapters, sequences, .. } = executor;
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

fn called(executor: &Executor) -> String {
    match &executor.address {
        Some(address) => printable(&format!("{} ({address})", executor.name)),
        None => printable(&executor.name),
    }
}

fn trouble(executor: &Executor) -> Option<String> {
    let why =
        executor.detail.clone().map(|detail| printable(&detail)).or_else(|| executor.workers.missing())?;
    Some(format!("{}: {why}", called(executor)))
}

//! Status of the layer service and its split clients.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::terminal::{
    TextStyle, printable,
    table::{size, table},
};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct LayerServiceStatus {
    open: u64,
    refused: u64,
    broken: u64,
    joined_rows: u64,
    used: LayerUsage,
    sessions: Vec<SplitSessionStatus>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SplitSessionStatus {
    tenant: String,
    name: String,
    masking: String,
    route: String,
    waiting_rows: u64,
    used: LayerUsage,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LayerUsage {
    calls: u64,
    refused: u64,
    rows: BTreeMap<String, u64>,
    bytes_in: u64,
    bytes_out: u64,
    wait_ms: f64,
    mean_batch_rows: f64,
}

impl LayerServiceStatus {
    /// Formats the number of sessions and their total use.
    pub(super) fn text(&self) -> String {
        let rows: u64 = self.used.rows.values().sum();
        let used =
            (rows > 0).then(|| format!("{rows} rows, {} of them in resident passes", self.joined_rows));
        let trouble = [(self.refused, "refused"), (self.broken, "ended for a breach")];
        let trouble = trouble
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"));
        let open = if self.open == 0 { "none".to_owned() } else { self.open.to_string() };
        [Some(open), used].into_iter().flatten().chain(trouble).collect::<Vec<_>>().join("; ")
    }
}

/// Formats the table of all connected split clients.
pub(super) fn sessions(ink: TextStyle, layers: &LayerServiceStatus) -> Option<String> {
    let rows: Vec<_> = layers.sessions.iter().map(session_row).collect();
    let head = [
        "TENANT", "CLIENT", "ROUTE", "MASKING", "CALLS", "REFUSED", "ROWS", "BATCH", "IN", "OUT", "WAITED",
        "WAITING",
    ];
    (!rows.is_empty()).then(|| table(ink, head, &rows))
}

/// Formats the table row of a session with its use since it opened.
fn session_row(session: &SplitSessionStatus) -> [String; 12] {
    let used = &session.used;
    [
        printable(&session.tenant),
        printable(&session.name),
        printable(&session.route),
        printable(&session.masking),
        used.calls.to_string(),
        used.refused.to_string(),
        used.rows.values().sum::<u64>().to_string(),
        format!("{:.1}", used.mean_batch_rows),
        size(used.bytes_in),
        size(used.bytes_out),
        format!("{:.1} ms", used.wait_ms),
        session.waiting_rows.to_string(),
    ]
}

//! Status of the layer service and its split clients.

use control_protocol::status::layers::{LayerServiceStatus, SplitSessionStatus};

use crate::terminal::{
    TextStyle, printable,
    table::{size, table},
};

/// Formats the number of sessions and their total use.
pub(super) fn text(layers: &LayerServiceStatus) -> String {
    let rows = layers.used.rows.total();
    let used = (rows > 0).then(|| format!("{rows} rows, {} of them in resident passes", layers.joined_rows));
    let trouble = [(layers.refused, "refused"), (layers.broken, "ended for a breach")];
    let trouble =
        trouble.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}"));
    let open = if layers.open == 0 { "none".to_owned() } else { layers.open.to_string() };
    [Some(open), used].into_iter().flatten().chain(trouble).collect::<Vec<_>>().join("; ")
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
        used.rows.total().to_string(),
        format!("{:.1}", used.mean_batch_rows),
        size(used.bytes_in),
        size(used.bytes_out),
        format!("{:.1} ms", used.wait_ms),
        session.waiting_rows.to_string(),
    ]
}

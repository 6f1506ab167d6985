//! `holobiont ps`: lists the base and the adapters that are resident or in use, as the gateway sees them.
//! With several executors, a column names the executors of each adapter.

use std::{io::IsTerminal as _, time::Duration};

use control_protocol::status::{DeploymentStatus, ExecutorStats, ExecutorStatus};

use crate::{
    client::{ClientError, GatewayClient, LoadedAdapter, list_in},
    commands::status::missing_workers,
    terminal::{
        PrintFormat, Terminal, TextStyle,
        interval::seconds,
        printable,
        table::{short_generation, table},
    },
};

/// Escape sequence that clears the terminal and moves the cursor to the first line.
const CLEAR: &str = "\u{1b}[2J\u{1b}[H";

#[derive(Debug, clap::Args)]
pub(crate) struct PsArguments {
    /// Shows adapters that are only on disk too
    #[arg(long, short)]
    all: bool,
    /// Repeats every S seconds until Ctrl-C
    #[arg(long, short, value_name = "S", num_args = 0..=1, default_missing_value = "1", value_parser = seconds)]
    watch: Option<Duration>,
}

/// Shows resident and used models.
pub(crate) fn run(arguments: &PsArguments, url: &str, terminal: Terminal) -> Result<(), ClientError> {
    let client = GatewayClient::new(url, terminal);
    loop {
        let text = show_resident(arguments, &client, terminal)?;
        if arguments.watch.is_some()
            && std::io::stdout().is_terminal()
            && terminal.format == PrintFormat::Human
        {
            terminal.print(format_args!("{CLEAR}{text}"));
        } else {
            terminal.print(text);
        }
        match arguments.watch {
            Some(interval) => std::thread::sleep(interval),
            None => return Ok(()),
        }
    }
}

fn show_resident(
    arguments: &PsArguments,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<String, ClientError> {
    let body = client.get_text("/v1/lora_adapters")?;
    if terminal.format == PrintFormat::Json {
        return Ok(body);
    }
    let adapters: Vec<LoadedAdapter> = list_in(serde_json::from_str(&body).map_err(ClientError::Garbled)?)?;
    let status = client.get_text("/v1/status")?;
    let status: DeploymentStatus = serde_json::from_str(&status).map_err(ClientError::Garbled)?;
    Ok(text(terminal.ink(), &status, adapters.iter().filter(|adapter| arguments.all || is_shown(adapter))))
}

/// True if the adapter is resident, loading, in use, or not ready.
fn is_shown(adapter: &LoadedAdapter) -> bool {
    adapter.tier.as_deref() != Some("disk") || adapter.requests > Some(0) || adapter.state != "ready"
}

fn text<'a>(
    ink: TextStyle,
    status: &DeploymentStatus,
    adapters: impl Iterator<Item = &'a LoadedAdapter>,
) -> String {
    let executors = &status.executors;
    let mut rows: Vec<PsRow> = match executors.is_empty() {
        true => vec![(base_row(status, "base", &status.stats), String::new())],
        false => executors.iter().map(|one| base_row_of(status, one)).collect(),
    };
    rows.extend(adapters.map(|adapter| (adapter_row(adapter), places(adapter))));
    let head = ["NAME", "GEN", "RANK", "TIER", "ON DEVICE", "REQS", "TOK/S", "PINNED"];
    let table = match executors.is_empty() {
        true => table(ink, head, &rows.into_iter().map(|(row, _)| row).collect::<Vec<_>>()),
        false => {
            let rows: Vec<_> = rows.into_iter().map(|(row, place)| followed_by(row, place)).collect();
            table(ink, followed_by(head, "EXECUTOR"), &rows)
        }
    };
    let missing_of = |stats: &ExecutorStats| stats.workers.as_ref().and_then(missing_workers);
    let missing = executors.iter().filter_map(|one| {
        missing_of(&one.stats).map(|missing| format!("{}: {missing}", printable(&one.name)))
    });
    [table].into_iter().chain(missing_of(&status.stats)).chain(missing).collect::<Vec<_>>().join("\n\n")
}

/// Cells of a table row, and the names of the executors it is about.
type PsRow = ([String; 8], String);

fn base_row_of(status: &DeploymentStatus, one: &ExecutorStatus) -> PsRow {
    let state = one.state.as_deref().unwrap_or_default();
    let tier = if state == "ready" { "base".into() } else { printable(state) };
    (base_row(status, &tier, &one.stats), printable(&one.name))
}

fn base_row(status: &DeploymentStatus, tier: &str, stats: &ExecutorStats) -> [String; 8] {
    let running = match stats.requests.waiting {
        0 => stats.requests.running.to_string(),
        waiting => format!("{} (+{waiting} waiting)", stats.requests.running),
    };
    let rate = format!("{:.1}", stats.tokens_per_s.generated);
    let model = status.model.clone().unwrap_or_else(dash);
    [model, dash(), dash(), tier.to_owned(), dash(), running, rate, dash()]
}

fn adapter_row(adapter: &LoadedAdapter) -> [String; 8] {
    let tier = match adapter.state.as_str() {
        "ready" => adapter.tier.clone().unwrap_or_else(dash),
        state => state.to_owned(),
    };
    [
        adapter.name.clone(),
        short_generation(&adapter.generation),
        adapter.rank.to_string(),
        tier,
        adapter.on_device().unwrap_or_else(dash),
        adapter.requests.map_or_else(dash, |requests| requests.to_string()),
        adapter.tokens_per_s.map_or_else(dash, |rate| format!("{rate:.1}")),
        if adapter.pinned == Some(true) { "yes".into() } else { dash() },
    ]
}

fn places(adapter: &LoadedAdapter) -> String {
    let names = adapter.executors.as_deref().unwrap_or_default();
    if names.is_empty() { dash() } else { printable(&names.join(", ")) }
}

fn followed_by<T>(cells: [T; 8], last: T) -> [T; 9] {
    let [a, b, c, d, e, f, g, h] = cells;
    [a, b, c, d, e, f, g, h, last]
}

fn dash() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn adapter(tier: &str, state: &str, requests: u64) -> LoadedAdapter {
        serde_json::from_value(json!({
            "name": "pirate", "generation": "0123456789abcdef", "rank": 16, "bytes": 1, "tier": tier,
            "state": state, "requests": requests, "tokens_per_s": 12.345, "pinned": true, "device_bytes": 1,
        }))
        .unwrap()
    }

    #[test]
    fn the_base_comes_first_and_every_column_is_filled() {
        let status = json!({"model": "smol", "requests": {"running": 3, "waiting": 2}, "tokens_per_s": {"generated": 41.0}});
        let status = serde_json::from_value(status).unwrap();
        let text = text(TextStyle::None, &status, [adapter("host", "ready", 1)].iter());
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(lines[0], ["NAME", "GEN", "RANK", "TIER", "ON", "DEVICE", "REQS", "TOK/S", "PINNED"]);
        assert_eq!(lines[1], ["smol", "-", "-", "base", "-", "3", "(+2", "waiting)", "41.0", "-"]);
        assert_eq!(lines[2], ["pirate", "0123456789ab", "16", "host", "100", "%", "1", "12.3", "yes"]);
        assert_eq!(lines.len(), 3, "no worker is missing");
    }

    #[test]
    fn of_several_executors_each_row_says_where_it_is() {
        let one = |name, state, running| {
            let workers = json!({"expected": u32::from(name == "left")});
            json!({"name": name, "state": state, "requests": {"running": running}, "workers": workers})
        };
        let executors = [one("left", "ready", 3), one("right", "lost", 0)];
        let status = serde_json::from_value(json!({"model": "smol", "executors": executors})).unwrap();
        let on_left = LoadedAdapter { executors: Some(vec!["left".into()]), ..adapter("host", "ready", 1) };
        let text = text(TextStyle::None, &status, [on_left, adapter("disk", "ready", 0)].iter());
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        let ends: Vec<_> = lines.iter().map(|line| line.last().copied().unwrap_or_default()).collect();
        assert_eq!(ends[..5], ["EXECUTOR", "left", "right", "left", "-"], "{text}");
        assert_eq!((lines[1][3], lines[2][3]), ("base", "lost"));
        assert!(
            text.ends_with("left: 1 of 1 workers missing; holobiont logs lora-worker says why"),
            "{text}"
        );
    }

    #[test]
    fn adapters_on_disk_are_shown_only_if_somebody_uses_them_or_something_is_wrong() {
        assert!(is_shown(&adapter("host", "ready", 0)) && !is_shown(&adapter("disk", "ready", 0)));
        assert!(is_shown(&adapter("disk", "ready", 1)) && is_shown(&adapter("disk", "failed", 0)));
    }
}

//! `holobiont adapters ls`: lists all adapters of a gateway, in every tier.

use crate::{
    client::{ClientError, GatewayClient, LoadedAdapter, list_in},
    terminal::{
        PrintFormat, Terminal, TextStyle, printable,
        table::{short_generation, size, table},
    },
};

/// Lists the adapters; for JSON output, prints the gateway's answer unchanged.
pub(super) fn run(of_runs: bool, client: &GatewayClient, terminal: Terminal) -> Result<(), ClientError> {
    let route = if of_runs { "/v1/lora_adapters?runs=true" } else { "/v1/lora_adapters" };
    let body = client.get_text(route)?;
    if terminal.format == PrintFormat::Json {
        terminal.print(body);
        return Ok(());
    }
    let adapters: Vec<LoadedAdapter> = list_in(serde_json::from_str(&body).map_err(ClientError::Garbled)?)?;
    match adapters.is_empty() {
        true => terminal.note("no adapters yet; try: holobiont adapters add NAME DIR"),
        false => terminal.print(text(terminal.ink(), &adapters)),
    }
    Ok(())
}

fn text(ink: TextStyle, adapters: &[LoadedAdapter]) -> String {
    let dash = || "-".to_owned();
    let rows = adapters.iter().map(|adapter| {
        let state = match &adapter.error {
            Some(error) => format!("{}: {}", adapter.state, printable(error)),
            None => adapter.state.clone(),
        };
        [
            printable(&adapter.name),
            short_generation(&adapter.generation),
            adapter.rank.to_string(),
            size(adapter.bytes),
            adapter.tier.clone().unwrap_or_else(dash),
            if adapter.pinned == Some(true) { "yes".to_owned() } else { dash() },
            adapter.tenant.as_deref().map_or_else(dash, printable),
            adapter.requests.map_or_else(dash, |requests| requests.to_string()),
            state,
        ]
    });
    let head = ["ADAPTER", "GENERATION", "RANK", "SIZE", "TIER", "PINNED", "TENANT", "REQS", "STATE"];
    table(ink, head, &rows.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn adapters_on_disk_and_in_trouble_are_listed_too() {
        let body = json!({"data": [
            {"name": "pirate", "generation": "0123456789abcdef", "rank": 16, "bytes": 2048, "tier": "host", "state": "ready",
             "pinned": true, "requests": 2},
            {"name": "asleep", "generation": "ff", "rank": 4, "bytes": 1024, "tier": "disk", "state": "failed",
             "error": "its files are gone", "tenant": "acme", "pinned": false},
        ]});
        let text = text(TextStyle::None, &list_in(body).unwrap());
        let lines: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[1],
            ["pirate", "0123456789ab", "16", "2.00", "KiB", "host", "yes", "-", "2", "ready"]
        );
        assert_eq!(lines[2][..9], ["asleep", "ff", "4", "1.00", "KiB", "disk", "-", "acme", "-"]);
        assert!(text.ends_with("failed: its files are gone"), "{text}");
    }
}

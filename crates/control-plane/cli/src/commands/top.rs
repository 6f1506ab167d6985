//! `holobiont top`: shows the activity of a deployment, live on a terminal, and once as lines elsewhere.
//!
//! # Layout
//!
//! - `exposition`: histograms from `/metrics`
//! - `stats`: one snapshot of the deployment
//! - `cells`: texts of a snapshot's cells
//! - `page`: the drawn page of successive snapshots
//! - `live`: the interactive loop of snapshots and keys

mod cells;
mod exposition;
mod live;
mod page;
mod stats;

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use self::stats::DashboardSnapshot;
use crate::{
    client::{ClientError, GatewayClient},
    exit::{Exit, Explain},
    terminal::{
        PrintFormat, Terminal, TextStyle,
        interval::seconds,
        table::{pairs, size, table},
    },
};

#[derive(Debug, clap::Args)]
pub(crate) struct TopArguments {
    /// Prints the figures once and exits, as with --json or without a terminal
    #[arg(long)]
    once: bool,
    /// Time between updates, in seconds
    #[arg(long, value_name = "S", default_value = "1", value_parser = seconds)]
    interval: Duration,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TopError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot draw on this terminal")]
    Terminal(#[source] io::Error),
}

impl Explain for TopError {
    fn exit(&self) -> Exit {
        match self {
            Self::Client(error) => error.exit(),
            Self::Terminal(_) => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.next(),
            Self::Terminal(_) => Some("holobiont top --once".into()),
        }
    }
}

pub(crate) fn run(arguments: &TopArguments, url: &str, terminal: Terminal) -> Result<(), TopError> {
    let client = GatewayClient::new(url, terminal);
    let first = DashboardSnapshot::fetch(&client)?;
    let is_drawn = io::stdout().is_terminal() && io::stdin().is_terminal();
    match terminal.format {
        PrintFormat::Json => terminal.print(first.json()),
        PrintFormat::Human if arguments.once || !is_drawn => terminal.print(text(terminal.ink(), &first)),
        PrintFormat::Human => {
            live::watch(client, first, arguments.interval, terminal.ink()).map_err(TopError::Terminal)?;
        }
    }
    Ok(())
}

/// Formats one snapshot as lines.
fn text(ink: TextStyle, look: &DashboardSnapshot) -> String {
    let rows = cells::rows(look).map(|(name, value)| (name.to_owned(), value));
    let executors: Vec<_> = look.executors.iter().map(cells::executor).collect();
    let memory: Vec<_> = look
        .executors
        .iter()
        .flat_map(|one| stats::memory(one).into_iter().map(move |kind| (one.name.clone(), kind)))
        .map(|(of, kind)| {
            [of, kind.of.to_owned(), kind.name.to_owned(), size(kind.bytes), size(kind.limit_bytes)]
        })
        .collect();
    let models: Vec<_> = look.rows(None).iter().map(cells::model).collect();
    let memory =
        (!memory.is_empty()).then(|| table(ink, ["EXECUTOR", "MEMORY", "KIND", "BYTES", "OF"], &memory));
    let parts = [pairs(ink, &rows), table(ink, cells::EXECUTORS, &executors)];
    parts
        .into_iter()
        .chain(memory)
        .chain([table(ink, cells::MODELS, &models)])
        .collect::<Vec<_>>()
        .join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_in_lines_has_everything() {
        let text = text(TextStyle::None, &stats::tests::snapshot(37.5, 4));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        for line in [
            "model smol, serving for 9 s, version 1.2",
            "requests 2 running, 1 waiting",
            "tokens/s 37.5 generated, 5.0 of prompts",
            "executor cpu 2 (+1 waiting) 37.5 1 of 2, core 3 75 %, 1 lost",
            "executor blocks history 4.00 KiB 8.00 KiB",
            "executor host weights 2.00 KiB 8.00 KiB",
            "smol base - - - - 0",
            "pirate host 1 12.5 50 ms 95 ms 4",
        ] {
            let words: Vec<&str> = line.split_whitespace().collect();
            assert!(lines.contains(&words), "{line} is not in\n{text}");
        }
        assert!(!text.contains("asleep") && !text.contains('\u{1b}'), "{text}");
    }
}

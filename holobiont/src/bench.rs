//! `holobiont bench`: a load generator that measures what a client of the gateway sees.
//!
//! Each `--adapters` is one run; a run's requests are spread over its adapters. Prompts differ from request to request,
//! so that no run lives off another's prefix cache.

mod load;
mod report;
mod traffic;

use serde_json::json;

use crate::{
    client::{Client, ClientError},
    exit::{Exit, Explain},
    terminal::{Format, Terminal},
};
use load::Load;
use report::{Report, markdown};
use traffic::{Distribution, Selection, SelectionError};

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArguments {
    /// Whom to ask: names separated by commas, or random:N of the served adapters; each one is a run [default: the base]
    #[arg(long, value_name = "LIST|random:N")]
    adapters: Vec<Selection>,
    /// Requests of a run
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// Requests under way at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: u32,
    /// Tokens of a prompt, about
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt_tokens: u32,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// How requests are spread over the adapters of a run
    #[arg(long, value_enum, default_value_t = Distribution::RoundRobin)]
    distribution: Distribution,
    /// Same seed, same requests
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// How results are written [default: md, or jsonl with --json]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<Output>,
}

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// A Markdown table.
    Md,
    /// One JSON array.
    Json,
    /// One JSON object a line, as each run ends.
    Jsonl,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// The gateway does not say what it serves.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The adapters asked for are not there.
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// Some requests failed: the numbers above do not stand for the load that was asked for.
    #[error("{failed} of {requests} requests failed; the first said")]
    Requests {
        /// How many.
        failed: usize,
        /// Of how many.
        requests: usize,
        /// The first one's reason.
        source: Box<ClientError>,
    },
}

impl Explain for BenchError {
    fn exit(&self) -> Exit {
        match self {
            Self::Client(error) => error.exit(),
            Self::Selection(_) => Exit::NotFound,
            Self::Requests { source, .. } => source.exit(),
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.next(),
            Self::Selection(_) => Some("holobiont ls".into()),
            Self::Requests { source, .. } => source.next(),
        }
    }
}

/// Measures each selection in turn.
pub(crate) fn run(arguments: &BenchArguments, url: &str, terminal: Terminal) -> Result<(), BenchError> {
    let client = Client::new(url);
    let served = client.models()?;
    let base = [Selection::Base];
    let selections = if arguments.adapters.is_empty() {
        &base[..]
    } else {
        &arguments.adapters
    };
    let output = arguments.output.unwrap_or(match terminal.format {
        Format::Human => Output::Md,
        Format::Json => Output::Jsonl,
    });
    // All names are checked before the first request is sent.
    let targets = selections
        .iter()
        .map(|selection| selection.resolve(&served, arguments.seed));
    let targets: Vec<Vec<String>> = targets.collect::<Result<_, _>>()?;
    let mut reports = Vec::new();
    let mut failure = None;
    for models in targets {
        let (report, error) = measure(arguments, &client, models, terminal);
        if output == Output::Jsonl {
            terminal.print(json!(report));
        }
        let requests = report.requests;
        failure = failure.or(error.map(|(failed, source)| BenchError::Requests {
            failed,
            requests,
            source: Box::new(source),
        }));
        reports.push(report);
    }
    match output {
        Output::Md => terminal.print(markdown(&reports)),
        Output::Json => terminal.print(json!(reports)),
        Output::Jsonl => {}
    }
    failure.map_or(Ok(()), Err)
}

/// One run: its report, and how many requests failed with the first one's reason.
fn measure(
    arguments: &BenchArguments,
    client: &Client,
    models: Vec<String>,
    terminal: Terminal,
) -> (Report, Option<(usize, ClientError)>) {
    let progress = terminal.spinner(format!(
        "{} requests over {} models",
        arguments.requests,
        models.len()
    ));
    let load = Load {
        picks: arguments
            .distribution
            .picks(models.len(), arguments.requests as usize, arguments.seed),
        models,
        concurrency: arguments.concurrency as usize,
        prompt_tokens: arguments.prompt_tokens as usize,
        max_tokens: arguments.max_tokens,
        seed: arguments.seed,
    };
    let outcome = load.run(client);
    progress.finish_and_clear();
    let failed = outcome.failures.len();
    let report = Report::new(&load, arguments.distribution, &outcome);
    (
        report,
        outcome.failures.into_iter().next().map(|first| (failed, first)),
    )
}

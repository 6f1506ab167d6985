//! `holobiont bench`: a load generator that measures what a client of the gateway sees.
//!
//! Each `--adapters` is one run; a run's requests are spread over its adapters. Prompts differ from request to request,
//! so that no run lives off another's prefix cache.

mod load;
mod report;
mod traffic;

use serde_json::json;

use crate::{
    client::{Client, ClientError, ServedModel},
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
    /// Same seed, same requests [default: another one each time, so that nothing is answered from a prefix cache]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
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
    let seed = arguments.seed.unwrap_or_else(rand::random);
    let targets = arguments.targets(&client.models()?, seed)?;
    let output = arguments.output.unwrap_or(match terminal.format {
        Format::Human => Output::Md,
        Format::Json => Output::Jsonl,
    });
    let mut reports = Vec::new();
    let mut failure = None;
    for (run, models) in targets.into_iter().enumerate() {
        let load = arguments.load(models, seed.wrapping_add(run as u64));
        let (report, error) = measure(&load, arguments.distribution, &client, terminal);
        if output == Output::Jsonl {
            terminal.print(json!(report));
        }
        reports.push(report);
        failure = failure.or(error);
    }
    match output {
        Output::Md => terminal.print(markdown(&reports)),
        Output::Json => terminal.print(json!(reports)),
        Output::Jsonl => {}
    }
    failure.map_or(Ok(()), Err)
}

impl BenchArguments {
    /// Whom each run asks. All names are checked before the first request is sent.
    fn targets(&self, served: &[ServedModel], seed: u64) -> Result<Vec<Vec<String>>, SelectionError> {
        match self.adapters.as_slice() {
            [] => Ok(vec![Selection::Base.resolve(served, seed)?]),
            selections => selections.iter().map(|selection| selection.resolve(served, seed)).collect(),
        }
    }

    /// The load of one run.
    fn load(&self, models: Vec<String>, seed: u64) -> Load {
        Load {
            picks: self.distribution.picks(models.len(), self.requests as usize, seed),
            models,
            concurrency: self.concurrency as usize,
            prompt_tokens: self.prompt_tokens as usize,
            max_tokens: self.max_tokens,
            seed,
        }
    }
}

/// One run: its report, and what to say if requests failed.
fn measure(
    load: &Load,
    distribution: Distribution,
    client: &Client,
    terminal: Terminal,
) -> (Report, Option<BenchError>) {
    let (requests, models) = (load.picks.len(), load.models.len());
    let progress = terminal.spinner(format!("{requests} requests over {models} models"));
    let outcome = load.run(client);
    progress.finish_and_clear();
    let report = Report::new(load, distribution, &outcome);
    let failed = outcome.failures.len();
    let first = outcome.failures.into_iter().next();
    (report, first.map(|first| BenchError::Requests { failed, requests, source: Box::new(first) }))
}

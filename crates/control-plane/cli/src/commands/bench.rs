//! `holobiont bench`: a load generator that measures what a client of the gateway sees.
//!
//! Each `--adapters` is one run, whose requests are spread over its adapters. Prompts differ between
//! requests, so no run benefits from another run's prefix cache. With `--rate`, requests arrive
//! independently of answers, as from people; only such a load shows how an overloaded gateway behaves.

mod load;
mod report;
mod traffic;

use serde_json::json;

use crate::{
    client::{ClientError, GatewayClient, ServedModel},
    exit::{Exit, Explain},
    terminal::{PrintFormat, Terminal},
};
use load::{LoadPattern, LoadPlan, LoadResult, RequestResult};
use report::{BenchReport, RequestReport, markdown};
use traffic::{Distribution, Selection, SelectionError};

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArguments {
    /// Models of a run: names separated by commas, or N served adapters as random:N, zipf:N, uniform:N or
    /// round-robin:N; each option is one run [default: the base]
    #[arg(long, value_name = "LIST|HOW:N")]
    adapters: Vec<Selection>,
    /// Number of requests of a run
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// Maximum number of concurrent requests [default: 8; with --rate 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: Option<u32>,
    /// Average number of requests per second, sent at random times without waiting for answers; refused
    /// requests are counted and are no errors
    #[arg(long, value_name = "R", value_parser = rate)]
    rate: Option<f64>,
    /// Prints a JSON line for each request, before the results of its run
    #[arg(long)]
    each: bool,
    /// Approximate number of tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt_tokens: u32,
    /// Number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Distribution of requests over the adapters of a run
    #[arg(long, value_enum, default_value_t = Distribution::RoundRobin)]
    distribution: Distribution,
    /// Random seed of the requests [default: a new one for each run, so that the prefix cache has no hits]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Format of the results [default: md, or jsonl with --json]
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    output: Option<ResultFormat>,
}

/// Format of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ResultFormat {
    /// A Markdown table.
    Md,
    /// One JSON array.
    Json,
    /// One JSON object a line, as each run ends.
    Jsonl,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// Some requests failed, so the results do not describe the requested load.
    #[error("{failed} of {requests} requests failed; the first failed with")]
    Requests {
        /// Number of failed requests.
        failed: usize,
        /// Number of all requests.
        requests: usize,
        /// Error of the first failed request.
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

/// Measures each selection as one run.
pub(crate) fn run(arguments: &BenchArguments, url: &str, terminal: Terminal) -> Result<(), BenchError> {
    let client = GatewayClient::new(url, terminal);
    let seed = arguments.seed.unwrap_or_else(rand::random);
    let selections = match arguments.adapters.as_slice() {
        [] => &[Selection::Base],
        selections => selections,
    };
    let targets = targets(selections, &client.models()?, seed)?;
    let output = arguments.output.unwrap_or(match terminal.format {
        PrintFormat::Human => ResultFormat::Md,
        PrintFormat::Json => ResultFormat::Jsonl,
    });
    let mut reports = Vec::new();
    let mut failure = None;
    for (run, (selection, models)) in selections.iter().zip(targets).enumerate() {
        let distribution = selection.distribution().unwrap_or(arguments.distribution);
        let load = arguments.load(models, distribution, seed.wrapping_add(run as u64));
        let outcome = measure(&load, &client, terminal);
        if arguments.each {
            RequestReport::of(&load, &outcome).for_each(|each| terminal.print(json!(each)));
        }
        let report = BenchReport::new(selection, &load, distribution, &outcome);
        let error = arguments.failure(outcome);
        if output == ResultFormat::Jsonl {
            terminal.print(json!(report));
        }
        reports.push(report);
        failure = failure.or(error);
    }
    match output {
        ResultFormat::Md => terminal.print(markdown(&reports)),
        ResultFormat::Json => terminal.print(json!(reports)),
        ResultFormat::Jsonl => {}
    }
    failure.map_or(Ok(()), Err)
}

/// Returns the models of each run. All names are checked before the first request.
fn targets(
    selections: &[Selection],
    served: &[ServedModel],
    seed: u64,
) -> Result<Vec<Vec<String>>, SelectionError> {
    selections.iter().map(|selection| selection.resolve(served, seed)).collect()
}

impl BenchArguments {
    fn load(&self, models: Vec<String>, distribution: Distribution, seed: u64) -> LoadPlan {
        let pattern = match (self.rate, self.concurrency) {
            (None, concurrency) => LoadPattern::Closed { concurrency: concurrency.unwrap_or(8) as usize },
            (Some(per_s), callers) => LoadPattern::Open { per_s, callers: callers.unwrap_or(4096) as usize },
        };
        LoadPlan {
            picks: distribution.picks(models.len(), self.requests as usize, seed),
            models,
            pattern,
            prompt_tokens: self.prompt_tokens as usize,
            max_tokens: self.max_tokens,
            seed,
        }
    }

    /// Returns an error if requests failed. With `--rate`, refusals by a full gateway are expected and no
    /// failures.
    fn failure(&self, outcome: LoadResult) -> Option<BenchError> {
        let requests = outcome.results.len();
        let counts =
            |result: &RequestResult| result.answer.is_err() && !(self.rate.is_some() && result.is_refusal());
        let failures: Vec<_> = outcome.results.into_iter().filter(counts).collect();
        let failed = failures.len();
        let first = failures.into_iter().find_map(|result| result.answer.err())?;
        Some(BenchError::Requests { failed, requests, source: Box::new(first) })
    }
}

/// Executes one run with a spinner.
fn measure(load: &LoadPlan, client: &GatewayClient, terminal: Terminal) -> LoadResult {
    let (requests, models) = (load.picks.len(), load.models.len());
    let progress = terminal.spinner(format!("{requests} requests over {models} models"));
    let outcome = load.run(client);
    progress.finish_and_clear();
    outcome
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.001..=1e6).contains(&rate) => Ok(rate),
        _ => Err("write a number of requests a second from 0.001 to 1000000".into()),
    }
}

//! `holobiont simulate`: forecasts the latency of a load on a number of executors, and the number needed.
//! `holobiont-simulator` computes the forecast; this module passes on the executor settings of the
//! deployment.

use std::{ffi::OsString, io, os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use crate::{
    deployment::{
        config::{DeploymentConfig, DeploymentConfigError},
        program_paths,
    },
    exit::{Exit, Explain},
};

const SIMULATOR: &str = "holobiont-simulator";

#[derive(Debug, clap::Args)]
pub(crate) struct SimulateArguments {
    /// Deployment file [default: environment variables and defaults only]
    #[arg(value_name = "FILE")]
    config: Option<PathBuf>,
    /// Load to simulate: a CSV trace in the format of Azure's LLM trace of 2023
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Step costs that `scripts/bench costs` measured: one file for all executors, or one for each
    #[arg(long, value_name = "FILE,FILE")]
    costs: OsString,
    /// Number of executors
    #[arg(long, value_name = "N", default_value_t = 1)]
    executors: usize,
    /// Number of requests per second [default: as in the trace]
    #[arg(long, value_name = "PER_S")]
    rate: Option<f64>,
    /// SLO target of the time to first token
    #[arg(long, value_name = "MS", default_value_t = 1000.0)]
    ttft_ms: f64,
    /// SLO target of the time per output token
    #[arg(long, value_name = "MS", default_value_t = 100.0)]
    tpot_ms: f64,
    /// Further options of `holobiont-simulator forecast`
    #[arg(last = true, value_name = "OPTION")]
    more: Vec<OsString>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SimulateError {
    #[error(transparent)]
    Config(#[from] DeploymentConfigError),
    #[error("the program {SIMULATOR} is neither beside `holobiont` nor on PATH")]
    NoSimulator,
    #[error("cannot start {}", program.display())]
    Run { program: PathBuf, source: io::Error },
}

impl Explain for SimulateError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::NoSimulator => Exit::NotFound,
            Self::Run { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.next(),
            Self::NoSimulator => Some("cargo build --release --bin holobiont-simulator".into()),
            Self::Run { .. } => None,
        }
    }
}

/// Replaces this process by the simulator; returns only on failure.
pub(crate) fn run(arguments: &SimulateArguments) -> Result<(), SimulateError> {
    let config = DeploymentConfig::layered(DeploymentConfig::default(), arguments.config.as_deref())?;
    let program = program_paths::find(SIMULATOR).ok_or(SimulateError::NoSimulator)?;
    let source = Command::new(&program).args(command(arguments, &config)).exec();
    Err(SimulateError::Run { program, source })
}

fn command(arguments: &SimulateArguments, config: &DeploymentConfig) -> Vec<OsString> {
    let number = |number: f64| Some(number.to_string().into());
    let options: [(&str, Option<OsString>); 8] = [
        ("--trace", Some(arguments.trace.clone().into())),
        ("--costs", Some(arguments.costs.clone())),
        ("--executors", Some(arguments.executors.to_string().into())),
        ("--rate", arguments.rate.and_then(number)),
        ("--ttft-ms", number(arguments.ttft_ms)),
        ("--tpot-ms", number(arguments.tpot_ms)),
        ("--max-running", config.executor.max_running.map(|count| count.to_string().into())),
        ("--chunk-tokens", config.executor.chunk_tokens.map(|count| count.to_string().into())),
    ];
    let mut words = vec![OsString::from("forecast")];
    for (flag, value) in options {
        words.extend(value.into_iter().flat_map(|value| [flag.into(), value]));
    }
    words.extend(arguments.more.iter().cloned());
    words
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct SimulateCommandLine {
        #[command(flatten)]
        arguments: SimulateArguments,
    }

    #[test]
    fn the_simulator_is_told_what_the_deployment_says_of_an_executor() {
        let line = [
            "simulate",
            "--trace",
            "t.csv",
            "--costs",
            "c.json,d.json",
            "--executors",
            "3",
            "--",
            "--seed",
            "7",
        ];
        let config = DeploymentConfig::parse("[executor]\nmax_running = 8").unwrap();
        let words = command(&SimulateCommandLine::parse_from(line).arguments, &config);
        let expected = "forecast --trace t.csv --costs c.json,d.json --executors 3 --ttft-ms 1000 --tpot-ms 100 \
                        --max-running 8 --seed 7";
        assert_eq!(words.join(&OsString::from(" ")), OsString::from(expected));
    }
}

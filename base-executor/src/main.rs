//! Parses, validates, runs.

use std::process::ExitCode;

use base_executor::{bench, check, config::Config, probe};
use clap::Parser as _;

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        // Cause and next step on one line; a backtrace would bury them.
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

fn run() -> anyhow::Result<ExitCode> {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    match arguments.get(1).and_then(|first| first.to_str()) {
        Some("bench") => {
            arguments.remove(1);
            bench::run(&bench::BenchConfig::parse_from(arguments))?;
        }
        Some("check") => {
            arguments.remove(1);
            return check::run(&check::CheckConfig::parse_from(arguments));
        }
        Some("device") => {
            arguments.remove(1);
            probe::run(&probe::ProbeConfig::parse_from(arguments))?;
        }
        _ => base_executor::run(&Config::parse_from(arguments).validated()?)?,
    }
    Ok(ExitCode::SUCCESS)
}

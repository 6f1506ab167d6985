//! Parses, validates, runs.

use std::process::ExitCode;

use base_executor::{bench, config::Config};
use clap::Parser as _;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Cause and next step on one line; a backtrace would bury them.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|first| first == "bench") {
        arguments.remove(1);
        return bench::run(&bench::BenchConfig::parse_from(arguments));
    }
    base_executor::run(&Config::parse_from(arguments).validated()?)
}

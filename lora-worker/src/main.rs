//! Parses, validates, runs.

use std::process::ExitCode;

use clap::Parser as _;
use lora_worker::config::Config;

fn main() -> ExitCode {
    let run = || lora_worker::run(&Config::parse().validated()?);
    run().map_or_else(
        |error| {
            // Cause and next step on one line; a backtrace would bury them.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

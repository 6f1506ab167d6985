//! Parses, validates, runs.

use std::process::ExitCode;

use clap::Parser as _;
use lora_worker::config::Config;
use settings::exit::{Exit, in_one_line};

fn main() -> ExitCode {
    let run = || {
        settings::variables::check_environment()?;
        lora_worker::run(&Config::parse().validated()?)
    };
    run().map_or_else(
        |error| {
            // Cause and next step on one line; a backtrace would bury them.
            eprintln!("error: {}", in_one_line(&*error));
            Exit::of_system(&*error).into()
        },
        |()| ExitCode::SUCCESS,
    )
}

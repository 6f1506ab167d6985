//! The program that trains adapters over rented base layers.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use settings::completions;
use tune::cli::{self, Cli};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if completions::are_asked_for::<Cli>(&arguments) {
        return ExitCode::SUCCESS;
    }
    cli::run(Cli::parse_from(arguments)).into()
}

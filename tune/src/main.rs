//! The program that trains adapters over rented base layers.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    tune::cli::run(tune::cli::Cli::parse()).into()
}

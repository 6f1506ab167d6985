//! The program `holobiont-trainer`, which trains adapters over the layer service.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use settings::completions;
use trainer::cli::{self, TrainerCli};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if completions::are_asked_for::<TrainerCli>(&arguments) {
        return ExitCode::SUCCESS;
    }
    cli::run(TrainerCli::parse_from(arguments)).into()
}

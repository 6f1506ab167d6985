//! `holobiont-simulator`: command line of the library.

#![forbid(unsafe_code)]

use std::{error::Error, process::ExitCode};

use clap::Parser as _;
use simulator::commands::SimulatorCli;

fn main() -> ExitCode {
    match SimulatorCli::parse().run(&mut std::io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let causes = std::iter::successors(Some(&error as &dyn Error), |&error| error.source());
            let text: Vec<String> = causes.map(ToString::to_string).collect();
            eprintln!("error: {}", text.join(": "));
            ExitCode::FAILURE
        }
    }
}

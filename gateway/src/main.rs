//! The gateway process: parses, validates, runs.

use std::{error::Error, process::ExitCode};

use clap::Parser as _;
use gateway::{
    config::{Args, Config},
    server,
};

fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gateway: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<(), Box<dyn Error>> {
    let config = Config::try_from(Args::parse())?;
    Ok(server::run(config)?)
}

//! Entry point of the endpoint picker.

use std::{error::Error, process::ExitCode};

use clap::Parser as _;
use endpoint_picker::{
    config::{Args, PickerConfig, PickerConfigError},
    server,
};
use settings::{
    completions,
    exit::{Exit, in_one_line},
    variables::{UnknownVariable, check_environment},
};

fn main() -> ExitCode {
    serve().map_or_else(
        |error| {
            eprintln!("error: {}", in_one_line(&*error));
            let is_usage = error.is::<PickerConfigError>() || error.is::<UnknownVariable>();
            if is_usage { Exit::Usage } else { Exit::of_system(&*error) }.into()
        },
        |()| ExitCode::SUCCESS,
    )
}

fn serve() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args_os().collect();
    if completions::are_asked_for::<Args>(&arguments) {
        return Ok(());
    }
    let args = Args::parse_from(arguments);
    check_environment()?;
    Ok(server::run(PickerConfig::try_from(args)?)?)
}

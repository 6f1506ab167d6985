//! The command `checks`: writes the data with which answers are checked into a file.

use std::path::PathBuf;

use super::{exit::CliError, pads, terminal::Terminal};
use crate::{
    masking::verify::file::{self, WriteError},
    secrets,
};

#[derive(Debug, clap::Args)]
pub(super) struct ChecksArguments {
    /// Your own copy of the executor's model
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// New file; keep it secret: an executor that knows its content can send wrong answers
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(super) fn run(arguments: &ChecksArguments, terminal: Terminal) -> Result<(), CliError> {
    secrets::keep_memory_private()?;
    // No request waits for this process, so it may use all cores.
    let mut base = pads::own_weights(Some(&arguments.model), "this command", &pads::all_cores(), terminal)?;
    let mut progress = terminal.progress("preparing to check answers");
    file::write(&mut base, &arguments.file, &mut |done, total| progress(done as u64, total as u64)).map_err(
        |error| match error {
            WriteError::Weights(error) => error.into(),
            other => CliError::Usage(other.to_string()),
        },
    )
}

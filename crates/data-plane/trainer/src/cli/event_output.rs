//! Events on stdout, one line of JSON for each.

use std::io::{self, Write as _};

use control_protocol::training::TrainingEvent;

use super::error::TunerError;
use crate::data::DataError;

/// Prints an event as a line of JSON.
pub(super) fn emit(event: &TrainingEvent) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, event)?;
    writeln!(out)?;
    out.flush()
}

/// Prints an event, and turns a closed stdout into an error of the trainer.
pub(super) fn print(event: &TrainingEvent) -> Result<(), TunerError> {
    emit(event)
        .map_err(|source| TunerError::System { what: "cannot write the events of the job to stdout", source })
}

/// Prints an event for each faulty line, if `error` lists faulty lines.
pub(super) fn tell_faults(error: &DataError) -> Result<(), TunerError> {
    let DataError::Problems { problems, .. } = error else { return Ok(()) };
    problems.iter().try_for_each(|problem| {
        let (file, line) = (problem.file.clone(), problem.line as u64);
        print(&TrainingEvent::Problem { file, line, message: problem.fault.to_string() })
    })
}

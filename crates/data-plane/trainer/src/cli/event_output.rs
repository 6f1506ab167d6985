//! What is told on stdout: a line of JSON for each event.

use std::io::{self, Write as _};

use control_protocol::training::TrainingEvent;

use super::error::TunerError;
use crate::data::DataError;

/// Tells an event.
pub(super) fn emit(event: &TrainingEvent) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, event)?;
    writeln!(out)?;
    out.flush()
}

/// The same, for whom it is an error that nobody reads it.
pub(super) fn print(event: &TrainingEvent) -> Result<(), TunerError> {
    emit(event).map_err(|source| TunerError::System { what: "nobody reads what is told of the job", source })
}

/// Tells what is wrong with each line, if that is what is wrong.
pub(super) fn tell_faults(error: &DataError) -> Result<(), TunerError> {
    let DataError::Problems { problems, .. } = error else { return Ok(()) };
    problems.iter().try_for_each(|problem| {
        let (line, message) = (problem.line as u64, problem.fault.to_string());
        print(&TrainingEvent::Problem { line, message })
    })
}

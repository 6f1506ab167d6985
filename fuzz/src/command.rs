//! Targets of the command: the deployment file, and a gateway's answers.

use crate::Outcome;

pub(crate) fn deployment_file(input: &[u8]) -> Outcome {
    let text = std::str::from_utf8(input).map_err(|error| error.to_string())?;
    holobiont::fuzz_hooks::deployment_file(text).map_err(|error| error.to_string())
}

pub(crate) fn events(input: &[u8]) -> Outcome {
    holobiont::fuzz_hooks::events(input).map_err(|error| error.to_string())
}

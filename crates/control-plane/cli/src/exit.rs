//! Errors of commands: exit code, cause, reason and next command.

use std::{error::Error, io};

use security::keys::KeyFileError;
pub use settings::exit::Exit;

/// Table of exit codes and environment variables, printed by `--help`.
pub const HELP: &str = "\
Exit codes:
  0  ok
  1  failed
  2  usage: the command line or the configuration is wrong
  3  not found: a model, an adapter, a file or a program
  4  conflict: a port, a state directory or a name is taken
  5  unavailable: no answer, or too busy now
  6  refused: the user or the API key lacks the permission

Environment:
  HOLOBIONT_HOME     directory of models and state (~/.local/share/holobiont)
  HOLOBIONT_URL      the gateway that commands talk to (http://127.0.0.1:8080)
  HOLOBIONT_API_KEY  the API key that commands send
  HOLOBIONT_<OPTION>  the value of an option of `up`, as HOLOBIONT_MAX_RUNNING for --max-running
  NO_COLOR           no colours; CLICOLOR_FORCE sets colours in a pipe too";

/// Error with an exit code and a next step. `Display` gives the cause, and the sources give the reason.
pub(crate) trait Explain: Error {
    fn exit(&self) -> Exit;

    /// Returns the next command, or the next step in words.
    fn next(&self) -> Option<String> {
        None
    }

    /// True if the user has already seen the error.
    fn is_said(&self) -> bool {
        false
    }
}

/// The next step is part of the error's text, which gateway and executor print too.
impl Explain for KeyFileError {
    fn exit(&self) -> Exit {
        match self {
            Self::Read { reason, .. } if reason.kind() == io::ErrorKind::NotFound => Exit::NotFound,
            Self::Read { reason, .. } | Self::Write { reason, .. } => match reason.kind() {
                io::ErrorKind::PermissionDenied => Exit::Refused,
                _ => Exit::Failed,
            },
            Self::Line { .. } | Self::Empty(_) | Self::TooMany(_) => Exit::Usage,
        }
    }
}

/// Returns the errors below `error`, outermost first, in one text. Errors that the text already contains are
/// skipped; `None` if no error is left.
pub(crate) fn why(error: &dyn Explain) -> Option<String> {
    let (mut causes, mut said) = (Vec::new(), error.to_string());
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string().trim_end().to_owned();
        if !said.contains(&text) {
            said.push_str(&text);
            causes.push(text);
        }
        source = cause.source();
    }
    (!causes.is_empty()).then(|| causes.join(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_text_lists_every_exit_code_with_its_meaning() {
        for exit in Exit::ALL {
            let line = HELP.lines().find(|line| line.starts_with(&format!("  {} ", exit.number())));
            let line = line.unwrap_or_else(|| panic!("no line for {exit:?}"));
            assert!(line.contains(&exit.as_str().replace('_', " ")), "{line:?} does not name {exit:?}");
        }
    }
}

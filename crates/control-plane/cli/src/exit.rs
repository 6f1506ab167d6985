//! Exit codes, and the shape of what a failed command says: cause, why, next command.

use std::{error::Error, io};

use security::keys::KeyFileError;
pub use settings::exit::Exit;

/// The table of exit codes as `--help` prints it.
pub const HELP: &str = "\
Exit codes:
  0  ok
  1  failed
  2  usage: the command line or the configuration is wrong
  3  not found: a model, an adapter, a file or a program
  4  conflict: a port, a state directory or a name is taken
  5  unavailable: nobody answers, or not now
  6  refused: the caller may not do this

Environment:
  HOLOBIONT_HOME     where models and state live (~/.local/share/holobiont)
  HOLOBIONT_URL      the gateway that commands talk to (http://127.0.0.1:8080)
  HOLOBIONT_API_KEY  the key they show it
  HOLOBIONT_<OPTION>  sets what the option of `up` sets, as HOLOBIONT_MAX_RUNNING for --max-running
  NO_COLOR           no colours; CLICOLOR_FORCE: colours also into a pipe";

/// An error that knows its exit code and what to type next. Its `Display` is the cause, its sources are the why.
pub(crate) trait Explain: Error {
    /// The exit code.
    fn exit(&self) -> Exit;

    /// The next command, or the next step in words.
    fn next(&self) -> Option<String> {
        None
    }

    /// True if the person has been told already.
    fn is_said(&self) -> bool {
        false
    }
}

/// What to do about it stands in its text, which gateway and executor show alike.
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

/// The errors below `error`, outermost first, joined into one text, without those that the text above them says
/// already; `None` if there are none.
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

//! Exit codes, and the shape of what a failed command says: cause, why, next command.

use std::{error::Error, process::ExitCode};

/// How a command ended. The numbers are part of the command line's contract and stand in `--help`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It did what was asked.
    Ok,
    /// It failed.
    Failed,
    /// The command line or the configuration is wrong.
    Usage,
    /// A model, an adapter, a file or a program is not there.
    NotFound,
    /// Something else holds what is needed: a port, a state directory, a name.
    Conflict,
    /// Nobody answers, or the answer is "not now".
    Unavailable,
    /// The caller may not do this.
    Refused,
}

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
  HOLOBIONT_<SECTION>_<FIELD>  overrides a field of the deployment file
  NO_COLOR           no colours; CLICOLOR_FORCE: colours also into a pipe";

impl Exit {
    /// The number the process exits with.
    pub fn number(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Conflict => 4,
            Self::Unavailable => 5,
            Self::Refused => 6,
        }
    }

    /// What a process that ended with `code` meant; one that a signal ended has failed.
    pub(crate) fn of_code(code: Option<i32>) -> Self {
        let known = [Self::Ok, Self::Usage, Self::NotFound, Self::Conflict, Self::Unavailable, Self::Refused];
        let is_it = |exit: &Self| Some(i32::from(exit.number())) == code;
        known.into_iter().find(is_it).unwrap_or(Self::Failed)
    }

    /// A stable word for the number, for `--json`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Unavailable => "unavailable",
            Self::Refused => "refused",
        }
    }

    /// What an HTTP status means for the person at the command line.
    pub(crate) fn of_http(status: u16) -> Self {
        match status {
            400 | 413 | 415 | 422 => Self::Usage,
            401 | 403 => Self::Refused,
            404 => Self::NotFound,
            409 => Self::Conflict,
            408 | 429 | 503 | 504 | 507 => Self::Unavailable,
            _ => Self::Failed,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.number())
    }
}

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

/// The errors below `error`, outermost first, joined into one text; `None` if there are none.
pub(crate) fn why(error: &dyn Explain) -> Option<String> {
    let mut causes = Vec::new();
    let mut source = error.source();
    while let Some(cause) = source {
        causes.push(cause.to_string().trim_end().to_owned());
        source = cause.source();
    }
    (!causes.is_empty()).then(|| causes.join(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Exit; 7] = [
        Exit::Ok,
        Exit::Failed,
        Exit::Usage,
        Exit::NotFound,
        Exit::Conflict,
        Exit::Unavailable,
        Exit::Refused,
    ];

    #[test]
    fn the_help_text_lists_every_exit_code_with_its_meaning() {
        for exit in ALL {
            let line = HELP.lines().find(|line| line.starts_with(&format!("  {} ", exit.number())));
            let line = line.unwrap_or_else(|| panic!("no line for {exit:?}"));
            assert!(line.contains(&exit.word().replace('_', " ")), "{line:?} does not name {exit:?}");
        }
    }

    #[test]
    fn the_exit_code_of_another_process_is_understood() {
        for exit in ALL {
            assert_eq!(Exit::of_code(Some(i32::from(exit.number()))), exit);
        }
        assert_eq!((Exit::of_code(None), Exit::of_code(Some(101))), (Exit::Failed, Exit::Failed));
    }

    #[test]
    fn http_statuses_map_to_the_documented_exit_codes() {
        let cases = [(400, 2), (401, 6), (403, 6), (404, 3), (409, 4), (429, 5), (503, 5), (500, 1)];
        for (status, number) in cases {
            assert_eq!(Exit::of_http(status).number(), number, "HTTP {status}");
        }
    }
}

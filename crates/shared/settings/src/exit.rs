//! Exit codes of all programs, and an error with its causes in one line.

use std::{error::Error, io, process::ExitCode};

/// Result of a program. The numbers are part of the command line's contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Success of the command.
    Ok,
    /// Any failure without a code of its own.
    Failed,
    /// Wrong command line or configuration.
    Usage,
    /// Missing model, adapter, file or program.
    NotFound,
    /// Conflict over a port, a state directory or a name that is taken.
    Conflict,
    /// No answer from a peer, or the answer "not now".
    Unavailable,
    /// Lack of permission for the caller.
    Refused,
}

impl Exit {
    /// All values, ordered by their numbers.
    pub const ALL: [Self; 7] = [
        Self::Ok,
        Self::Failed,
        Self::Usage,
        Self::NotFound,
        Self::Conflict,
        Self::Unavailable,
        Self::Refused,
    ];

    /// Returns the number with which the process exits.
    #[must_use]
    pub const fn number(self) -> u8 {
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

    /// Returns the value for the exit code of another process; `None` (ended by a signal) and unknown codes
    /// are [`Self::Failed`].
    #[must_use]
    pub fn of_code(code: Option<i32>) -> Self {
        let known = Self::ALL.into_iter().find(|exit| Some(i32::from(exit.number())) == code);
        known.unwrap_or(Self::Failed)
    }

    /// Returns a stable word for JSON output.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
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

    /// Maps the HTTP status of a gateway's answer to an exit code.
    #[must_use]
    pub fn of_http(status: u16) -> Self {
        match status {
            400 | 413 | 415 | 422 => Self::Usage,
            401 | 403 => Self::Refused,
            404 => Self::NotFound,
            409 => Self::Conflict,
            408 | 429 | 503 | 504 | 507 => Self::Unavailable,
            _ => Self::Failed,
        }
    }

    /// Maps the first I/O error among `error` and its causes that has a code of its own; else
    /// [`Self::Failed`].
    #[must_use]
    pub fn of_system(error: &(dyn Error + 'static)) -> Self {
        let mut causes = causes(error).filter_map(|cause| cause.downcast_ref::<io::Error>());
        let meaning = causes.find_map(|error| match error.kind() {
            io::ErrorKind::NotFound => Some(Self::NotFound),
            io::ErrorKind::PermissionDenied => Some(Self::Refused),
            io::ErrorKind::AddrInUse => Some(Self::Conflict),
            _ => None,
        });
        meaning.unwrap_or(Self::Failed)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.number())
    }
}

/// Returns `error` and its causes, outermost first.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |above| {
        let above: &'a (dyn Error + 'static) = *above;
        above.source()
    })
}

/// Returns `error` and its causes in one line. A cause that the text already contains is not repeated.
#[must_use]
pub fn in_one_line(error: &(dyn Error + 'static)) -> String {
    causes(error).fold(String::new(), |said, cause| {
        let cause = cause.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" ");
        match said.as_str() {
            "" => cause,
            said if said.contains(&cause) => said.to_owned(),
            said => format!("{said}: {cause}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open the door: {source}; knock")]
    struct InnerError {
        source: io::Error,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("nobody goes out")]
    struct OuterError(#[source] InnerError);

    fn house() -> OuterError {
        OuterError(InnerError { source: io::Error::new(io::ErrorKind::PermissionDenied, "it is\nlocked") })
    }

    #[test]
    fn a_cause_is_said_once_and_in_one_line() {
        let expected = "nobody goes out: cannot open the door: it is locked; knock";
        assert_eq!(in_one_line(&house()), expected);
    }

    #[test]
    fn what_the_system_refused_is_known_however_deep_it_lies() {
        assert_eq!(Exit::of_system(&house()), Exit::Refused);
        assert_eq!(Exit::of_system(&io::Error::other("x")), Exit::Failed);
    }

    #[test]
    fn the_exit_code_of_another_process_is_understood() {
        for exit in Exit::ALL {
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

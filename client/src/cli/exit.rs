//! Exit codes of errors, and the form of errors, as in the `holobiont` command.

use std::{error::Error, io, path::PathBuf};

use model_files::generation_defaults::GenerationDefaultsError;
use serde_json::{Value, json};
use settings::exit::Exit;
use shmproto::{fd_passing::ConnectError, layer::control::RefusalCode};

use crate::{
    base::BaseError,
    error::{CallError, LinkError},
    generate::GenerateError,
    masking::one_time_pads::pool::PoolError,
    split_model::{LoadError, SplitError},
    text::{TextError, TextFilesError},
};
use draft_model::load::DraftError;
use model::site_model::SiteModelError;

pub(super) const HELP: &str = "\
Exit codes:
  0  ok
  1  failed
  2  usage: the command line is wrong
  3  not found: a model, an adapter or a file
  5  unavailable: no answer, or too busy now
  6  refused: the executor does not accept this client

Environment:
  HOLOBIONT_EXECUTOR  the executor's address
  HOLOBIONT_API_KEY   the API key that the client sends
  XDG_CACHE_HOME      the directory of fetched base files (~/.cache)";

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A call to the executor failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The client weights are not available.
    #[error(transparent)]
    Base(#[from] BaseError),
    /// Generating an answer failed.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The split model cannot be set up.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The adapter cannot be loaded.
    #[error(transparent)]
    Adapter(#[from] LoadError),
    /// The draft model cannot be used.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The client's own copy of the weights cannot be used.
    #[error(transparent)]
    OwnWeights(#[from] SiteModelError),
    /// The tokenizer of the base cannot be used.
    #[error(transparent)]
    TextFiles(#[from] TextFilesError),
    /// The prompt cannot be encoded.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The base's generation defaults are invalid.
    #[error(transparent)]
    Defaults(#[from] GenerationDefaultsError),
    /// Options contradict each other, or a value is out of range.
    #[error("{0}")]
    Usage(String),
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path, as the user wrote it.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Standard input or output cannot be used.
    #[error("cannot read from or write to the terminal")]
    Terminal(#[from] io::Error),
}

impl CliError {
    /// Returns the exit code of this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Call(error) | Self::Base(BaseError::Call(error)) | Self::Split(SplitError::Call(error)) => {
                of_call(error)
            }
            Self::Generate(GenerateError::Call(error)) => of_call(error),
            Self::Base(BaseError::Open(_) | BaseError::NoFiles) => Exit::NotFound,
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => Exit::NotFound,
            Self::Adapter(error) if is_missing(error) => Exit::NotFound,
            Self::OwnWeights(SiteModelError::Open(_)) => Exit::NotFound,
            Self::Draft(DraftError::Find(_) | DraftError::Open(_)) => Exit::NotFound,
            Self::Draft(DraftError::Tokenizer { .. }) => Exit::Usage,
            Self::Usage(_) | Self::Generate(_) | Self::Text(_) => Exit::Usage,
            _ => Exit::Failed,
        }
    }

    /// Returns the causes that the message does not contain.
    fn causes(&self) -> Option<String> {
        let message = self.to_string();
        let chain = std::iter::successors(self.source(), |&cause| cause.source());
        let causes = chain.map(|cause| cause.to_string().trim_end().to_owned());
        let causes: Vec<_> = causes.filter(|cause| !message.contains(cause)).collect();
        (!causes.is_empty()).then(|| causes.join(": "))
    }

    /// Returns the error as text for a user: the message, then its causes.
    pub fn text(&self) -> String {
        match self.causes() {
            Some(why) => format!("error: {self}\n  why: {why}"),
            None => format!("error: {self}"),
        }
    }

    /// Returns the error as JSON for programs.
    pub fn json(&self) -> Value {
        let (message, code) = (self.to_string(), self.exit().as_str());
        json!({ "error": { "message": message, "code": code, "why": self.causes() } })
    }
}

/// True if a missing file caused the error.
fn is_missing(error: &(dyn Error + 'static)) -> bool {
    let mut chain = std::iter::successors(Some(error), |&cause| cause.source());
    chain.any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
    })
}

fn of_call(error: &CallError) -> Exit {
    match error {
        CallError::PeerGone { .. } | CallError::Quota { .. } | CallError::Busy { .. } => Exit::Unavailable,
        CallError::Pads(error) => match **error {
            PoolError::Empty { .. } | PoolError::Held { .. } => Exit::Unavailable,
            PoolError::Absent { .. } => Exit::NotFound,
            _ => Exit::Failed,
        },
        CallError::Masking(_)
        | CallError::Nonlinear { .. }
        | CallError::NoRing { .. }
        | CallError::SameExecutor { .. } => Exit::Usage,
        CallError::Link(error) => match error {
            LinkError::Unauthenticated(_) => Exit::Refused,
            LinkError::Refused(refused) => match refused.code {
                RefusalCode::Unauthenticated => Exit::Refused,
                _ => Exit::Unavailable,
            },
            LinkError::Credentials(_) | LinkError::Local(ConnectError::Path(_)) => Exit::Usage,
            LinkError::Local(ConnectError::Stranger { .. }) => Exit::Refused,
            LinkError::Protocol(_) => Exit::Failed,
            LinkError::Local(_)
            | LinkError::Unreachable { .. }
            | LinkError::Lost(_)
            | LinkError::Silent { .. }
            | LinkError::Tls { .. }
            | LinkError::Draining => Exit::Unavailable,
        },
        _ => Exit::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_text_lists_every_exit_code_with_its_meaning() {
        // A client takes no port, directory or name, so nothing can conflict.
        for exit in Exit::ALL.into_iter().filter(|&exit| exit != Exit::Conflict) {
            let line = HELP.lines().find(|line| line.starts_with(&format!("  {} ", exit.number())));
            let line = line.unwrap_or_else(|| panic!("no line for {exit:?}"));
            assert!(line.contains(&exit.as_str().replace('_', " ")), "{line:?} does not name {exit:?}");
        }
    }

    #[test]
    fn a_cause_that_the_message_names_is_not_said_again() {
        let (address, source) = ("tls://nowhere:1".to_owned(), io::Error::other("nobody listens"));
        let error = CliError::from(CallError::from(LinkError::Unreachable { address, source }));
        assert_eq!(error.text().matches("nobody listens").count(), 1, "{}", error.text());
        assert_eq!(error.json()["error"]["why"], Value::Null);
    }

    #[test]
    fn a_socket_where_nobody_listens_is_said_once() {
        let error = CliError::from(CallError::from(LinkError::from(ConnectError::Absent("x.sock".into()))));
        let expected = "error: no executor listens on x.sock: start it, or name its socket with --executor";
        assert_eq!((error.text().as_str(), error.exit()), (expected, Exit::Unavailable));
    }

    #[test]
    fn a_lost_executor_is_unavailable_and_says_why() {
        let source = LinkError::Lost("reset".to_owned());
        let error = CliError::from(CallError::PeerGone { instance: 7, waited_ms: 30_000, source });
        assert_eq!(error.exit(), Exit::Unavailable);
        assert!(
            error.text().contains("why: the connection to the executor was lost (reset)"),
            "{}",
            error.text()
        );
        assert_eq!(error.json()["error"]["code"], "unavailable");
    }
}

//! From arguments to a session with the client weights.

use std::path::{Path, PathBuf};

use model::client_weights::client_base::ClientBase;
use settings::ByteCount;

use super::{connect::ConnectArguments, exit::CliError, terminal::Terminal};
use crate::{
    base::{self, BaseError, Cache},
    masking::Masking,
    session::Session,
    text::Text,
};

/// Options of the connection and of the client weights.
#[derive(Debug, clap::Args)]
pub struct RemoteBaseArguments {
    #[command(flatten)]
    pub(super) connect: ConnectArguments,
    /// Your own copy of the executor's model; without it the client weights are fetched
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Maximum size of the fetched client weights
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    fetch_limit: ByteCount,
}

/// A session with an executor, and the client weights of its base.
#[derive(Debug)]
pub struct ConnectedBase {
    /// Session with the executor.
    pub session: Session,
    /// Client weights of the base.
    pub base: ClientBase,
    /// Tokenizer and chat template of the base.
    pub text: Text,
}

impl RemoteBaseArguments {
    /// Returns the path of the client's own copy of the model.
    pub(super) fn model(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    /// Connects, and fetches the client weights if they are missing.
    ///
    /// # Errors
    /// Fails if the executor is unreachable or refuses, or a client cannot use the base.
    pub fn rent(&self, masking: &Masking, terminal: Terminal) -> Result<ConnectedBase, CliError> {
        let mut session = self.connect.session(masking)?;
        let path = self.base(&mut session, terminal)?;
        let base = ClientBase::open(&path).map_err(BaseError::from)?;
        let text = Text::load(&base.files)?;
        Ok(ConnectedBase { session, base, text })
    }

    fn base(&self, session: &mut Session, terminal: Terminal) -> Result<PathBuf, CliError> {
        if let Some(path) = &self.model {
            base::compare(session.catalog(), path, cache_directory("identities").ok().as_deref())?;
            return Ok(path.clone());
        }
        let directory = cache_directory("skeletons")?.join(self.connect.address()?.cache_name());
        let cache = Cache { directory, limit_bytes: self.fetch_limit.0 };
        Ok(base::fetch(session, &cache, &mut terminal.progress("fetching the needed files of the base"))?)
    }
}

/// Returns `$XDG_CACHE_HOME/holobiont/<name>`, or the same in `~/.cache`.
fn cache_directory(name: &str) -> Result<PathBuf, CliError> {
    let set = |name| std::env::var_os(name).filter(|value| Path::new(value).is_absolute()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let missing =
        || CliError::Usage("neither XDG_CACHE_HOME nor HOME is set: set one, or use --model".to_owned());
    Ok(base.ok_or_else(missing)?.join("holobiont").join(name))
}

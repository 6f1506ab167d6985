//! From arguments to a rented base: a session, and what is needed of the model besides linear layers.

use std::path::{Path, PathBuf};

use model::client_weights::client_base::ClientBase;

use super::{connect::ConnectArguments, exit::CliError, size::ByteSize, terminal::Terminal};
use crate::{
    base::{self, BaseError, Cache},
    masking::Masking,
    session::Session,
    text::Text,
};

/// Whose base is rented.
#[derive(Debug, clap::Args)]
pub struct RemoteBaseArguments {
    #[command(flatten)]
    pub(super) connect: ConnectArguments,
    /// Your own copy of the executor's model; without it what is needed of it is fetched
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Most bytes that are fetched of the model
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    fetch_limit: ByteSize,
}

/// A rented base.
#[derive(Debug)]
pub struct ConnectedBase {
    /// With its executor.
    pub session: Session,
    /// All but its linear layers.
    pub base: ClientBase,
    /// Its tokenizer and chat template.
    pub text: Text,
}

impl RemoteBaseArguments {
    /// The copy of the model that is this client's own.
    pub(super) fn model(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    /// Connects, and fetches what is missing.
    ///
    /// # Errors
    /// Nobody answers or may be asked, or the base is none that a client can use.
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
        Ok(base::fetch(session, &cache, &mut terminal.progress("fetching what is needed of the base"))?)
    }
}

/// `$XDG_CACHE_HOME/holobiont/<name>`, or the same in `~/.cache`.
fn cache_directory(name: &str) -> Result<PathBuf, CliError> {
    let set = |name| std::env::var_os(name).filter(|value| Path::new(value).is_absolute()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let missing =
        || CliError::Usage("neither XDG_CACHE_HOME nor HOME is set: set one, or use --model".to_owned());
    Ok(base.ok_or_else(missing)?.join("holobiont").join(name))
}

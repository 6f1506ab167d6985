//! `holobiont key`: who may ask. The file holds hashes; a key itself is shown once, when it is made.

use std::{io, num::NonZeroU32, path::PathBuf, sync::Arc};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use keys::{Draft, Key, KeyFileError, KeyHash, Role, tenant_name};
use serde_json::json;

use crate::{
    deployment::config::{Config, ConfigError},
    exit::{Exit, Explain},
    home::Home,
    terminal::{Format, Terminal, table::table},
};

/// What every key begins with, so that a leaked one is recognised.
const PREFIX: &str = "hb-";

/// Random bytes of a key.
const KEY_BYTES: usize = 32;

/// What can be done to keys.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum KeyCommand {
    /// Makes a key and prints it, once
    Add(AddArguments),
    /// Lists keys by name, role and id
    Ls(FileArguments),
    /// Revokes the keys of a name, or one of them
    Rm(RmArguments),
}

/// Which key file.
#[derive(Debug, clap::Args)]
pub(crate) struct FileArguments {
    /// The key file [default: [gateway].api_key_file, else api-keys in the state directory]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Deployment file, for its key file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Arguments of `key add`.
#[derive(Debug, clap::Args)]
pub(crate) struct AddArguments {
    /// The tenant; several keys of one name are one tenant
    #[arg(value_parser = tenant_name)]
    name: Arc<str>,
    /// What the key may do
    #[arg(long, value_parser = role(), default_value = Role::User.name())]
    role: Role,
    /// Most requests a minute; 0 for any number [default: the gateway's]
    #[arg(long, value_name = "N")]
    requests_per_min: Option<u32>,
    #[command(flatten)]
    file: FileArguments,
}

/// Arguments of `key rm`.
#[derive(Debug, clap::Args)]
pub(crate) struct RmArguments {
    /// The tenant
    #[arg(value_parser = tenant_name)]
    name: Arc<str>,
    /// One of its keys, as `holobiont key ls` shows it
    id: Option<String>,
    #[command(flatten)]
    file: FileArguments,
}

/// Why keys were not changed or shown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The key file cannot be used.
    #[error(transparent)]
    File(#[from] KeyFileError),
    /// No such key.
    #[error("{file} holds no key of {name}{}", id.as_ref().map(|id| format!(" with the id {id}")).unwrap_or_default())]
    Unknown {
        /// The key file.
        file: PathBuf,
        /// The tenant.
        name: Arc<str>,
        /// The id, if one was named.
        id: Option<String>,
    },
    /// The system gives no random bytes.
    #[error("the system gives no random bytes")]
    Random(#[source] io::Error),
    /// The person said no.
    #[error("nothing was changed")]
    Declined,
}

impl Explain for KeyError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::File(error) => error.exit(),
            Self::Unknown { .. } => Exit::NotFound,
            Self::Random(_) | Self::Declined => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.next(),
            Self::Unknown { .. } => Some("holobiont key ls".into()),
            Self::File(_) | Self::Random(_) | Self::Declined => None,
        }
    }
}

/// The roles as the command line takes them.
fn role() -> impl TypedValueParser<Value = Role> {
    let values = Role::ALL.map(|role| PossibleValue::new(role.name()).help(what_it_may(role)));
    PossibleValuesParser::new(values).try_map(|name| Role::named(&name).ok_or("no role is called so"))
}

fn what_it_may(role: Role) -> &'static str {
    match role {
        Role::User => "Ask models",
        Role::Admin => "Everything",
        Role::Metrics => "Read metrics",
    }
}

/// Makes, lists or revokes keys.
pub(crate) fn run(command: &KeyCommand, terminal: Terminal) -> Result<(), KeyError> {
    match command {
        KeyCommand::Add(arguments) => add(arguments, terminal),
        KeyCommand::Ls(arguments) => list(arguments, terminal),
        KeyCommand::Rm(arguments) => remove(arguments, terminal),
    }
}

impl FileArguments {
    fn path(&self) -> Result<PathBuf, ConfigError> {
        if let Some(file) = &self.file {
            return Ok(file.clone());
        }
        let config = Config::layered(Config::default(), self.config.as_deref())?;
        let state = || config.deployment.state.unwrap_or_else(|| Home::from_environment().state());
        Ok(config.gateway.api_key_file.unwrap_or_else(|| state().join("api-keys")))
    }
}

fn add(arguments: &AddArguments, terminal: Terminal) -> Result<(), KeyError> {
    let path = arguments.file.path()?;
    let key = new_key().map_err(KeyError::Random)?;
    let hash = KeyHash::of(key.as_bytes());
    let entry = Key {
        role: arguments.role,
        tenant: Arc::clone(&arguments.name),
        hash,
        requests_per_min: arguments.requests_per_min.map(NonZeroU32::new),
    };
    Draft::edit(&path, |draft| draft.push(entry))?;
    match terminal.format {
        Format::Json => {
            let (name, role) = (&*arguments.name, arguments.role.name());
            terminal.print(json!({"key": key, "name": name, "role": role, "id": hash.id(), "file": path}));
        }
        Format::Human => terminal.print(key),
    }
    terminal.note(format_args!(
        "{} may ask as {} with it; it is not shown again. A gateway with --api-key-file {} knows it within a second.",
        arguments.name,
        arguments.role.name(),
        path.display()
    ));
    Ok(())
}

fn list(arguments: &FileArguments, terminal: Terminal) -> Result<(), KeyError> {
    let file = Draft::read(&arguments.path()?)?;
    let limit_of = |key: &Key| key.requests_per_min.map(|limit| limit.map_or(0, NonZeroU32::get));
    if terminal.format == Format::Json {
        let keys = file.keys().map(|key| {
            let (name, limit) = (&*key.tenant, limit_of(key));
            json!({"name": name, "role": key.role.name(), "id": key.hash.id(), "requests_per_min": limit})
        });
        terminal.print(json!(keys.collect::<Vec<_>>()));
        return Ok(());
    }
    let rows = file.keys().map(|key| {
        let limit = limit_of(key).map_or_else(|| "-".into(), |limit| limit.to_string());
        [key.tenant.to_string(), key.role.name().into(), key.hash.id(), limit]
    });
    terminal.print(table(terminal.ink(), ["NAME", "ROLE", "ID", "REQS/MIN"], &rows.collect::<Vec<_>>()));
    Ok(())
}

fn remove(arguments: &RmArguments, terminal: Terminal) -> Result<(), KeyError> {
    let path = arguments.file.path()?;
    let which = arguments.id.as_deref().map_or_else(String::new, |id| format!(" {id}"));
    if !terminal.confirm(&format!("revoke the keys of {}{which}?", arguments.name)) {
        return Err(KeyError::Declined);
    }
    let is_meant = |key: &Key| {
        key.tenant == arguments.name && arguments.id.as_ref().is_none_or(|id| key.hash.id() == *id)
    };
    // A file without such a key is not written again.
    let unknown =
        || KeyError::Unknown { file: path.clone(), name: arguments.name.clone(), id: arguments.id.clone() };
    if !Draft::read(&path)?.keys().any(is_meant) {
        return Err(unknown());
    }
    let revoked = Draft::edit(&path, |draft| draft.remove(is_meant))?;
    match terminal.format {
        Format::Json => terminal.print(json!({"revoked": revoked})),
        Format::Human => {
            terminal.print(format_args!("{revoked} revoked; a running gateway knows within a second"))
        }
    }
    Ok(())
}

/// 256 random bits, as text.
fn new_key() -> io::Result<String> {
    let mut bytes = [0; KEY_BYTES];
    let mut filled = 0;
    while filled < KEY_BYTES {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_form_that_the_gateway_expects_and_no_two_are_alike() {
        let key = new_key().unwrap();
        assert_eq!((key.len(), &key[..3]), (46, "hb-"));
        assert!(key[3..].chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_'), "{key}");
        assert_ne!(key, new_key().unwrap());
    }
}

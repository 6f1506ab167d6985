//! `holobiont key`: manages API keys. The key file, or the registry of many hosts, holds only hashes; a key
//! itself is shown once, when it is made.

mod key_store;

use std::{io, num::NonZeroU32, sync::Arc};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use security::keys::{Key, KeyHash, KeyRole, tenant_name};
use serde_json::json;

use self::key_store::{KeyStore, KeyStoreArguments, KeyStoreError};
use crate::{
    deployment::config::DeploymentConfigError,
    exit::{Exit, Explain},
    terminal::{PrintFormat, Terminal, table::table},
};

/// Prefix of every key, by which scanners recognise a leaked one.
const PREFIX: &str = "hb-";

const KEY_BYTES: usize = 32;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum KeyCommand {
    /// Makes an API key and prints it; the key cannot be shown again
    Add(AddArguments),
    /// Lists API keys: name, role, id and rate limit
    Ls(KeyStoreArguments),
    /// Revokes all API keys of a tenant, or one of them
    Rm(RmArguments),
}

/// Arguments of the subcommand `key add`.
#[derive(Debug, clap::Args)]
pub(crate) struct AddArguments {
    /// Name of the tenant; all keys with this name belong to it
    #[arg(value_parser = tenant_name)]
    name: Arc<str>,
    /// Permissions of the key
    #[arg(long, value_parser = role(), default_value = KeyRole::User.name())]
    role: KeyRole,
    /// Maximum number of requests per minute; 0 is no limit [default: the gateway's]
    #[arg(long, value_name = "N")]
    requests_per_min: Option<u32>,
    #[command(flatten)]
    place: KeyStoreArguments,
}

/// Arguments of the subcommand `key rm`.
#[derive(Debug, clap::Args)]
pub(crate) struct RmArguments {
    /// Name of the tenant
    #[arg(value_parser = tenant_name)]
    name: Arc<str>,
    /// Id of the one key to revoke, as `holobiont key ls` shows it
    id: Option<String>,
    #[command(flatten)]
    place: KeyStoreArguments,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyError {
    #[error(transparent)]
    Config(#[from] DeploymentConfigError),
    #[error(transparent)]
    Place(#[from] KeyStoreError),
    #[error("{place} holds no key of {name}{}", id.as_ref().map(|id| format!(" with the id {id}")).unwrap_or_default())]
    Unknown { place: KeyStore, name: Arc<str>, id: Option<String> },
    #[error("the system returned no random bytes")]
    Random(#[source] io::Error),
    #[error("nothing was changed")]
    Declined,
}

impl Explain for KeyError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Place(error) => error.exit(),
            Self::Unknown { .. } => Exit::NotFound,
            Self::Random(_) | Self::Declined => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.next(),
            Self::Place(error) => error.next(),
            Self::Unknown { .. } => Some("holobiont key ls".into()),
            Self::Random(_) | Self::Declined => None,
        }
    }
}

/// Returns a parser of role names that lists the roles in the help.
fn role() -> impl TypedValueParser<Value = KeyRole> {
    let values = KeyRole::ALL.map(|role| PossibleValue::new(role.name()).help(what_it_may(role)));
    PossibleValuesParser::new(values).try_map(|name| KeyRole::named(&name).ok_or("there is no such role"))
}

fn what_it_may(role: KeyRole) -> &'static str {
    match role {
        KeyRole::User => "Ask models",
        KeyRole::Admin => "Everything",
        KeyRole::Metrics => "Read metrics",
    }
}

pub(crate) fn run(command: &KeyCommand, terminal: Terminal) -> Result<(), KeyError> {
    match command {
        KeyCommand::Add(arguments) => add(arguments, terminal),
        KeyCommand::Ls(arguments) => list(arguments, terminal),
        KeyCommand::Rm(arguments) => remove(arguments, terminal),
    }
}

fn add(arguments: &AddArguments, terminal: Terminal) -> Result<(), KeyError> {
    let place = arguments.place.place()?;
    let key = new_key().map_err(KeyError::Random)?;
    let hash = KeyHash::of(key.as_bytes());
    let entry = Key {
        role: arguments.role,
        tenant: Arc::clone(&arguments.name),
        hash,
        requests_per_min: arguments.requests_per_min.map(NonZeroU32::new),
    };
    place.add(entry)?;
    match terminal.format {
        PrintFormat::Json => {
            let (name, role) = (&*arguments.name, arguments.role.name());
            terminal.print(
                json!({"key": key, "name": name, "role": role, "id": hash.id(), "file": place.to_string()}),
            );
        }
        PrintFormat::Human => terminal.print(key),
    }
    terminal.note(format_args!(
        "this key of {} has the role {} and is not shown again. {} it within a second.",
        arguments.name,
        arguments.role.name(),
        place.known_to()
    ));
    Ok(())
}

fn list(arguments: &KeyStoreArguments, terminal: Terminal) -> Result<(), KeyError> {
    let keys = arguments.place()?.keys()?;
    let limit_of = |key: &Key| key.requests_per_min.map(|limit| limit.map_or(0, NonZeroU32::get));
    if terminal.format == PrintFormat::Json {
        let keys = keys.iter().map(|key| {
            let (name, limit) = (&*key.tenant, limit_of(key));
            json!({"name": name, "role": key.role.name(), "id": key.hash.id(), "requests_per_min": limit})
        });
        terminal.print(json!(keys.collect::<Vec<_>>()));
        return Ok(());
    }
    let rows = keys.iter().map(|key| {
        let limit = limit_of(key).map_or_else(|| "-".into(), |limit| limit.to_string());
        [key.tenant.to_string(), key.role.name().into(), key.hash.id(), limit]
    });
    terminal.print(table(terminal.ink(), ["NAME", "ROLE", "ID", "REQS/MIN"], &rows.collect::<Vec<_>>()));
    Ok(())
}

fn remove(arguments: &RmArguments, terminal: Terminal) -> Result<(), KeyError> {
    let place = arguments.place.place()?;
    let which = arguments.id.as_deref().map_or_else(String::new, |id| format!(" {id}"));
    if !terminal.confirm(&format!("revoke the keys of {}{which}?", arguments.name)) {
        return Err(KeyError::Declined);
    }
    let is_meant = |key: &Key| {
        key.tenant == arguments.name && arguments.id.as_ref().is_none_or(|id| key.hash.id() == *id)
    };
    let meant: Vec<_> = place.keys()?.into_iter().filter(is_meant).collect();
    if meant.is_empty() {
        // A store without a matching key is not written.
        return Err(KeyError::Unknown { place, name: arguments.name.clone(), id: arguments.id.clone() });
    }
    let revoked = place.revoke(&meant)?;
    match terminal.format {
        PrintFormat::Json => terminal.print(json!({"revoked": revoked})),
        PrintFormat::Human => {
            terminal.print(format_args!("{revoked} revoked; running gateways refuse them within a second"))
        }
    }
    Ok(())
}

/// Returns a new key: `PREFIX` and 256 random bits in URL-safe base64.
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

//! Address of the PostgreSQL database that a fleet shares.

use std::{env, fmt, fs, path::Path, str::FromStr as _};

use sqlx::postgres::PgConnectOptions;

/// Name of the credential in which systemd passes the password (`LoadCredential=registry-password:...`).
const CREDENTIAL: &str = "registry-password";
/// PostgreSQL setting that limits how long a transaction may be idle.
const IDLE_LIMIT: &str = "idle_in_transaction_session_timeout";
pub(crate) const SCHEMES: [&str; 2] = ["postgres://", "postgresql://"];

/// Why an address is invalid. The error never repeats the address, which may contain a password.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error("it does not begin with {}; write postgres://USER@HOST/DATABASE", SCHEMES[0])]
    Scheme,
    /// The address contains a password, which users who list the processes would see.
    #[error(
        "it has a password, which other users could see in the process list; use PGPASSFILE, PGPASSWORD \
         or the credential '{CREDENTIAL}'"
    )]
    Password,
    #[error("it is not valid; write postgres://USER@HOST/DATABASE?sslmode=verify-full")]
    Unreadable,
    #[error("cannot read the credential '{CREDENTIAL}': {0}")]
    Credential(std::io::Error),
}

#[derive(Clone)]
pub struct PostgresAddress {
    options: Box<PgConnectOptions>,
    shown: String,
}

impl PostgresAddress {
    /// Parses an address. The password comes from PostgreSQL's usual sources, or from systemd.
    ///
    /// # Errors
    /// If the address is invalid or contains a password.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let rest = SCHEMES.iter().find_map(|scheme| text.strip_prefix(scheme)).ok_or(AddressError::Scheme)?;
        let (place, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let user = place.rsplit_once('@').map_or("", |(user, _)| user);
        if user.contains(':') || parameters.split('&').any(|one| one.starts_with("password=")) {
            return Err(AddressError::Password);
        }
        let options = PgConnectOptions::from_str(text).map_err(|_| AddressError::Unreadable)?;
        let options = match credential(env::var_os("CREDENTIALS_DIRECTORY").as_deref().map(Path::new))? {
            Some(password) => options.password(&password),
            None => options,
        };
        let shown = format!(
            "{}:{}/{}",
            options.get_host(),
            options.get_port(),
            options.get_database().unwrap_or(options.get_username())
        );
        // Changes wait for each other, so a gateway that stops within a transaction must not block the
        // others.
        let options = options.application_name("holobiont").options([(IDLE_LIMIT, "10s")]);
        Ok(Self { options: Box::new(options), shown })
    }

    pub(super) fn options(&self) -> &PgConnectOptions {
        &self.options
    }
}

/// Reads the password that systemd passed, if there is one.
fn credential(directory: Option<&Path>) -> Result<Option<String>, AddressError> {
    let Some(path) = directory.map(|directory| directory.join(CREDENTIAL)) else { return Ok(None) };
    match fs::read_to_string(path) {
        Ok(password) => Ok(Some(password.trim_end_matches(['\n', '\r']).to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(AddressError::Credential(error)),
    }
}

impl fmt::Display for PostgresAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for PostgresAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostgresAddress({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_a_password_is_refused_without_repeating_it() {
        for text in ["postgres://u:secret@db/h", "postgresql://db/h?sslmode=require&password=secret"] {
            let error = PostgresAddress::parse(text).unwrap_err();
            assert!(matches!(error, AddressError::Password) && !error.to_string().contains("secret"));
        }
        assert!(matches!(PostgresAddress::parse("mysql://db/h"), Err(AddressError::Scheme)));
    }

    #[test]
    fn an_address_is_shown_by_host_port_and_database() {
        let address = PostgresAddress::parse("postgres://u@db.example:6000/fleet?sslmode=require").unwrap();
        assert_eq!(
            format!("{address} {address:?}"),
            "db.example:6000/fleet PostgresAddress(db.example:6000/fleet)"
        );
    }

    #[test]
    fn a_password_that_the_service_manager_hands_over_is_taken_without_its_line_end() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(credential(Some(directory.path())).unwrap(), None);
        fs::write(directory.path().join(CREDENTIAL), "pass word\n").unwrap();
        assert_eq!(credential(Some(directory.path())).unwrap().as_deref(), Some("pass word"));
    }
}

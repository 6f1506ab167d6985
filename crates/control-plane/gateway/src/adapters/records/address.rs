//! Where the PostgreSQL is that many hosts share.

use std::{env, fmt, fs, path::Path, str::FromStr as _};

use sqlx::postgres::PgConnectOptions;

/// Under this name systemd hands over the password (`LoadCredential=registry-password:...`).
const CREDENTIAL: &str = "registry-password";
/// The server's limit to how long a transaction may do nothing.
const IDLE_LIMIT: &str = "idle_in_transaction_session_timeout";
/// What such an address begins with.
pub(crate) const SCHEMES: [&str; 2] = ["postgres://", "postgresql://"];

/// Why an address is none. It never repeats what was given: that may hold a password.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// Not one of PostgreSQL.
    #[error("it does not begin with {}; write postgres://USER@HOST/DATABASE", SCHEMES[0])]
    Scheme,
    /// Whoever lists the processes would read it.
    #[error(
        "it holds a password, which everybody would see who lists the processes of this machine; put it into the file that \
         PGPASSFILE names, into PGPASSWORD, or hand it over as the credential '{CREDENTIAL}'"
    )]
    Password,
    /// It cannot be read.
    #[error("it cannot be read; write postgres://USER@HOST/DATABASE?sslmode=verify-full")]
    Unreadable,
    /// The credential cannot be read.
    #[error("the credential '{CREDENTIAL}' cannot be read: {0}")]
    Credential(std::io::Error),
}

/// Address of a PostgreSQL, with what is needed to get in.
#[derive(Clone)]
pub struct PostgresAddress {
    options: Box<PgConnectOptions>,
    shown: String,
}

impl PostgresAddress {
    /// Reads an address; the password comes from where PostgreSQL's own programs take it, or from systemd.
    ///
    /// # Errors
    /// If it is none, or holds a password.
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
        // Changes take turns: one whose gateway has stopped in the middle of it must not hold up the others.
        let options = options.application_name("holobiont").options([(IDLE_LIMIT, "10s")]);
        Ok(Self { options: Box::new(options), shown })
    }

    /// How to get in.
    pub(super) fn options(&self) -> &PgConnectOptions {
        &self.options
    }
}

/// The password that systemd handed over, if it did.
fn credential(directory: Option<&Path>) -> Result<Option<String>, AddressError> {
    let Some(path) = directory.map(|directory| directory.join(CREDENTIAL)) else { return Ok(None) };
    match fs::read_to_string(path) {
        Ok(password) => Ok(Some(password.trim_end_matches(['\n', '\r']).to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(AddressError::Credential(error)),
    }
}

impl fmt::Display for PostgresAddress {
    /// Host, port and database.
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

//! `holobiont cert`: makes TLS certificates for layer services, signed by a private authority of the
//! deployment.
//!
//! The first call makes the authority in a directory of its own. The directory also holds the certificates
//! that the authority signed: one for the executor, and one for each client that authenticates by
//! certificate instead of key. Clients receive `ca.pem`.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use serde_json::json;

use crate::{
    deployment::config::{DeploymentConfig, DeploymentConfigError},
    exit::{Exit, Explain},
    home::HomeDirectory,
    terminal::{PrintFormat, Terminal},
};

/// Common name of the authority in certificates.
const AUTHORITY: &str = "Holobiont authority of one deployment";

/// Length of a mean Gregorian year in seconds.
const YEAR_S: u64 = 31_556_952;

#[derive(Debug, clap::Args)]
pub(crate) struct CertArguments {
    /// Host name or address at which clients reach the executor; may be repeated
    #[arg(long = "host", value_name = "HOST", required_unless_present = "clients")]
    hosts: Vec<String>,
    /// Tenant whose client gets a certificate; may be repeated
    #[arg(long = "client", value_name = "NAME", value_parser = security::keys::tenant_name)]
    clients: Vec<Arc<str>>,
    /// Directory of the certificates [default: tls in the state directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CertError {
    #[error(transparent)]
    Config(#[from] DeploymentConfigError),
    #[error("{0:?} is not valid as a name in a certificate")]
    Name(String),
    #[error("{} is not a private key", .0.display())]
    Authority(PathBuf),
    #[error("cannot make the certificate")]
    Make(#[from] rcgen::Error),
    #[error("{} exists", .0.display())]
    Exists(PathBuf),
    #[error("cannot read or write {}", path.display())]
    File { path: PathBuf, source: io::Error },
}

impl Explain for CertError {
    fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Name(_) => Exit::Usage,
            Self::Exists(_) => Exit::Conflict,
            Self::Authority(_) | Self::Make(_) | Self::File { .. } => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Config(error) => error.next(),
            Self::Name(_) => Some("holobiont cert --host layers.example.org --host 10.0.0.7".into()),
            Self::Authority(_) => {
                Some("move the directory away and make new certificates for all hosts and clients".into())
            }
            Self::Exists(path) => Some(format!("rm {} to replace it", path.display())),
            Self::Make(_) | Self::File { .. } => None,
        }
    }
}

/// Makes the requested certificates and prints their paths.
pub(crate) fn run(arguments: &CertArguments, terminal: Terminal) -> Result<(), CertError> {
    let directory = match &arguments.dir {
        Some(directory) => directory.clone(),
        None => {
            let config = DeploymentConfig::layered(DeploymentConfig::default(), None)?;
            config.deployment.state.unwrap_or_else(|| HomeDirectory::from_environment().state()).join("tls")
        }
    };
    let made = make(&directory, &arguments.hosts, &arguments.clients)?;
    terminal.print(match terminal.format {
        PrintFormat::Json => json!({ "ca": directory.join("ca.pem"), "made": made }).to_string(),
        PrintFormat::Human => text(&directory, &made, !arguments.hosts.is_empty()),
    });
    Ok(())
}

fn text(directory: &Path, made: &[PathBuf], has_server: bool) -> String {
    let mut lines: Vec<String> = made.iter().map(|path| path.display().to_string()).collect();
    if has_server {
        let [ca, cert, key] = ["ca.pem", "server.pem", "server-key.pem"].map(|name| directory.join(name));
        lines.push(format!(
            "\nFor the deployment file:\n\n[layers]\nlisten = \"0.0.0.0:7443\"\ncert = {cert:?}\ncert_key = {key:?}\n\
             client_ca = {ca:?}\n\nFor clients:\n\nholobiont-client generate --executor tls://HOST:7443 --ca {} \"...\"",
            ca.display()
        ));
    }
    lines.join("\n")
}

/// Makes the authority if it does not exist, then the certificates. Returns the paths of new files.
fn make(directory: &Path, hosts: &[String], clients: &[Arc<str>]) -> Result<Vec<PathBuf>, CertError> {
    let failed = |source| CertError::File { path: directory.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
    let mut made = Vec::new();
    let authority = authority(directory, &mut made)?;
    if !hosts.is_empty() {
        let params = params(hosts, &hosts[0], ExtendedKeyUsagePurpose::ServerAuth)?;
        sign(&authority, &params, directory, "server", &mut made)?;
    }
    for client in clients {
        let name = client.to_string();
        let params = params(std::slice::from_ref(&name), &name, ExtendedKeyUsagePurpose::ClientAuth)?;
        sign(&authority, &params, directory, &format!("client-{name}"), &mut made)?;
    }
    Ok(made)
}

fn authority(directory: &Path, made: &mut Vec<PathBuf>) -> Result<Issuer<'static, KeyPair>, CertError> {
    let (cert, key) = (directory.join("ca.pem"), directory.join("ca-key.pem"));
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, AUTHORITY);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_after = date_time_ymd(this_year() + 10, 1, 1);
    match fs::read_to_string(&key) {
        // Name and key define the authority, so an issuer rebuilt from them signs like the original one.
        Ok(pem) => {
            let pair = KeyPair::from_pem(&pem).map_err(|_| CertError::Authority(key))?;
            Ok(Issuer::new(params, pair))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let pair = KeyPair::generate()?;
            write(&cert, &params.self_signed(&pair)?.pem(), made)?;
            write(&key, &pair.serialize_pem(), made)?;
            Ok(Issuer::new(params, pair))
        }
        Err(source) => Err(CertError::File { path: key, source }),
    }
}

fn params(
    names: &[String],
    common: &str,
    purpose: ExtendedKeyUsagePurpose,
) -> Result<CertificateParams, CertError> {
    let mut params = CertificateParams::new(names).map_err(|_| CertError::Name(names.join(", ")))?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common);
    params.extended_key_usages = vec![purpose];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.use_authority_key_identifier_extension = true;
    params.not_after = date_time_ymd(this_year() + 2, 1, 1);
    Ok(params)
}

fn sign(
    authority: &Issuer<'_, KeyPair>,
    params: &CertificateParams,
    directory: &Path,
    stem: &str,
    made: &mut Vec<PathBuf>,
) -> Result<(), CertError> {
    let pair = KeyPair::generate()?;
    let cert = params.signed_by(&pair, authority)?;
    write(&directory.join(format!("{stem}.pem")), &cert.pem(), made)?;
    write(&directory.join(format!("{stem}-key.pem")), &pair.serialize_pem(), made)
}

/// Writes a new file with mode 0600; never overwrites an existing file.
fn write(path: &Path, pem: &str, made: &mut Vec<PathBuf>) -> Result<(), CertError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => CertError::Exists(path.to_owned()),
        _ => CertError::File { path: path.to_owned(), source },
    };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    file.write_all(pem.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
    made.push(path.to_owned());
    Ok(())
}

fn this_year() -> i32 {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    1970 + i32::try_from(seconds / YEAR_S).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn an_authority_is_made_once_and_signs_for_servers_and_clients() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("tls");
        let names = |made: Vec<PathBuf>| -> Vec<String> {
            made.iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
        };
        let made = make(&directory, &["localhost".into(), "127.0.0.1".into()], &[]).unwrap();
        assert_eq!(names(made), ["ca.pem", "ca-key.pem", "server.pem", "server-key.pem"]);
        let made = make(&directory, &[], &["acme".into()]).unwrap();
        assert_eq!(names(made), ["client-acme.pem", "client-acme-key.pem"]);
        let mode = fs::metadata(directory.join("client-acme-key.pem")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn nothing_is_overwritten_and_no_odd_name_is_signed() {
        let home = tempfile::tempdir().unwrap();
        let host = ["localhost".to_owned()];
        make(home.path(), &host, &[]).unwrap();
        assert_eq!(make(home.path(), &host, &[]).unwrap_err().exit(), Exit::Conflict);
        let odd = ["k\u{f6}ln".to_owned()];
        assert!(matches!(make(home.path(), &odd, &[]), Err(CertError::Name(_))));
        fs::write(home.path().join("ca-key.pem"), "no key").unwrap();
        assert!(matches!(make(home.path(), &host, &[]), Err(CertError::Authority(_))));
    }
}

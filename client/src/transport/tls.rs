//! TLS 1.3 towards an executor on another host.

use std::{
    io,
    net::{TcpStream, ToSocketAddrs as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};

use crate::error::LinkError;

/// How long TCP and TLS may take to agree.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// Where systems keep the authorities they trust.
const SYSTEM_BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// A stream inside TLS.
pub(super) type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// Whom a client trusts, and how it proves who it is.
#[derive(Debug, Clone, Default)]
pub struct TlsFiles {
    /// PEM file of authorities; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// PEM files of the client's own certificate, with the chain to its authority, and of its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Reads the files.
///
/// # Errors
/// One is missing or holds something else.
pub fn config(files: &TlsFiles) -> Result<Arc<ClientConfig>, LinkError> {
    let ca = match &files.ca {
        Some(path) => path.clone(),
        None => system_bundle()?,
    };
    let mut roots = RootCertStore::empty();
    // A system's bundle may hold some that are too old to be used; the others count.
    let (added, _) = roots.add_parsable_certificates(certificates(&ca)?);
    if added == 0 {
        return Err(unusable(&ca, "certificates of authorities", &"none of them can be used"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| LinkError::Protocol(error.to_string()))?
        .with_root_certificates(roots);
    let Some((certificate, key)) = &files.identity else {
        return Ok(Arc::new(builder.with_no_client_auth()));
    };
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, "a private key", &error))?;
    let config = builder
        .with_client_auth_cert(certificates(certificate)?, private)
        .map_err(|error| unusable(certificate, "the certificate of the key", &error))?;
    Ok(Arc::new(config))
}

fn system_bundle() -> Result<PathBuf, LinkError> {
    let bundle = SYSTEM_BUNDLES.iter().map(Path::new).find(|path| path.exists());
    let missing =
        || unusable(Path::new(SYSTEM_BUNDLES[0]), "authorities to trust", &"this system has none: use --ca");
    bundle.map(Path::to_owned).ok_or_else(missing)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, LinkError> {
    let wanted = "certificates";
    let found = CertificateDer::pem_file_iter(path).map_err(|error| unusable(path, wanted, &error))?;
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(|error| unusable(path, wanted, &error))?;
    if found.is_empty() { Err(unusable(path, wanted, &"it holds none")) } else { Ok(found) }
}

fn unusable(path: &Path, wanted: &'static str, reason: &dyn std::fmt::Display) -> LinkError {
    LinkError::Credentials { path: path.to_owned(), wanted, reason: reason.to_string() }
}

/// Connects to `host`, which must show a certificate for that name.
pub(super) fn connect(config: &Arc<ClientConfig>, host: &str, port: u16) -> Result<TlsStream, LinkError> {
    let address = format!("{host}:{port}");
    let failed = |reason: &dyn std::fmt::Display| LinkError::Tls {
        address: address.clone(),
        reason: reason.to_string(),
    };
    let name = ServerName::try_from(host.to_owned()).map_err(|error| failed(&error))?;
    let mut tcp =
        tcp(host, port).map_err(|source| LinkError::Unreachable { address: address.clone(), source })?;
    let mut tls = ClientConnection::new(Arc::clone(config), name).map_err(|error| failed(&error))?;
    while tls.is_handshaking() {
        if let Err(error) = tls.complete_io(&mut tcp) {
            return Err(match tls_reason(&error) {
                Some(reason) => failed(&reason),
                None => LinkError::Unreachable { address, source: error },
            });
        }
    }
    Ok(StreamOwned::new(tls, tcp))
}

/// What TLS itself has against going on, if the error is of it.
pub(super) fn tls_reason(error: &io::Error) -> Option<String> {
    error.get_ref()?.downcast_ref::<rustls::Error>().map(ToString::to_string)
}

fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HANDSHAKE_LIMIT) {
            Ok(stream) => {
                // A call is one message, and its answer is waited for.
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(HANDSHAKE_LIMIT))?;
                stream.set_write_timeout(Some(HANDSHAKE_LIMIT))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_holds_no_certificates_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ca.pem");
        for content in ["", "no PEM at all", "-----BEGIN CERTIFICATE-----\n@\n-----END CERTIFICATE-----\n"] {
            std::fs::write(&path, content).expect("a file");
            let error =
                config(&TlsFiles { ca: Some(path.clone()), identity: None }).expect_err("it is unusable");
            assert!(error.to_string().contains("ca.pem") && !error.may_pass(), "{error}");
        }
        let missing = TlsFiles { ca: Some(directory.path().join("missing")), identity: None };
        assert!(matches!(config(&missing), Err(LinkError::Credentials { .. })));
    }

    #[test]
    fn a_key_that_does_not_belong_to_its_certificate_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: String| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).expect("a file");
            path
        };
        let one = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let ca = write("one.pem", one.cert.pem());
        let right = write("one.key", one.signing_key.serialize_pem());
        let wrong = write("other.key", other.signing_key.serialize_pem());
        let files = |key| TlsFiles { ca: Some(ca.clone()), identity: Some((ca.clone(), key)) };
        assert!(config(&files(right)).is_ok());
        assert!(matches!(config(&files(wrong)), Err(LinkError::Credentials { .. })));
    }
}

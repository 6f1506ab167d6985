//! TLS of the remote server: version 1.3 only, one provider, and the tenant that a client certificate names.
//!
//! The tenant is the common name of the certificate's subject. There must be exactly one, valid as a name in
//! a key file; alternative names are ignored.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    RootCertStore, ServerConfig,
    server::{NoServerSessionStorage, WebPkiClientVerifier, danger::ClientCertVerifier},
    version::TLS13,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject as _};

mod subject;

pub use self::subject::common_name;

/// Certificates of the server, all in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain of the server.
    pub certificate: PathBuf,
    /// Private key of the server.
    pub key: PathBuf,
    /// CA of clients' certificates; without it none are requested.
    pub client_ca: Option<PathBuf>,
}

/// Whether clients must have a certificate, if there is a client CA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientCertificates {
    /// No other credential is accepted.
    Required,
    /// A key is accepted as well.
    Optional,
}

/// Reason why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing or not PEM.
    #[error("cannot read {flag} {path}: {cause}; use a PEM file that this user may read")]
    Read {
        /// Name of the setting.
        flag: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Defect of the file.
        cause: pem::Error,
    },
    /// A PEM file contains no certificate.
    #[error("{flag} {path} contains no certificate; use a PEM file with at least one")]
    Empty {
        /// Name of the setting.
        flag: &'static str,
        /// Path of the file.
        path: PathBuf,
    },
    /// A certificate of the client CA cannot be used.
    #[error(
        "--layer-client-ca contains a certificate that cannot sign others: {0}; use the CA's own certificate"
    )]
    ClientCa(String),
    /// Certificate and key do not belong together, or cannot be used.
    #[error("cannot use --layer-cert with --layer-cert-key: {0}; they must belong together")]
    Own(rustls::Error),
}

const CERTIFICATE: &str = "--layer-cert";
const KEY: &str = "--layer-cert-key";
const CLIENT_CA: &str = "--layer-client-ca";

/// Reads the files into a configuration for all handshakes. `protocols` are the ALPN protocols that a client
/// may select; a client without one is a split client.
///
/// # Errors
/// Fails if a file cannot be used; the error names the setting.
pub fn server_config(
    files: &TlsFiles,
    asked: ClientCertificates,
    protocols: Vec<Vec<u8>>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = certificates(CERTIFICATE, &files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(failed(KEY, &files.key))?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Own)?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(ca) => builder.with_client_cert_verifier(client_verifier(ca, asked, provider)?),
    };
    let mut config = builder.with_single_cert(chain, key).map_err(TlsError::Own)?;
    // Resumption is off, so that a certificate which has expired since is not accepted.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = protocols;
    Ok(Arc::new(config))
}

fn client_verifier(
    ca: &Path,
    asked: ClientCertificates,
    provider: Arc<rustls::crypto::CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(CLIENT_CA, ca)? {
        roots.add(certificate).map_err(|error| TlsError::ClientCa(error.to_string()))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let builder = match asked {
        ClientCertificates::Required => builder,
        ClientCertificates::Optional => builder.allow_unauthenticated(),
    };
    builder.build().map_err(|error| TlsError::ClientCa(error.to_string()))
}

fn certificates(flag: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_file_iter(path).map_err(failed(flag, path))?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(failed(flag, path))?;
    if all.is_empty() { Err(TlsError::Empty { flag, path: path.to_owned() }) } else { Ok(all) }
}

fn failed(flag: &'static str, path: &Path) -> impl FnOnce(pem::Error) -> TlsError {
    move |cause| TlsError::Read { flag, path: path.to_owned(), cause }
}

//! TLS of the port, with a certificate that may be replaced while the picker runs.
//!
//! Clients need no certificate: every client that reaches the port may use the picker.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use rustls::ServerConfig;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject as _};

/// Protocols offered by ALPN.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// PEM files of the port's certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The certificate and its chain.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {}: {reason}; use a PEM file that this user may read", path.display())]
    File { path: PathBuf, reason: io::Error },
    /// The file lacks the wanted PEM items.
    #[error("{} is not a PEM file with {wanted}: {reason}", path.display())]
    Pem {
        path: PathBuf,
        /// Kind of the missing items.
        wanted: &'static str,
        reason: pem::Error,
    },
    /// The certificate and the key do not fit together.
    #[error("cannot use --picker-cert with --picker-cert-key: {0}; they must belong together")]
    Pair(#[from] rustls::Error),
}

/// The certificate, reread when its files change.
#[derive(Debug)]
pub(crate) struct Certificate {
    files: CertificateFiles,
    current: Mutex<CurrentCertificate>,
}

#[derive(Debug)]
struct CurrentCertificate {
    changed: [SystemTime; 2],
    config: Arc<ServerConfig>,
}

impl Certificate {
    /// Reads the certificate files.
    ///
    /// # Errors
    /// If a file is unreadable, or the certificate does not fit the key.
    pub(crate) fn read(files: CertificateFiles) -> Result<Self, TlsError> {
        let current = Mutex::new(files.load()?);
        Ok(Self { files, current })
    }

    /// Returns the configuration for the next connection. Changed files are read again; if they are unusable,
    /// the former certificate stays in use.
    #[must_use]
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if self.files.changed().is_ok_and(|changed| changed != current.changed) {
            match self.files.load() {
                Ok(renewed) => {
                    tracing::info!(path = %self.files.certificate.display(), "certificate read again");
                    *current = renewed;
                }
                Err(error) => tracing::warn!(%error, "cannot use the renewed certificate yet"),
            }
        }
        Arc::clone(&current.config)
    }
}

impl CertificateFiles {
    fn load(&self) -> Result<CurrentCertificate, TlsError> {
        // The times are read first, so a file that changes during the read is read again.
        let changed = self.changed()?;
        let chain = CertificateDer::pem_file_iter(&self.certificate).and_then(Iterator::collect);
        let is_there =
            |chain: Vec<_>| if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) };
        let chain = chain.and_then(is_there).map_err(no_pem(&self.certificate, "certificates"))?;
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(no_pem(&self.key, "a private key"))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = builder.with_no_client_auth().with_single_cert(chain, key)?;
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        Ok(CurrentCertificate { changed, config: Arc::new(config) })
    }

    /// Returns the modification times of both files.
    fn changed(&self) -> Result<[SystemTime; 2], TlsError> {
        let written = |path: &Path| {
            let written = fs::metadata(path).and_then(|data| data.modified());
            written.map_err(|reason| TlsError::File { path: path.to_owned(), reason })
        };
        Ok([written(&self.certificate)?, written(&self.key)?])
    }
}

fn no_pem(path: &Path, wanted: &'static str) -> impl FnOnce(pem::Error) -> TlsError {
    move |reason| TlsError::Pem { path: path.to_owned(), wanted, reason }
}

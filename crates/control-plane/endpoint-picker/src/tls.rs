//! TLS of the port: a certificate that whoever issues it may replace while the picker runs.
//!
//! It says who the picker is and asks nobody who they are: whoever reaches the port may ask it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::SystemTime,
};

use rustls::ServerConfig;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject as _};

/// What clients may speak inside.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The picker's certificate, and the chain to its authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why they cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing.
    #[error("{} cannot be read: {reason}; name a PEM file that this user may read", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        reason: io::Error,
    },
    /// A file holds something else.
    #[error("{} is no PEM file with {wanted}: {reason}", path.display())]
    Pem {
        /// Its path.
        path: PathBuf,
        /// What should be in it.
        wanted: &'static str,
        /// What is wrong.
        reason: pem::Error,
    },
    /// They do not fit together.
    #[error("--picker-cert and --picker-cert-key cannot be used: {0}; they must belong together")]
    Pair(#[from] rustls::Error),
}

/// A certificate as it is now.
#[derive(Debug)]
pub struct Certificate {
    files: CertificateFiles,
    current: Mutex<CurrentCertificate>,
}

#[derive(Debug)]
struct CurrentCertificate {
    changed: [SystemTime; 2],
    config: Arc<ServerConfig>,
}

impl Certificate {
    /// Reads it.
    ///
    /// # Errors
    /// If it cannot be used.
    pub fn read(files: CertificateFiles) -> Result<Self, TlsError> {
        let current = Mutex::new(files.load()?);
        Ok(Self { files, current })
    }

    /// What the next connection is shown: files that were replaced are read again, and if they cannot be used, what there
    /// was goes on.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if self.files.changed().is_ok_and(|changed| changed != current.changed) {
            match self.files.load() {
                Ok(renewed) => {
                    tracing::info!(path = %self.files.certificate.display(), "certificate read again");
                    *current = renewed;
                }
                Err(error) => tracing::warn!(%error, "the renewed certificate cannot be used yet"),
            }
        }
        Arc::clone(&current.config)
    }
}

impl CertificateFiles {
    fn load(&self) -> Result<CurrentCertificate, TlsError> {
        // Asked first: what is replaced while it is read is read again.
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

    /// When each was written last.
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

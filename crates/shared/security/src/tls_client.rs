//! TLS 1.3 towards an executor on another host: trusted authorities and the client's certificate.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

/// Paths of the trusted authorities on common systems.
const SYSTEM_BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Files with the authorities that a client trusts, and with its own certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM file of authorities; `None` means the system's.
    pub ca: Option<PathBuf>,
    /// PEM files of the client's own certificate, with the chain to its authority, and of its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// A file with certificates or a key does not hold the expected content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot use {path} ({reason}); name a PEM file with {wanted}")]
pub struct CredentialsError {
    /// Path of the unusable file.
    pub path: PathBuf,
    /// Content that the file should have.
    pub wanted: &'static str,
    /// Cause, for the user.
    pub reason: String,
}

/// Builds a TLS configuration from the files.
///
/// # Errors
/// Fails if a file is missing or has unexpected content.
pub fn config(files: &TlsFiles) -> Result<ClientConfig, CredentialsError> {
    let ca = match &files.ca {
        Some(path) => path.clone(),
        None => system_bundle()?,
    };
    let mut roots = RootCertStore::empty();
    // A system's bundle may hold certificates that are too old to be used; the others suffice.
    let (added, _) = roots.add_parsable_certificates(certificates(&ca)?);
    if added == 0 {
        return Err(unusable(&ca, "certificates of authorities", &"none of them can be used"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unusable(&ca, "certificates of authorities", &error))?
        .with_root_certificates(roots);
    let Some((certificate, key)) = &files.identity else {
        return Ok(builder.with_no_client_auth());
    };
    let private =
        PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, "a private key", &error))?;
    builder
        .with_client_auth_cert(certificates(certificate)?, private)
        .map_err(|error| unusable(certificate, "the certificate of the key", &error))
}

fn system_bundle() -> Result<PathBuf, CredentialsError> {
    let bundle = SYSTEM_BUNDLES.iter().map(Path::new).find(|path| path.exists());
    let missing = || {
        unusable(
            Path::new(SYSTEM_BUNDLES[0]),
            "authorities to trust",
            &"this system has none; set one with --ca",
        )
    };
    bundle.map(Path::to_owned).ok_or_else(missing)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let wanted = "certificates";
    let found = CertificateDer::pem_file_iter(path).map_err(|error| unusable(path, wanted, &error))?;
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(|error| unusable(path, wanted, &error))?;
    if found.is_empty() { Err(unusable(path, wanted, &"it contains none")) } else { Ok(found) }
}

fn unusable(path: &Path, wanted: &'static str, reason: &dyn std::fmt::Display) -> CredentialsError {
    CredentialsError { path: path.to_owned(), wanted, reason: reason.to_string() }
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
            assert!(error.to_string().contains("ca.pem"), "{error}");
        }
        let missing = TlsFiles { ca: Some(directory.path().join("missing")), identity: None };
        assert!(matches!(config(&missing), Err(CredentialsError { .. })));
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
        assert!(matches!(config(&files(wrong)), Err(CredentialsError { .. })));
    }
}

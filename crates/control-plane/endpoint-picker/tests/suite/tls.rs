//! The program with a certificate: gRPC and HTTP inside TLS, and renewal of the certificate at run time.

use std::{
    fs,
    io::{self, BufRead as _, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, ServerName};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

const NAME: &str = "picker.example";

struct Program {
    child: Child,
    address: SocketAddr,
    directory: TempDir,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn files(directory: &Path) -> [PathBuf; 2] {
    ["cert.pem", "key.pem"].map(|name| directory.join(name))
}

/// Writes a new certificate and its key; returns the certificate that clients must trust.
fn issue(directory: &Path) -> CertificateDer<'static> {
    let issued = rcgen::generate_simple_self_signed([NAME.to_owned()]).unwrap();
    let [certificate, key] = files(directory);
    fs::write(key, issued.signing_key.serialize_pem()).unwrap();
    fs::write(certificate, issued.cert.pem()).unwrap();
    issued.cert.der().clone()
}

fn command(directory: &Path) -> Command {
    let [certificate, key] = files(directory);
    let mut command = Command::new(env!("CARGO_BIN_EXE_endpoint-picker"));
    command.env_clear().args(["--picker-listen", "127.0.0.1:0", "--picker-endpoints", "127.0.0.1:9"]);
    command.arg("--picker-cert").arg(certificate).arg("--picker-cert-key").arg(key);
    command
}

impl Program {
    fn start() -> (Self, CertificateDer<'static>) {
        let directory = tempfile::tempdir().unwrap();
        let trusted = issue(directory.path());
        let mut child = command(directory.path()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("ready https://").unwrap().parse().unwrap();
        (Self { child, address, directory }, trusted)
    }

    async fn connect(
        &self,
        trusted: &CertificateDer<'static>,
        protocol: &str,
    ) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        roots.add(trusted.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let mut config = config.unwrap().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let stream = TcpStream::connect(self.address).await?;
        TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(NAME).unwrap(), stream).await
    }
}

#[tokio::test]
async fn envoy_and_probes_are_answered_inside_tls_and_nobody_outside() {
    let (program, trusted) = Program::start();
    let stream = program.connect(&trusted, "h2").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    // An empty gRPC message asks for the health of the whole server.
    let uri = format!("https://{NAME}/grpc.health.v1.Health/Check");
    let request = Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
    let answer = sender.send_request(request.body(Full::new(Bytes::from_static(&[0; 5]))).unwrap()).await;
    let answer = answer.unwrap().into_body().collect().await.unwrap();
    assert_eq!(answer.trailers().unwrap()["grpc-status"], "0");

    let mut probe = program.connect(&trusted, "http/1.1").await.unwrap();
    probe.write_all(b"GET /health HTTP/1.1\r\nhost: picker\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    probe.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");

    let mut open = TcpStream::connect(program.address).await.unwrap();
    open.write_all(b"GET /health HTTP/1.1\r\nhost: picker\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(Duration::from_secs(5), open.read_to_end(&mut answer)).await.unwrap();
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn a_certificate_that_is_replaced_is_shown_and_one_that_cannot_be_used_is_not() {
    let (program, first) = Program::start();
    let path = program.directory.path();
    let held = program.connect(&first, "h2").await.unwrap();
    let second = issue(path);
    let is_shown = || async { program.connect(&second, "h2").await.is_ok() };
    assert!(is_shown().await, "the renewed certificate");
    assert!(program.connect(&first, "h2").await.is_err(), "the old one is gone");
    let [certificate, key] = files(path);
    fs::write(certificate, "no PEM").unwrap();
    assert!(is_shown().await, "what there was goes on");
    fs::remove_file(key).unwrap();
    assert!(is_shown().await, "also when files are gone");
    drop(held);
}

#[test]
fn what_is_no_certificate_is_named_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let run = || {
        let output = command(directory.path()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = run();
    assert!(said.contains("cannot read") && said.contains("cert.pem"), "{said}");
    issue(directory.path());
    let [certificate, key] = files(directory.path());
    let other = rcgen::generate_simple_self_signed([NAME.to_owned()]).unwrap();
    fs::write(key, other.signing_key.serialize_pem()).unwrap();
    assert!(run().contains("they must belong together"));
    fs::write(certificate, "nothing").unwrap();
    assert!(run().contains("cert.pem is not a PEM file with certificates"));
}

//! TLS 1.3 towards an executor on another host.

use std::{
    io,
    net::{TcpStream, ToSocketAddrs as _},
    sync::Arc,
    time::Duration,
};

use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use security::address::HostPort;
pub use security::tls_client::{TlsFiles, config};

use crate::error::LinkError;

/// Time limit of the TCP and TLS handshakes.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

pub(super) type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// Connects to the host `to`, which must present a certificate for that name.
pub(super) fn connect(config: &Arc<ClientConfig>, to: &HostPort) -> Result<TlsStream, LinkError> {
    let (address, HostPort { host, port }) = (to.to_string(), to);
    let failed = |reason: &dyn std::fmt::Display| LinkError::Tls {
        address: address.clone(),
        reason: reason.to_string(),
    };
    let name = ServerName::try_from(host.clone()).map_err(|error| failed(&error))?;
    let mut tcp =
        tcp(host, *port).map_err(|source| LinkError::Unreachable { address: address.clone(), source })?;
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

/// Returns the reason if the error comes from TLS itself.
pub(super) fn tls_reason(error: &io::Error) -> Option<String> {
    error.get_ref()?.downcast_ref::<rustls::Error>().map(ToString::to_string)
}

fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HANDSHAKE_LIMIT) {
            Ok(stream) => {
                // A call is one message whose answer is awaited, so delaying small packets gains nothing.
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

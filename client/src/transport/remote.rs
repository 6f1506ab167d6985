//! ZeroMQ messages over a stream: TLS, or a private Unix socket.
//!
//! One thread writes a message and reads until the answer arrives. While it waits, it sends heartbeats (PING)
//! after silence, and fails if the peer stays silent for long.

use std::{
    fmt,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::Arc,
    time::{Duration, Instant},
};

use shmproto::{
    codec::Wire as _,
    layer::{
        CONTROL, CallHeader, CallStatus, HEADER_BYTES, ReplyHeader,
        control::{FromLayers, ToLayers},
    },
    zmtp::{self, ZmtpEvent},
};
use zeroize::Zeroize as _;

use super::{
    Connect, Transport, check_reply,
    tls::{self, TlsStream},
};
use crate::{address::Address, error::LinkError, rows};

/// Silence after which a heartbeat is sent.
const HEARTBEAT: Duration = Duration::from_secs(3);

/// Silence after which the connection fails.
const SILENCE_LIMIT: Duration = Duration::from_secs(12);

/// Maximum size of a received frame: the logits of a large chunk.
const MAX_FRAME_BYTES: usize = 256 << 20;

/// User name that is sent with an API key; the key is the password.
const KEY_USER: &str = "key";

/// Connector to the ZeroMQ socket of an executor.
#[derive(Clone)]
pub struct RemoteConnector {
    address: Address,
    key: Option<String>,
    tls: Option<Arc<rustls::ClientConfig>>,
    deadline: Duration,
}

impl fmt::Debug for RemoteConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteConnector").field("address", &self.address).finish_non_exhaustive()
    }
}

impl RemoteConnector {
    /// Connects over TLS or a Unix socket, and sends `key` if there is one. A call fails after `deadline`.
    ///
    /// # Errors
    /// Fails if the files for TLS are not valid.
    pub fn new(
        address: Address,
        key: Option<String>,
        files: &tls::TlsFiles,
        deadline: Duration,
    ) -> Result<Self, LinkError> {
        let tls = match address {
            Address::Tls(_) => Some(Arc::new(tls::config(files)?)),
            Address::Local(_) | Address::Ipc(_) => None,
        };
        Ok(Self { address, key, tls, deadline })
    }

    fn stream(&self) -> Result<RemoteStream, LinkError> {
        let unreachable = |source| LinkError::Unreachable { address: self.address.to_string(), source };
        match (&self.address, &self.tls) {
            (Address::Tls(address), Some(config)) => {
                let stream = tls::connect(config, address)?;
                stream.sock.set_read_timeout(Some(HEARTBEAT)).map_err(unreachable)?;
                Ok(RemoteStream::Tls(Box::new(stream)))
            }
            (address, _) => {
                let path = address.socket().unwrap_or_default();
                let stream = UnixStream::connect(path).map_err(unreachable)?;
                stream.set_read_timeout(Some(HEARTBEAT)).map_err(unreachable)?;
                stream.set_write_timeout(Some(SILENCE_LIMIT)).map_err(unreachable)?;
                Ok(RemoteStream::Unix(stream))
            }
        }
    }
}

impl Connect for RemoteConnector {
    fn connect(&self) -> Result<Box<dyn Transport>, LinkError> {
        let limits = zmtp::ZmtpLimits::new(MAX_FRAME_BYTES);
        let peer = match &self.key {
            Some(key) => zmtp::ZmtpClient::plain(limits, KEY_USER, key)
                .map_err(|error| LinkError::Unauthenticated(error.to_string()))?,
            None => zmtp::ZmtpClient::null(limits),
        };
        let stream = self.stream()?;
        let mut transport = RemoteTransport { stream, peer, message: Vec::new(), deadline: self.deadline };
        let until = Instant::now() + SILENCE_LIMIT;
        match transport.event(until)? {
            ZmtpEvent::Ready(_) => Ok(Box::new(transport)),
            _ => Err(LinkError::Protocol("a message arrived before the end of the handshake".to_owned())),
        }
    }

    fn is_far(&self) -> bool {
        matches!(self.address, Address::Tls(_))
    }
}

enum RemoteStream {
    Tls(Box<TlsStream>),
    Unix(UnixStream),
}

impl RemoteStream {
    fn reader(&mut self) -> &mut dyn Read {
        match self {
            Self::Tls(stream) => stream,
            Self::Unix(stream) => stream,
        }
    }

    fn writer(&mut self) -> &mut dyn Write {
        match self {
            Self::Tls(stream) => stream,
            Self::Unix(stream) => stream,
        }
    }

    /// Writes all of `bytes`, and flushes what TLS buffers.
    fn send(&mut self, bytes: &[u8]) -> Result<(), LinkError> {
        let writer = self.writer();
        writer.write_all(bytes).and_then(|()| writer.flush()).map_err(|error| broken(&error))
    }
}

/// Converts an error of a stream that was open.
fn broken(error: &io::Error) -> LinkError {
    match tls::tls_reason(error) {
        Some(reason) => LinkError::Tls { address: "the executor".to_owned(), reason },
        None => LinkError::lost(error),
    }
}

struct RemoteTransport {
    stream: RemoteStream,
    peer: zmtp::ZmtpClient,
    /// Buffer of the last sent message, reused for the next.
    message: Vec<u8>,
    deadline: Duration,
}

impl fmt::Debug for RemoteTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteTransport").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl Drop for RemoteTransport {
    fn drop(&mut self) {
        // The buffer may hold the key of the last seeded rows.
        self.message.zeroize();
    }
}

impl RemoteTransport {
    /// Sends pending bytes of the ZMTP protocol itself.
    fn flush(&mut self) -> Result<(), LinkError> {
        while !self.peer.outgoing().is_empty() {
            let bytes = self.peer.outgoing();
            let count = bytes.len();
            self.stream.send(bytes)?;
            self.peer.sent(count);
        }
        Ok(())
    }

    /// Returns the next event that is not a heartbeat.
    fn event(&mut self, until: Instant) -> Result<ZmtpEvent, LinkError> {
        let begun = Instant::now();
        let mut heard = begun;
        loop {
            let event = self.peer.next_event().map_err(|error| LinkError::Protocol(error.to_string()))?;
            self.flush()?;
            match event {
                Some(ZmtpEvent::Pong) => {}
                Some(ZmtpEvent::Refused(reason)) => return Err(LinkError::Unauthenticated(reason)),
                Some(event) => return Ok(event),
                None if self.read()? => heard = Instant::now(),
                None => {
                    let now = Instant::now();
                    if now >= until || now.duration_since(heard) >= SILENCE_LIMIT {
                        let waited_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                        return Err(LinkError::Silent { waited_ms });
                    }
                    self.peer.ping(SILENCE_LIMIT);
                }
            }
        }
    }

    /// Reads available bytes; false if none arrived before the read timeout.
    fn read(&mut self) -> Result<bool, LinkError> {
        match self.stream.reader().read(self.peer.space()) {
            Ok(0) => Err(LinkError::Lost("the executor closed it".to_owned())),
            Ok(count) => {
                self.peer.advance(count);
                Ok(true)
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(false),
                io::ErrorKind::Interrupted => Ok(true),
                _ => Err(broken(&error)),
            },
        }
    }

    fn receive(&mut self) -> Result<(Vec<u8>, Vec<u8>), LinkError> {
        match self.event(Instant::now() + self.deadline)? {
            ZmtpEvent::Message(frames) => match <[Vec<u8>; 2]>::try_from(frames) {
                Ok([first, second]) => Ok((first, second)),
                Err(frames) => Err(LinkError::Protocol(format!("a message of {} frames", frames.len()))),
            },
            _ => Err(LinkError::Protocol("a second handshake".to_owned())),
        }
    }

    fn send_control(&mut self, message: &ToLayers) -> Result<(), LinkError> {
        self.message.clear();
        zmtp::put_message(&mut self.message, &[&CONTROL, &message.to_bytes()]);
        self.stream.send(&self.message)
    }
}

fn control(bytes: &[u8]) -> Result<FromLayers, LinkError> {
    FromLayers::from_bytes(bytes).map_err(|error| LinkError::Protocol(error.to_string()))
}

impl Transport for RemoteTransport {
    fn ask(&mut self, message: &ToLayers) -> Result<FromLayers, LinkError> {
        self.send_control(message)?;
        match self.receive()? {
            (first, second) if first == CONTROL => control(&second),
            _ => Err(LinkError::Protocol("a reply arrived without a call".to_owned())),
        }
    }

    fn send_oneway(&mut self, message: &ToLayers) {
        // The executor may be gone and then needs no message.
        let _ = self.send_control(message);
        if let RemoteStream::Tls(stream) = &mut self.stream {
            stream.conn.send_close_notify();
            let _ = stream.flush();
        }
    }

    fn call(&mut self, call: &CallHeader, x: &[f32], out: &mut [f32]) -> Result<ReplyHeader, LinkError> {
        self.call_beside(call, x, out, &mut || {})
    }

    fn call_beside(
        &mut self,
        call: &CallHeader,
        x: &[f32],
        out: &mut [f32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<ReplyHeader, LinkError> {
        self.message.clear();
        zmtp::put_two_frames_head(&mut self.message, &call.to_bytes(), x.len() * call.dtype.bytes());
        rows::encode(call.dtype, x, &mut self.message);
        self.stream.send(&self.message)?;
        failpoint::pass("client.call_waits");
        meanwhile();
        let (first, second) = loop {
            match self.receive()? {
                (first, second) if first == CONTROL => match control(&second)? {
                    // The current call is still answered; the next one will be refused.
                    FromLayers::Draining => {}
                    // The session ends, for instance because its key was revoked.
                    FromLayers::Refused(refused) => return Err(LinkError::Refused(refused)),
                    _ => return Err(LinkError::Protocol("an unexpected answer arrived".to_owned())),
                },
                message => break message,
            }
        };
        let header = <[u8; HEADER_BYTES]>::try_from(first)
            .map_err(|first| LinkError::Protocol(format!("a header of {} bytes", first.len())))?;
        let reply =
            ReplyHeader::from_bytes(&header).map_err(|error| LinkError::Protocol(error.to_string()))?;
        check_reply(call, &reply)?;
        if reply.status == CallStatus::Done && !rows::decode(call.dtype, &second, out) {
            let (came, wanted) = (second.len(), out.len() * call.dtype.bytes());
            return Err(LinkError::Protocol(format!("{came} bytes of rows arrived instead of {wanted}")));
        }
        Ok(reply)
    }
}

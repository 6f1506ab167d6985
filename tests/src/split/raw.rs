//! Clients that send arbitrary bytes and need not read replies.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::{ClientConnection, StreamOwned, pki_types::ServerName};
use shmproto::{
    channel::{ClientChannel, Geometry, LAYOUT_HASH},
    codec::Wire as _,
    layer::{
        CONTROL, CallClass, CallHeader, Dtype, HEADER_BYTES, LAYER_VERSION, ReplyHeader, RowSource, SiteOp,
        SitePath,
        control::{ClientEnd, FromLayers, SessionOpen, ToLayers},
    },
    zmtp::{self, ZmtpEvent},
};

use super::{SplitEndpoints, SplitRoute};
use crate::{Deployment, watchdog::WATCHDOG};

const LOOK: Duration = Duration::from_millis(200);
const MAX_FRAME_BYTES: usize = 256 << 20;

/// Returns the first message of a session without masking.
#[must_use]
pub fn open(route: SplitRoute, key: &str) -> ToLayers {
    ToLayers::Open(SessionOpen {
        version: LAYER_VERSION,
        layout_hash: if route == SplitRoute::SharedMemory { LAYOUT_HASH } else { 0 },
        key: key.to_owned(),
        name: "hostile".to_owned(),
        masking: "off".to_owned(),
        session: 0,
    })
}

/// Returns a decode call of `rows` unmasked rows of site 0.
#[must_use]
pub fn call(sequence: u64, rows: u32) -> CallHeader {
    CallHeader {
        op: SiteOp::Forward,
        path: SitePath::Fast,
        class: CallClass::Decode,
        dtype: Dtype::F32,
        site: 0,
        part: None,
        source: RowSource::Rows,
        sequence,
        rows,
        input: 0,
        output: 0,
    }
}

/// A byte stream to an executor.
pub trait ByteStream: Read + Write + Send {}
impl<T: Read + Write + Send> ByteStream for T {}

/// Connects to the endpoint of `route` by TCP or Unix socket, without any protocol.
#[must_use]
pub fn bare(endpoints: &SplitEndpoints, deployment: &Deployment, route: SplitRoute) -> Box<dyn ByteStream> {
    if route == SplitRoute::Tls {
        let tcp = tcp(endpoints);
        limit(tcp.set_read_timeout(Some(LOOK)), Ok(()));
        return Box::new(tcp);
    }
    let path = deployment.place().state().join("layers.zmq");
    let stream = UnixStream::connect(path).expect("the private socket");
    limit(stream.set_read_timeout(Some(LOOK)), stream.set_write_timeout(Some(LOOK)));
    Box::new(stream)
}

/// Connects, with a TLS handshake if the route has one.
#[must_use]
pub fn stream(
    endpoints: &SplitEndpoints,
    deployment: &Deployment,
    route: SplitRoute,
    key: Option<&str>,
) -> Box<dyn ByteStream> {
    if route != SplitRoute::Tls {
        return bare(endpoints, deployment, route);
    }
    let config = client::transport::tls::config(&endpoints.tls_files(key)).expect("the certificates");
    let name = ServerName::from(endpoints.address().ip());
    let mut tls = ClientConnection::new(Arc::new(config), name).expect("a TLS client");
    let mut tcp = tcp(endpoints);
    while tls.is_handshaking() {
        tls.complete_io(&mut tcp).expect("TLS is agreed upon");
    }
    limit(tcp.set_read_timeout(Some(LOOK)), Ok(()));
    Box::new(StreamOwned::new(tls, tcp))
}

fn tcp(endpoints: &SplitEndpoints) -> TcpStream {
    let stream = TcpStream::connect(endpoints.address()).expect("the endpoint is open");
    limit(stream.set_read_timeout(Some(WATCHDOG)), stream.set_write_timeout(Some(LOOK)));
    stream
}

fn limit(read: io::Result<()>, write: io::Result<()>) {
    read.and(write).expect("a socket takes time limits");
}

/// Reads until the peer closes the connection; fails if it does not.
pub fn is_hung_up_on(stream: &mut dyn ByteStream) {
    let (mut buffer, begun) = ([0; 4096], Instant::now());
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
        assert!(begun.elapsed() < WATCHDOG, "the executor does not hang up");
    }
}

/// Raw ZeroMQ client of an executor.
pub struct Zmtp {
    /// Transport of the ZeroMQ bytes.
    pub stream: Box<dyn ByteStream>,
    peer: zmtp::ZmtpClient,
}

impl std::fmt::Debug for Zmtp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Zmtp").finish_non_exhaustive()
    }
}

impl Zmtp {
    /// Performs the handshake over `stream`, with a key if there is one.
    ///
    /// # Errors
    /// If the peer closes the connection.
    pub fn greet(stream: Box<dyn ByteStream>, key: Option<&str>) -> io::Result<Self> {
        let limits = zmtp::ZmtpLimits::new(MAX_FRAME_BYTES);
        let peer = match key {
            Some(key) => zmtp::ZmtpClient::plain(limits, "key", key).expect("a short key"),
            None => zmtp::ZmtpClient::null(limits),
        };
        let mut zmtp = Self { stream, peer };
        match zmtp.event()? {
            ZmtpEvent::Ready(_) => Ok(zmtp),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }

    /// Opens a session over `route`.
    ///
    /// # Errors
    /// If the peer closes the connection or refuses.
    pub fn session(
        endpoints: &SplitEndpoints,
        deployment: &Deployment,
        route: SplitRoute,
        key: Option<&str>,
    ) -> io::Result<Self> {
        let mut zmtp = Self::greet(stream(endpoints, deployment, route, key), key)?;
        zmtp.send_control(&open(route, ""))?;
        match zmtp.hear()? {
            FromLayers::Opened(_) => Ok(zmtp),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }

    /// Sends bytes unchanged.
    ///
    /// # Errors
    /// If the peer has closed the connection or does not read.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Sends a control message.
    ///
    /// # Errors
    /// Like [`send`](Self::send).
    pub fn send_control(&mut self, message: &ToLayers) -> io::Result<()> {
        let mut bytes = Vec::new();
        zmtp::put_message(&mut bytes, &[&CONTROL, &message.to_bytes()]);
        self.send(&bytes)
    }

    /// Returns the bytes of a call with rows.
    #[must_use]
    pub fn call_bytes(header: &CallHeader, rows: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        zmtp::put_message(&mut bytes, &[&header.to_bytes(), rows]);
        bytes
    }

    /// Sends a call with the given bytes as rows.
    ///
    /// # Errors
    /// Like [`send`](Self::send).
    pub fn call(&mut self, header: &CallHeader, rows: &[u8]) -> io::Result<()> {
        self.send(&Self::call_bytes(header, rows))
    }

    /// Receives the next control message.
    ///
    /// # Errors
    /// If the peer closes the connection.
    pub fn hear(&mut self) -> io::Result<FromLayers> {
        let frames = self.message()?;
        FromLayers::from_bytes(&frames[1]).map_err(io::Error::other)
    }

    /// Receives the next reply with its rows.
    ///
    /// # Errors
    /// If the peer closes the connection.
    pub fn reply(&mut self) -> io::Result<(ReplyHeader, Vec<u8>)> {
        let mut frames = self.message()?;
        let header = <&[u8; HEADER_BYTES]>::try_from(&frames[0][..]).map_err(io::Error::other)?;
        let header = ReplyHeader::from_bytes(header).map_err(io::Error::other)?;
        Ok((header, frames.remove(1)))
    }

    fn message(&mut self) -> io::Result<Vec<Vec<u8>>> {
        loop {
            if let ZmtpEvent::Message(frames) = self.event()? {
                return Ok(frames);
            }
        }
    }

    fn event(&mut self) -> io::Result<ZmtpEvent> {
        let begun = Instant::now();
        loop {
            let event = self.peer.next_event().map_err(io::Error::other)?;
            while !self.peer.outgoing().is_empty() {
                let sent = self.stream.write(self.peer.outgoing())?;
                self.peer.sent(sent);
            }
            self.stream.flush()?;
            if let Some(event) = event {
                return Ok(event);
            }
            match self.stream.read(self.peer.space()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.peer.advance(count),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                }
                Err(error) => return Err(error),
            }
            if begun.elapsed() > WATCHDOG {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

/// Raw client of the shared memory transport.
#[derive(Debug)]
pub struct SharedMemoryClient {
    /// Socket of the control messages.
    pub control: ClientEnd,
    /// Rings and slab, once they exist.
    pub channel: Option<ClientChannel>,
}

impl SharedMemoryClient {
    /// Connects without sending a message.
    ///
    /// # Errors
    /// If no executor listens.
    pub fn connect(deployment: &Deployment) -> io::Result<Self> {
        let control = ClientEnd::to(&deployment.place().state().join("layers.sock"));
        Ok(Self { control: control.map_err(io::Error::other)?, channel: None })
    }

    /// Opens a session with a slab of `slab_bytes`.
    ///
    /// # Errors
    /// If the executor refuses.
    pub fn session(deployment: &Deployment, key: &str, slab_bytes: u64) -> io::Result<Self> {
        let mut local = Self::connect(deployment)?;
        match local.ask(&open(SplitRoute::SharedMemory, key))? {
            FromLayers::Opened(_) => {}
            other => return Err(io::Error::other(format!("{other:?}"))),
        }
        local.demand_channel(slab_bytes)?;
        Ok(local)
    }

    /// Requests a slab that replaces the current one.
    ///
    /// # Errors
    /// If the executor refuses.
    pub fn demand_channel(&mut self, slab_bytes: u64) -> io::Result<()> {
        self.send_control(&ToLayers::Channel(slab_bytes))?;
        let (answer, mut descriptors) = self.receive()?;
        let FromLayers::ChannelReady(ready) = answer else {
            return Err(io::Error::other(format!("{answer:?}")));
        };
        let geometry = Geometry { slab_bytes: ready.slab_bytes, depth: ready.depth };
        let region = descriptors.pop().ok_or_else(|| io::Error::other("no descriptor"))?;
        let joined = ClientChannel::join(region, ready.region_bytes, geometry).map_err(io::Error::other)?;
        self.channel = Some(joined);
        Ok(())
    }

    /// Sends a control message.
    ///
    /// # Errors
    /// If the peer has closed the connection.
    pub fn send_control(&self, message: &ToLayers) -> io::Result<()> {
        self.control.send(message, &[]).map_err(io::Error::other)
    }

    /// Sends a control message and waits for the reply.
    ///
    /// # Errors
    /// If the peer closes the connection.
    pub fn ask(&self, message: &ToLayers) -> io::Result<FromLayers> {
        self.send_control(message)?;
        Ok(self.receive()?.0)
    }

    /// Receives the next message with its file descriptors.
    ///
    /// # Errors
    /// If the peer closes the connection.
    pub fn receive(&self) -> io::Result<(FromLayers, Vec<std::os::fd::OwnedFd>)> {
        use std::os::fd::AsFd as _;
        let limit = Timespec::try_from(WATCHDOG).expect("a short time");
        let mut fds = [PollFd::from_borrowed_fd(self.control.as_fd(), PollFlags::IN)];
        if poll(&mut fds, Some(&limit))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let received = self.control.receive().map_err(io::Error::other)?;
        received.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Submits a call unchanged and waits for the reply; `None` once the executor has closed the connection.
    pub fn call(&mut self, header: &CallHeader) -> Option<ReplyHeader> {
        let begun = Instant::now();
        let channel = self.channel.as_mut().expect("a channel");
        channel.submit(header).expect("the ring has room");
        while begun.elapsed() < WATCHDOG {
            let channel = self.channel.as_mut().expect("a channel");
            if let Some(reply) = channel.wait(Duration::ZERO, LOOK).expect("the executor keeps to the rules")
            {
                return Some(reply);
            }
            if self.is_hung_up_on() {
                return None;
            }
        }
        panic!("neither a reply nor an end came to {header:?}");
    }

    /// True if the executor has closed the connection.
    #[must_use]
    pub fn is_hung_up_on(&self) -> bool {
        use std::os::fd::AsFd as _;
        let mut fds = [PollFd::from_borrowed_fd(self.control.as_fd(), PollFlags::IN)];
        let _ = poll(&mut fds, Some(&Timespec::default()));
        fds[0].revents().contains(PollFlags::HUP)
    }
}

//! Endpoints of an in-process executor: real sockets, TLS, shared memory; and malicious behaviour at any of
//! them.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{Read, Write},
    net::TcpListener,
    os::{fd::AsFd as _, unix::net::UnixListener},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use client::transport::{Connect as _, Transport, loopback::Loopback};
use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use shmproto::{
    channel::{ExecutorChannel, Geometry, LAYOUT_HASH},
    codec::Wire as _,
    fd_passing::{Connection, Listening},
    layer::{
        CONTROL, CallHeader, CallStatus, Dtype, HEADER_BYTES, ReplyHeader,
        control::{ChannelReady, FromLayers, ToLayers},
    },
    zmtp::{self, AcceptedMechanisms, ZmtpEvent, ZmtpLimits},
};

pub const KEY: &str = "hb-open-sesame";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaliciousBehavior {
    None,
    /// Each connection ends after this number of calls, before the next answer.
    DiesAfter(u32),
    OtherSequence,
    OtherRows,
    OtherDtype,
    ShortRows,
    GarbageHeader,
    OneFrame,
    EmptyHeader,
    GarbageControl,
}

/// Input and output elements of a row per site, as in the catalog.
pub type Widths = Vec<(usize, usize)>;

#[derive(Clone)]
pub struct TestEndpoint {
    pub executor: Loopback,
    pub widths: Arc<Widths>,
    pub mischief: MaliciousBehavior,
    pub connections: Arc<AtomicU32>,
}

impl TestEndpoint {
    pub fn new(executor: Loopback, widths: Widths, mischief: MaliciousBehavior) -> Self {
        Self { executor, widths: Arc::new(widths), mischief, connections: Arc::default() }
    }

    /// Listens at a private Unix socket in `directory`.
    pub fn ipc(self, directory: &Path) -> PathBuf {
        let path = directory.join("layers.zmq");
        let listener = UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let endpoint = self.clone();
                thread::spawn(move || endpoint.zmtp(stream, AcceptedMechanisms::Null));
            }
        });
        path
    }

    pub fn tls(self, config: Arc<ServerConfig>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (endpoint, config) = (self.clone(), Arc::clone(&config));
                stream.set_nodelay(true).unwrap();
                thread::spawn(move || {
                    let tls = ServerConnection::new(config).unwrap();
                    endpoint.zmtp(StreamOwned::new(tls, stream), AcceptedMechanisms::Plain);
                });
            }
        });
        port
    }

    fn zmtp(&self, mut stream: impl Read + Write, accepts: AcceptedMechanisms) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        let mut peer = zmtp::ZmtpServer::new(ZmtpLimits::new(64 << 20), accepts);
        let (mut executor, mut calls) = (self.executor.connect().unwrap(), 0);
        loop {
            while let Ok(Some(event)) = peer.next_event() {
                let mut message = Vec::new();
                match event {
                    ZmtpEvent::Login(login) if login.username == "key" && login.password == KEY => {
                        peer.accept()
                    }
                    ZmtpEvent::Login(_) => peer.reject("the key is not known"),
                    ZmtpEvent::Message(frames) if frames[0] == CONTROL => {
                        let asked = ToLayers::from_bytes(&frames[1]).unwrap();
                        if asked == ToLayers::Close {
                            return;
                        }
                        let answer = executor.ask(&asked).unwrap().to_bytes();
                        zmtp::put_message(&mut message, &[&CONTROL[..], &answer]);
                    }
                    ZmtpEvent::Message(frames) => {
                        calls += 1;
                        if matches!(self.mischief, MaliciousBehavior::DiesAfter(most) if calls > most) {
                            return;
                        }
                        message = self.reply(&mut *executor, &frames);
                    }
                    _ => {}
                }
                let outgoing = [peer.outgoing(), &message].concat();
                peer.sent(outgoing.len() - message.len());
                if stream.write_all(&outgoing).and_then(|()| stream.flush()).is_err() {
                    return;
                }
            }
            let outgoing = peer.outgoing().to_vec();
            peer.sent(outgoing.len());
            if stream.write_all(&outgoing).and_then(|()| stream.flush()).is_err() {
                return;
            }
            match stream.read(peer.space()) {
                Ok(0) | Err(_) => return,
                Ok(count) => peer.advance(count),
            }
        }
    }

    fn reply(&self, executor: &mut dyn Transport, frames: &[Vec<u8>]) -> Vec<u8> {
        let header: [u8; HEADER_BYTES] = frames[0][..].try_into().unwrap();
        let call = CallHeader::from_bytes(&header).unwrap();
        let (_, output) = self.widths[call.site as usize];
        let x = decoded(call.dtype, &frames[1]);
        let mut out = vec![0.0; call.rows as usize * output];
        let mut reply = executor.call(&call, &x, &mut out).unwrap();
        self.bend(&mut reply, &mut out);
        let (mut header, rows) = (reply.to_bytes().to_vec(), encoded(call.dtype, &out));
        let mut message = Vec::new();
        match self.mischief {
            MaliciousBehavior::GarbageHeader => header.fill(0xa5),
            MaliciousBehavior::EmptyHeader => header.clear(),
            MaliciousBehavior::OneFrame => {
                zmtp::put_message(&mut message, &[&header]);
                return message;
            }
            MaliciousBehavior::GarbageControl => {
                zmtp::put_message(&mut message, &[&CONTROL[..], &[0xff; 40]]);
                return message;
            }
            _ => {}
        }
        zmtp::put_message(&mut message, &[&header, &rows]);
        message
    }

    fn bend(&self, reply: &mut ReplyHeader, out: &mut Vec<f32>) {
        match self.mischief {
            MaliciousBehavior::OtherSequence => reply.sequence += 1,
            MaliciousBehavior::OtherRows => reply.rows += 1,
            MaliciousBehavior::OtherDtype => {
                reply.dtype = if reply.dtype == Dtype::F32 { Dtype::Bf16 } else { Dtype::F32 };
            }
            MaliciousBehavior::ShortRows => drop(out.pop()),
            _ => {}
        }
    }

    pub fn local(self, directory: &Path) -> PathBuf {
        let path = directory.join("layers.sock");
        let listener = Listening::<FromLayers, ToLayers>::bind(&path).unwrap();
        thread::spawn(move || {
            loop {
                // The socket is non-blocking.
                match listener.accept() {
                    Ok(Some(accepted)) => {
                        let endpoint = self.clone();
                        thread::spawn(move || endpoint.channel(&accepted.connection));
                    }
                    Ok(None) => thread::sleep(Duration::from_millis(1)),
                    Err(_) => return,
                }
            }
        });
        path
    }

    /// Serves a control connection and its channel by polling.
    fn channel(&self, control: &Connection<FromLayers, ToLayers>) {
        self.connections.fetch_add(1, Ordering::Relaxed);
        let mut executor = self.executor.connect().unwrap();
        let (mut channel, mut calls): (Option<ExecutorChannel>, _) = (None, 0);
        loop {
            match control.receive() {
                Ok(Some((ToLayers::Channel(bytes), _))) => {
                    let made = ExecutorChannel::create(Geometry::rounded(bytes, 4).unwrap()).unwrap();
                    let Geometry { slab_bytes, depth } = made.geometry();
                    let ready = ChannelReady { region_bytes: made.region_bytes(), slab_bytes, depth };
                    let descriptor = made.fd().unwrap();
                    control.send(&FromLayers::ChannelReady(ready), &[descriptor.as_fd()]).unwrap();
                    channel = Some(made);
                }
                Ok(Some((ToLayers::Close, _))) | Err(_) => return,
                Ok(Some((ToLayers::Open(open), _))) if open.layout_hash != LAYOUT_HASH => return,
                Ok(Some((asked, _))) => control.send(&executor.ask(&asked).unwrap(), &[]).unwrap(),
                Ok(None) => {}
            }
            let Some(channel) = &mut channel else {
                thread::sleep(Duration::from_micros(200));
                continue;
            };
            while let Some(call) = channel.take().unwrap() {
                calls += 1;
                if matches!(self.mischief, MaliciousBehavior::DiesAfter(most) if calls > most) {
                    return;
                }
                let (input, output) = self.widths[call.site as usize];
                let (mut x, mut out) =
                    (vec![0.0; call.rows as usize * input], vec![0.0; call.rows as usize * output]);
                channel.read_rows(call.input, call.dtype, &mut x).unwrap();
                let mut reply = executor.call(&call, &x, &mut out).unwrap();
                if reply.status == CallStatus::Done {
                    channel.write_rows(call.output, call.dtype, &out).unwrap();
                }
                self.bend(&mut reply, &mut out);
                channel.reply(&reply).unwrap();
            }
            thread::yield_now();
        }
    }
}

fn decoded(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
        Dtype::Bf16 => {
            bytes.as_chunks::<2>().0.iter().map(|word| half::bf16::from_le_bytes(*word).to_f32()).collect()
        }
    }
}

fn encoded(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect(),
    }
}

/// Directory with permissions for this user only, as the sockets require.
pub fn private_directory() -> tempfile::TempDir {
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    tempfile::Builder::new().permissions(private).tempdir().unwrap()
}

/// Self-signed certificate for `localhost`: its PEM file, and the server's configuration.
pub fn certificate(directory: &Path) -> (PathBuf, Arc<ServerConfig>) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let ca = directory.join("ca.pem");
    std::fs::write(&ca, made.cert.pem()).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    (ca, Arc::new(config))
}

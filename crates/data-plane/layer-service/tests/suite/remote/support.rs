//! A listener over a base with one site, certificates for it, and a synchronous client.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use kernels::Activations;
use kv_cache::ledger::MemoryAccount;
use layer_service::{
    auth::Authenticator,
    base_files::Blobs,
    dispatcher::Dispatcher,
    event_queue::inbox,
    registry::{MaskedRowSupport, Registry, ServedBase},
    remote::{RemoteListenError, RemoteParts, RemoteServer, RemoteSettings},
    settings::{LayerSettings, Quotas},
    tls::TlsFiles,
};
use model::linear_sites::{EvaluateError, EvaluateSites, Site, SiteCall, SitePart, catalog_sites};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
use scheduling::clock::SystemClock;
use shmproto::{
    codec::Wire as _,
    layer::{
        CONTROL, CallClass, CallHeader, Dtype, HEADER_BYTES, LAYER_VERSION, ReplyHeader, RowSource, SiteOp,
        SitePath,
        control::{
            AdapterDtype, CATALOG, Catalog, ClientFileEntry, FromLayers, KvDtype, RefusalCode, SessionOpen,
            SessionOpened, SessionRefused, ToLayers,
        },
    },
    zmtp::{ZmtpClient, ZmtpEvent, ZmtpLimits, put_message, put_two_frames_head},
};

pub(super) use testkit::WATCHDOG;

/// Elements of a row, in and out.
pub(super) const WIDTH: usize = 8;
pub(super) const FACTOR: f32 = 3.0;

pub(super) const ALICE: &str = "hb-alice";
pub(super) const BOB: &str = "hb-bob";

#[derive(Debug)]
struct ScalingSite(Vec<Site>);

impl ScalingSite {
    fn new() -> Self {
        let part = SitePart { name: "triple".into(), rows: WIDTH, has_bias: false };
        Self(vec![Site {
            columns: WIDTH,
            parts: vec![part],
            fast_is_linear: true,
            arithmetic: model::linear_sites::Arithmetic::Unrounded,
            ring: None,
        }])
    }
}

impl EvaluateSites for ScalingSite {
    fn sites(&self) -> &[Site] {
        &self.0
    }

    fn evaluate(
        &mut self,
        call: SiteCall,
        x: &mut Activations,
        out: &mut [f32],
    ) -> Result<(), EvaluateError> {
        assert_ne!(call.op, SiteOp::Backward, "no test asks for it");
        out.iter_mut().zip(x.values_mut()).for_each(|(out, x)| *out = *x * FACTOR);
        Ok(())
    }
}

/// The catalog, and a file with a part that is given out.
#[derive(Debug)]
struct CatalogAlone(Vec<u8>);

impl Blobs for CatalogAlone {
    fn catalog_bytes(&self) -> u32 {
        self.0.len().try_into().unwrap()
    }

    fn read(&self, blob: u32, offset: u64, bytes: u32) -> Result<Vec<u8>, SessionRefused> {
        let (offset, bytes) = (offset as usize, bytes as usize);
        match (blob, offset) {
            (CATALOG, _) => Ok(self.0[offset..].iter().copied().take(bytes).collect()),
            (1, 100..300) => Ok(vec![7; bytes.min(300 - offset)]),
            _ => {
                let (code, message) = (RefusalCode::NoSuchBlob, "not given out".to_owned());
                Err(SessionRefused { code, message, retry_after_ms: 0 })
            }
        }
    }
}

pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

pub(super) struct Certified {
    pub(super) chain: String,
    pub(super) key: String,
}

impl Authority {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "Test CA");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer }
    }

    pub(super) fn pem(&self) -> String {
        self.issuer.pem()
    }

    pub(super) fn server(&self) -> Certified {
        let mut params = CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.sign(&params)
    }

    /// Certificate of a tenant, valid until the beginning of `until_year`.
    pub(super) fn client(&self, tenant: &str, until_year: i32) -> Certified {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, tenant);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.not_before = rcgen::date_time_ymd(2000, 1, 1);
        params.not_after = rcgen::date_time_ymd(until_year, 1, 1);
        self.sign(&params)
    }

    fn sign(&self, params: &CertificateParams) -> Certified {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Certified { chain: certificate.pem(), key: key.serialize_pem() }
    }
}

pub(super) struct RemoteServerSetup {
    /// Lines of the key file; `None` for no file.
    pub(super) keys: Option<String>,
    pub(super) asks_for_certificates: bool,
    pub(super) settings: RemoteSettings,
    pub(super) quotas: Quotas,
    pub(super) address: &'static str,
    pub(super) max_frame_bytes: usize,
}

impl Default for RemoteServerSetup {
    fn default() -> Self {
        Self {
            keys: Some(
                [
                    security::keys::line_of("user", "alice", ALICE),
                    security::keys::line_of("user", "bob", BOB),
                ]
                .concat(),
            ),
            asks_for_certificates: false,
            settings: RemoteSettings::default(),
            quotas: Quotas::default(),
            address: "127.0.0.1:0",
            max_frame_bytes: 1 << 20,
        }
    }
}

pub(super) struct RemoteServerFixture {
    pub(super) authority: Authority,
    pub(super) registry: Registry,
    directory: tempfile::TempDir,
    server: Option<RemoteServer>,
    dispatcher: Option<JoinHandle<()>>,
    has_ended: Arc<AtomicBool>,
}

impl RemoteServerFixture {
    pub(super) fn open(arranged: RemoteServerSetup) -> Self {
        Self::try_open(arranged).unwrap()
    }

    pub(super) fn try_open(arranged: RemoteServerSetup) -> Result<Self, RemoteListenError> {
        let RemoteServerSetup { keys, asks_for_certificates, settings, quotas, address, max_frame_bytes } =
            arranged;
        let authority = Authority::new();
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| directory.path().join(name);
        let server = authority.server();
        std::fs::write(place("cert"), server.chain).unwrap();
        std::fs::write(place("key"), server.key).unwrap();
        std::fs::write(place("ca"), authority.pem()).unwrap();
        let authenticator = match &keys {
            None => Authenticator::without_keys(),
            Some(lines) => {
                std::fs::write(place("keys"), lines).unwrap();
                Authenticator::open(&place("keys")).unwrap()
            }
        };
        let client_ca = asks_for_certificates.then(|| place("ca"));
        let files = TlsFiles { certificate: place("cert"), key: place("key"), client_ca };
        let settings = RemoteSettings {
            tls: Some((address.parse().unwrap(), files)),
            private_socket: Some(place("private/layers.zmq")),
            ..settings
        };
        let blobs = CatalogAlone(catalog().to_bytes());
        let (sender, incoming) = inbox();
        let base = ServedBase {
            instance: 1,
            catalog_bytes: blobs.catalog_bytes(),
            maskable: MaskedRowSupport { linear: true, ring: true },
        };
        let registry = Registry::new(quotas, base, sender, MemoryAccount::default());
        let parts = RemoteParts {
            registry: registry.clone(),
            blobs: Arc::new(blobs),
            authenticator: Arc::new(authenticator),
            max_frame_bytes,
        };
        let server = RemoteServer::open(settings, parts)?;
        let has_ended = Arc::new(AtomicBool::new(false));
        let layers = LayerSettings { quotas, ..LayerSettings::default() };
        let sites = ScalingSite::new();
        let dispatcher = Dispatcher::new(&sites, layers, registry.clone(), incoming, Box::new(SystemClock));
        let end = Arc::clone(&has_ended);
        let dispatcher = std::thread::spawn(move || compute(dispatcher, sites, &end));
        Ok(Self {
            authority,
            registry,
            directory,
            server: Some(server),
            dispatcher: Some(dispatcher),
            has_ended,
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.server.as_ref().and_then(RemoteServer::address).unwrap()
    }

    pub(super) fn private_socket(&self) -> PathBuf {
        self.directory.path().join("private/layers.zmq")
    }

    pub(super) fn write_keys(&self, lines: &str) {
        let next = self.directory.path().join("keys.next");
        std::fs::write(&next, lines).unwrap();
        std::fs::rename(next, self.directory.path().join("keys")).unwrap();
    }

    /// Client configuration that trusts the listener, with a certificate if there is one.
    pub(super) fn client_config(&self, certified: Option<&Certified>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.pem().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.unwrap().with_root_certificates(roots);
        Arc::new(match certified {
            None => builder.with_no_client_auth(),
            Some(Certified { chain, key }) => {
                let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).map(Result::unwrap).collect();
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        })
    }

    pub(super) fn tls(&self, certified: Option<&Certified>) -> Tls {
        let tcp = self.tcp();
        let name = ServerName::try_from("localhost").unwrap();
        StreamOwned::new(ClientConnection::new(self.client_config(certified), name).unwrap(), tcp)
    }

    pub(super) fn tcp(&self) -> TcpStream {
        let tcp = TcpStream::connect(self.address()).unwrap();
        tcp.set_nodelay(true).unwrap();
        tcp.set_read_timeout(Some(WATCHDOG)).unwrap();
        tcp.set_write_timeout(Some(WATCHDOG)).unwrap();
        tcp
    }

    pub(super) fn client(&self, key: &str) -> ZmtpPeer<Tls> {
        let mut peer = ZmtpPeer::with_key(self.tls(None), key);
        peer.open(0).unwrap();
        peer
    }

    pub(super) fn neighbour(&self) -> ZmtpPeer<UnixStream> {
        let stream = UnixStream::connect(self.private_socket()).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        ZmtpPeer::null(stream)
    }

    pub(super) fn await_sessions(&self, count: u64) {
        let until = Instant::now() + WATCHDOG;
        while u64::from(self.registry.stats().open) != count {
            assert!(Instant::now() < until, "{} sessions are open, not {count}", self.registry.stats().open);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for RemoteServerFixture {
    fn drop(&mut self) {
        drop(self.server.take());
        self.has_ended.store(true, Ordering::Relaxed);
        if let Some(dispatcher) = self.dispatcher.take() {
            dispatcher.join().unwrap();
        }
    }
}

fn compute(mut dispatcher: Dispatcher, mut base: ScalingSite, has_ended: &AtomicBool) {
    while !has_ended.load(Ordering::Relaxed) {
        dispatcher.poll();
        if dispatcher.run_due(&mut base).rows == 0 {
            dispatcher.wait(Some(Instant::now() + Duration::from_millis(20)));
        }
    }
}

fn catalog() -> Catalog {
    Catalog {
        model: "tripling".into(),
        architecture: "none".into(),
        base_hash: [7; 32],
        context_length: 0,
        kv_dtype: KvDtype::F32,
        adapter_dtype: AdapterDtype::Exact,
        sites: catalog_sites(ScalingSite::new().sites()),
        files: vec![ClientFileEntry { name: "model".into(), bytes: 1000, ranges: vec![(100, 200)] }],
    }
}

pub(super) type Tls = StreamOwned<ClientConnection, TcpStream>;

/// A client with access to the raw bytes of its connection.
pub(super) struct ZmtpPeer<S> {
    pub(super) stream: S,
    zmtp: ZmtpClient,
    sequence: u64,
}

fn limits() -> ZmtpLimits {
    ZmtpLimits::new(64 << 20)
}

impl<S: Read + Write> ZmtpPeer<S> {
    pub(super) fn null(stream: S) -> Self {
        Self { stream, zmtp: ZmtpClient::null(limits()), sequence: 0 }
    }

    pub(super) fn with_key(stream: S, key: &str) -> Self {
        Self { stream, zmtp: ZmtpClient::plain(limits(), "key", key).unwrap(), sequence: 0 }
    }

    /// Next event; an error if the connection ends first.
    pub(super) fn event(&mut self) -> io::Result<ZmtpEvent> {
        loop {
            let event = self.zmtp.next_event().map_err(io::Error::other)?;
            // Outgoing bytes are sent first.
            let own = self.zmtp.outgoing().to_vec();
            if !own.is_empty() {
                self.stream.write_all(&own)?;
                self.zmtp.sent(own.len());
            }
            if let Some(event) = event {
                return Ok(event);
            }
            match self.stream.read(self.zmtp.space())? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.zmtp.advance(count),
            }
        }
    }

    pub(super) fn message(&mut self) -> io::Result<[Vec<u8>; 2]> {
        loop {
            match self.event()? {
                ZmtpEvent::Message(frames) => return Ok(frames.try_into().expect("two frames")),
                ZmtpEvent::Refused(reason) => {
                    return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
                }
                _ => {}
            }
        }
    }

    pub(super) fn hear(&mut self) -> io::Result<FromLayers> {
        let [first, second] = self.message()?;
        assert_eq!(first, CONTROL);
        Ok(FromLayers::from_bytes(&second).unwrap())
    }

    pub(super) fn send_message(&mut self, message: &ToLayers) -> io::Result<()> {
        let mut bytes = Vec::new();
        put_message(&mut bytes, &[&CONTROL, &message.to_bytes()]);
        self.stream.write_all(&bytes)
    }

    pub(super) fn shake_hands(&mut self) -> io::Result<()> {
        match self.event()? {
            ZmtpEvent::Ready(_) => Ok(()),
            ZmtpEvent::Refused(reason) => Err(io::Error::new(io::ErrorKind::PermissionDenied, reason)),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn open(&mut self, session: u64) -> io::Result<SessionOpened> {
        match self.open_as(session, "")? {
            FromLayers::Opened(opened) => Ok(opened),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }

    pub(super) fn open_as(&mut self, session: u64, key: &str) -> io::Result<FromLayers> {
        self.shake_hands()?;
        self.send_message(&ToLayers::Open(SessionOpen {
            version: LAYER_VERSION,
            layout_hash: 0,
            key: key.to_owned(),
            name: "test".to_owned(),
            masking: "off".to_owned(),
            session,
        }))?;
        self.hear()
    }

    pub(super) fn send(&mut self, header: &CallHeader, rows: &[f32]) -> io::Result<()> {
        let rows: Vec<u8> = rows.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut bytes = Vec::new();
        put_two_frames_head(&mut bytes, &header.to_bytes(), rows.len());
        bytes.extend(rows);
        self.stream.write_all(&bytes)
    }

    pub(super) fn reply(&mut self) -> io::Result<(ReplyHeader, Vec<f32>)> {
        let [first, second] = self.message()?;
        let header = <[u8; HEADER_BYTES]>::try_from(first).expect("a header");
        let rows = second.chunks_exact(4).map(|number| f32::from_le_bytes(number.try_into().unwrap()));
        Ok((ReplyHeader::from_bytes(&header).unwrap(), rows.collect()))
    }

    pub(super) fn call(&mut self, rows: u32, value: f32) -> io::Result<()> {
        let numbers = vec![value; rows as usize * WIDTH];
        let header = self.next_header(rows);
        self.send(&header, &numbers)?;
        let (reply, answer) = self.reply()?;
        assert_eq!((reply.sequence, reply.rows), (header.sequence, rows), "{reply:?}");
        assert_eq!(answer, vec![value * FACTOR; numbers.len()]);
        Ok(())
    }

    pub(super) fn next_header(&mut self, rows: u32) -> CallHeader {
        self.sequence += 1;
        header(self.sequence, rows)
    }

    /// Whether the peer closes before the timeout.
    pub(super) fn is_hung_up_on(&mut self) -> bool {
        loop {
            match self.event() {
                Ok(_) => {}
                Err(error) => return !is_late(&error),
            }
        }
    }
}

pub(super) fn header(sequence: u64, rows: u32) -> CallHeader {
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

pub(super) fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

//! Asks every host for its report periodically, and resolves host names.
//!
//! Each host has its own task and connection, so a slow host delays no other. Reports are bounded.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use control_protocol::fleet::{GatewayReport, KnownTags};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1::{SendRequest, handshake},
    header::{AUTHORIZATION, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpStream, lookup_host},
    task::AbortHandle,
    time::{MissedTickBehavior, interval, timeout},
};

use crate::picker::Picker;

/// Maximum size of a host's report, in bytes.
const MAX_REPORT_BYTES: usize = 16 << 20;
/// Interval of name resolution.
const RESOLVE_EVERY: Duration = Duration::from_secs(1);
/// First and maximum delay before a silent host is asked again.
const RETRY: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

#[derive(Debug, Clone)]
pub struct Scrape {
    /// Names or addresses, with ports.
    pub endpoints: Vec<String>,
    /// Interval between two reports of a host.
    pub every: Duration,
    /// Time limit of a report.
    pub limit: Duration,
    /// Authorization header with the key.
    pub key: Option<HeaderValue>,
}

#[derive(Debug, thiserror::Error)]
enum ScrapeError {
    #[error("{0}")]
    Connect(#[from] std::io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("it took longer than {} ms", .0.as_millis())]
    Slow(Duration),
    #[error("it answered with {0}")]
    Status(StatusCode),
    #[error("it answered with {0}; the key must have the role metrics or admin")]
    Key(StatusCode),
    #[error("it sent more than {MAX_REPORT_BYTES} bytes, or broke off")]
    Body,
    #[error("it sent an invalid report: {0}")]
    Report(#[from] serde_json::Error),
}

/// Resolves the host names periodically and starts one task per host. Never returns.
pub async fn run(picker: Arc<Picker>, scrape: Scrape) {
    let scrape = Arc::new(scrape);
    let mut tasks: HashMap<SocketAddr, AbortHandle> = HashMap::new();
    let mut ticks = interval(RESOLVE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last: HashMap<String, Vec<SocketAddr>> = HashMap::new();
    loop {
        ticks.tick().await;
        for name in &scrape.endpoints {
            match timeout(RESOLVE_EVERY, lookup_host(name)).await {
                Ok(Ok(found)) => drop(last.insert(name.clone(), found.collect())),
                // The former addresses of an unresolved name may still be valid.
                Ok(Err(error)) => tracing::debug!(name, %error, "cannot resolve a host name"),
                Err(_) => tracing::debug!(name, "cannot resolve a host name in time"),
            }
        }
        let hosts: BTreeSet<SocketAddr> = last.values().flatten().copied().collect();
        picker.fleet.set_hosts(&hosts);
        tasks.retain(|address, task| {
            let stays = hosts.contains(address);
            if !stays {
                tracing::info!(%address, "a host was removed");
                task.abort();
            }
            stays
        });
        for address in hosts {
            tasks.entry(address).or_insert_with(|| {
                tracing::info!(%address, "a host");
                tokio::spawn(follow(Arc::clone(&picker), Arc::clone(&scrape), address)).abort_handle()
            });
        }
    }
}

/// Asks one host forever.
async fn follow(picker: Arc<Picker>, scrape: Arc<Scrape>, address: SocketAddr) {
    let mut pause = RETRY[0];
    loop {
        let began = Instant::now();
        let Err(fault) = ask_on(&picker, &scrape, address).await;
        picker.fleet.lost(address);
        if pause == RETRY[0] {
            tracing::warn!(%address, %fault, "a host does not answer");
        }
        // A host that answered for a while is retried soon.
        let answered = began.elapsed() > RETRY[1];
        pause = if answered { RETRY[0] } else { (2 * pause).min(RETRY[1]) };
        tokio::time::sleep(pause).await;
    }
}

/// Asks over one connection until an error occurs.
async fn ask_on(
    picker: &Picker,
    scrape: &Scrape,
    address: SocketAddr,
) -> Result<std::convert::Infallible, ScrapeError> {
    let slow = |_| ScrapeError::Slow(scrape.limit);
    let stream = timeout(scrape.limit, TcpStream::connect(address)).await.map_err(slow)??;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let _ends = AbortOnDrop(connection.abort_handle());
    let mut ticks = interval(scrape.every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (asked_at, have) = (Instant::now(), picker.fleet.have(address));
        let said = timeout(scrape.limit, ask(&mut sender, scrape, address, have)).await;
        let report = said.map_err(slow)??;
        if let Err(error) = picker.fleet.heard(address, asked_at, report) {
            tracing::warn!(%address, %error, "requesting a full report of a host");
        }
    }
}

async fn ask(
    sender: &mut SendRequest<Empty<Bytes>>,
    scrape: &Scrape,
    address: SocketAddr,
    have: KnownTags,
) -> Result<GatewayReport, ScrapeError> {
    let mut request = Request::new(Empty::new());
    // A path of digits and letters always parses as a URI.
    *request.uri_mut() = have.uri().parse().unwrap_or_default();
    let host = HeaderValue::from_str(&address.to_string()).unwrap_or(HeaderValue::from_static("localhost"));
    request.headers_mut().insert(HOST, host);
    if let Some(key) = &scrape.key {
        request.headers_mut().insert(AUTHORIZATION, key.clone());
    }
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    match response.status() {
        StatusCode::OK => {}
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => return Err(ScrapeError::Key(status)),
        status => return Err(ScrapeError::Status(status)),
    }
    let body = Limited::new(response.into_body(), MAX_REPORT_BYTES).collect().await;
    Ok(serde_json::from_slice(&body.map_err(|_| ScrapeError::Body)?.to_bytes())?)
}

/// Aborts a task on drop.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

//! Connections: how many there may be, and what each may cost.
//!
//! ```text
//! accept -> is one of --max-connections free?  yes: the router answers
//!                                              no:  one of the reserve: /health and /ready, 503 for the rest
//!                                              none of either: nobody is accepted until one ends
//! ```
//!
//! Each connection speaks HTTP/1.1 with headers of at most 16 KiB. It is closed if it is idle, if a header takes too
//! long, or if its reader takes nothing ([`WriteTimeout`]); what is no request is told so ([`RejectionStream`]); a peer
//! whose machine is gone is noticed by TCP itself. When file descriptors run out, the one that is kept back turns the
//! newcomer away, and accepting rests.

mod descriptors;
mod rejection;
mod write_timeout;

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::{GracefulShutdown, Watcher},
    service::TowerToHyperService,
};
use rustix::{io, net::sockopt};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
};

use self::{
    descriptors::{Budget, ReservedDescriptor},
    rejection::RejectionStream,
    write_timeout::WriteTimeout,
};
use crate::{app::App, config::ConnectionLimits, routes};

/// Longest header of a request.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Most fields of a header.
const MAX_HEADER_FIELDS: usize = 64;
/// Most bytes of an answer that wait in this process for their reader; the reader's socket holds some more.
const BUFFER_BYTES: usize = 64 * 1024;
/// What the system holds of an answer for its reader.
const SOCKET_BUFFER_BYTES: usize = 128 * 1024;
/// Who came when all connections were taken gets this long to say what for.
const RESERVE_TIMEOUT: Duration = Duration::from_millis(500);
/// After so much silence the system asks whether the peer is still there.
const PROBE_AFTER: Duration = Duration::from_secs(30);
/// How often it asks, and how many times.
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// How far the end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShutdownPhase {
    /// It has not.
    Serving,
    /// Nobody is accepted any more; what runs goes on.
    Draining,
    /// What runs is cut off.
    Cut,
}

/// The right of one connection to be there, held until it ends.
enum Admission {
    /// One of `--max-connections`.
    Served(OwnedSemaphorePermit),
    /// One of the reserve, which hears probes' answers and refusals.
    Reserve(OwnedSemaphorePermit),
}

/// How many connections there may be.
struct ConnectionLimiter {
    served: Arc<Semaphore>,
    reserve: Arc<Semaphore>,
}

/// Answers connections, whether they are served or refused.
struct ConnectionHandler {
    router: Router,
    /// Answers probes and refuses the rest.
    refusals: Router,
    limits: ConnectionLimits,
}

/// Serves until `phase` says otherwise. Returns how many connections were cut off.
pub async fn serve(listener: TcpListener, app: Arc<App>, mut phase: watch::Receiver<ShutdownPhase>) -> usize {
    let limits = app.connections;
    let limiter = ConnectionLimiter::new(Budget::find(limits.max_connections));
    let handler =
        ConnectionHandler { router: routes::router(&app), refusals: routes::refusals(&app), limits };
    let (mut reserved, graceful, mut open) =
        (ReservedDescriptor::new(), GracefulShutdown::new(), JoinSet::new());
    let mut stop = phase.clone();
    let accepting = async {
        loop {
            let admission = limiter.free().await;
            match listener.accept().await {
                Ok((stream, _)) => {
                    open.spawn(handler.connection(stream, limiter.better(admission), graceful.watcher()));
                }
                Err(error) => reserved.after(&error, &listener).await,
            }
            // Those that have ended; the limiter bounds how many there can be.
            while open.try_join_next().is_some() {}
        }
    };
    tokio::select! {
        () = accepting => {}
        // An error means that whoever could stop it is gone.
        _ = stop.wait_for(|phase| *phase > ShutdownPhase::Serving) => {}
    }
    drop(listener);
    failpoint::pass("gateway.drain_begun");
    tokio::select! {
        () = graceful.shutdown() => {}
        _ = phase.wait_for(|phase| *phase == ShutdownPhase::Cut) => {}
    }
    while open.try_join_next().is_some() {}
    let cut = open.len();
    open.shutdown().await;
    cut
}

impl ConnectionLimiter {
    fn new(budget: Budget) -> Self {
        Self {
            served: Arc::new(Semaphore::new(budget.connections)),
            reserve: Arc::new(Semaphore::new(budget.reserve)),
        }
    }

    /// The right to be served or refused, for the next one who comes.
    async fn free(&self) -> Admission {
        let (served, reserve) = (Arc::clone(&self.served), Arc::clone(&self.reserve));
        // Neither semaphore is ever closed.
        tokio::select! {
            biased;
            Ok(permit) = served.acquire_owned() => Admission::Served(permit),
            Ok(permit) = reserve.acquire_owned() => Admission::Reserve(permit),
            else => std::future::pending().await,
        }
    }

    /// Time has passed since `admission` was taken: there may be a better one.
    fn better(&self, admission: Admission) -> Admission {
        match admission {
            Admission::Reserve(permit) => match Arc::clone(&self.served).try_acquire_owned() {
                Ok(better) => Admission::Served(better),
                Err(_) => Admission::Reserve(permit),
            },
            served @ Admission::Served(_) => served,
        }
    }
}

impl ConnectionHandler {
    /// One connection, from its first byte to its last.
    fn connection(
        &self,
        stream: TcpStream,
        admission: Admission,
        watcher: Watcher,
    ) -> impl Future<Output = ()> + use<> {
        if let Err(error) = set_options(&stream, self.limits.stall_timeout) {
            tracing::debug!(%error, "a connection keeps the system's options");
        }
        let (router, keep_alive, header_timeout, permit) = match admission {
            Admission::Served(permit) => (self.router.clone(), true, self.limits.header_timeout, permit),
            Admission::Reserve(permit) => {
                (self.refusals.clone(), false, self.limits.header_timeout.min(RESERVE_TIMEOUT), permit)
            }
        };
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(header_timeout)
            .max_header_size(MAX_HEADER_BYTES)
            .max_headers(MAX_HEADER_FIELDS)
            .max_buf_size(BUFFER_BYTES)
            .keep_alive(keep_alive);
        let stream = TokioIo::new(RejectionStream::new(WriteTimeout::new(stream, self.limits.stall_timeout)));
        let served = watcher.watch(http.serve_connection(stream, TowerToHyperService::new(router)));
        async move {
            let _permit = permit;
            if let Err(error) = served.await {
                tracing::debug!(%error, "a connection ended early");
            }
        }
    }
}

fn set_options(stream: &TcpStream, stall_timeout: Duration) -> io::Result<()> {
    // A token is a small packet that nobody wants to wait for.
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER_BYTES)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_user_timeout(stream, u32::try_from(stall_timeout.as_millis()).unwrap_or(u32::MAX))
}

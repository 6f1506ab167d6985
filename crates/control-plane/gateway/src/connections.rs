//! Accepts connections, limits their number, and limits the cost of each.
//!
//! ```text
//! accept -> is one of --max-connections free?  yes: the router answers
//!                                              no:  one of the reserve: /health and /ready, 503 for the rest
//!                                              neither: no accept until a connection ends
//! ```
//!
//! Each connection speaks HTTP/1.1 with headers of at most 16 KiB. A connection is closed if it is idle, if a
//! header takes too long, or if its client stops reading ([`WriteTimeout`]). Invalid requests get an
//! explanation ([`RejectionStream`]). TCP keepalive detects a peer whose machine is gone. When file
//! descriptors run out, a reserved descriptor serves to turn the newcomer away, and accepting pauses.

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
use crate::{bases::Bases, config::ConnectionLimits, routes};

/// Longest header of a request, in bytes.
const MAX_HEADER_BYTES: usize = 16 * 1024;
const MAX_HEADER_FIELDS: usize = 64;
/// Maximum bytes of an answer that wait in this process; the socket's buffer holds some more.
const BUFFER_BYTES: usize = 64 * 1024;
const SOCKET_BUFFER_BYTES: usize = 128 * 1024;
/// Timeout of the header on a connection of the reserve.
const RESERVE_TIMEOUT: Duration = Duration::from_millis(500);
/// Silence after which TCP keepalive probes begin.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// Progress of the shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ShutdownPhase {
    Serving,
    /// New connections are refused, and running requests continue.
    Draining,
    /// Running requests are cut off.
    Cut,
}

/// Permit of one connection, held until it ends.
enum Admission {
    /// A permit of `--max-connections`.
    Served(OwnedSemaphorePermit),
    /// A permit of the reserve, for health probes and refusals.
    Reserve(OwnedSemaphorePermit),
}

struct ConnectionLimiter {
    served: Arc<Semaphore>,
    reserve: Arc<Semaphore>,
}

struct ConnectionHandler {
    router: Router,
    /// Answers probes and refuses other requests.
    refusals: Router,
    limits: ConnectionLimits,
}

/// Serves until `phase` ends it. Returns the number of connections that were cut off.
pub(crate) async fn serve(
    listener: TcpListener,
    bases: Arc<Bases>,
    mut phase: watch::Receiver<ShutdownPhase>,
) -> usize {
    let limits = bases.first().connections;
    let limiter = ConnectionLimiter::new(Budget::find(limits.max_connections));
    let handler =
        ConnectionHandler { router: routes::router(&bases), refusals: routes::refusals(&bases), limits };
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
            // Removes finished tasks; the limiter bounds their number.
            while open.try_join_next().is_some() {}
        }
    };
    tokio::select! {
        () = accepting => {}
        // An error means that the sender of the phase was dropped, so the server stops too.
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

    /// Waits for a permit for the next connection.
    async fn free(&self) -> Admission {
        let (served, reserve) = (Arc::clone(&self.served), Arc::clone(&self.reserve));
        tokio::select! {
            biased;
            Ok(permit) = served.acquire_owned() => Admission::Served(permit),
            Ok(permit) = reserve.acquire_owned() => Admission::Reserve(permit),
            else => std::future::pending().await,
        }
    }

    /// Replaces a permit of the reserve if a regular one became free during the accept.
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
    fn connection(
        &self,
        stream: TcpStream,
        admission: Admission,
        watcher: Watcher,
    ) -> impl Future<Output = ()> + use<> {
        if let Err(error) = set_options(&stream, self.limits.stall_timeout) {
            tracing::debug!(%error, "cannot set the options of a connection");
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
    // A token is a small packet, which must not wait for more data.
    sockopt::set_tcp_nodelay(stream, true)?;
    sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER_BYTES)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_tcp_user_timeout(stream, u32::try_from(stall_timeout.as_millis()).unwrap_or(u32::MAX))
}

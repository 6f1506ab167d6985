//! Server for clients on this host: a control socket, and a channel of shared memory per client.
//!
//! One connection is one session. No client can block the server: no call waits here, each client has a
//! bounded turn, and a client that does not take its answers is disconnected. The session of a client that
//! exits ends with its connection.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::AsFd as _,
};
use shmproto::{
    channel::{ExecutorChannel, LAYOUT_HASH},
    fd_passing::{ConnectedPeer as Called, SendError},
    layer::control::{
        ChannelReady, Fetch, Fetched, FromLayers, LayersEnd, LayersListener, MAX_FETCH_BYTES, RefusalCode,
        SessionOpen, SessionRefused, ToLayers,
    },
};

use super::{
    SessionTransport,
    auth::{Authenticator, Principal, REFUSED},
    base_files::Blobs,
    registry::{RegisteredSession, Registry, refused},
};

/// Maximum interval between two checks of all sessions.
const LOOK: Duration = Duration::from_millis(100);

/// Maximum number of messages of one client before the others have their turn.
const MAX_MESSAGES: usize = 64;

/// Time limit for opening a session, and for taking an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum number of connections without a session; more are closed.
const MAX_CALLERS: usize = 32;

/// Pause after an error such as a lack of file descriptors, which other connections may free.
const NO_DESCRIPTORS: Duration = Duration::from_millis(50);

/// Services that the server uses.
#[derive(Debug, Clone)]
pub struct LocalParts {
    /// Registry of all sessions.
    pub registry: Registry,
    /// Authenticator of the clients.
    pub authenticator: Arc<Authenticator>,
    /// Source of the catalog and the client weights.
    pub blobs: Arc<dyn Blobs>,
}

/// The running server; dropping it closes the socket and removes its file.
#[derive(Debug)]
pub struct LocalServer {
    is_closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl LocalServer {
    /// Starts a server at `socket`, in a directory that only this user may enter.
    ///
    /// # Errors
    /// Fails if the socket cannot be bound or the thread cannot be started.
    pub fn open(socket: &Path, parts: LocalParts) -> anyhow::Result<Self> {
        let bound = LayersListener::bind(socket);
        let listener =
            bound.with_context(|| format!("cannot accept split clients at {}", socket.display()))?;
        let is_closed = Arc::new(AtomicBool::new(false));
        let server =
            LocalListener { listener, parts, is_closed: Arc::clone(&is_closed), callers: Vec::new() };
        let spawned = std::thread::Builder::new().name("layers".to_owned()).spawn(move || server.run());
        let thread = Some(spawned.context("cannot start the thread of the layer socket")?);
        Ok(Self { is_closed, thread })
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct LocalListener {
    listener: LayersListener,
    parts: LocalParts,
    is_closed: Arc<AtomicBool>,
    callers: Vec<LocalCaller>,
}

struct LocalCaller {
    connection: LayersEnd,
    pid: u32,
    session: Option<RegisteredSession>,
    principal: Option<Principal>,
    /// Answer that the client has not taken yet.
    owed: Option<FromLayers>,
    /// Time since when the client owes a session or takes no answer.
    owes_since: Option<Instant>,
    knows_of_end: bool,
}

/// Reason why a connection ends.
#[derive(Debug, thiserror::Error)]
enum LocalDisconnect {
    #[error("the client closed the session")]
    Done,
    #[error("the client disconnected: {0}")]
    Gone(String),
    #[error("the client was refused: {0}")]
    Refused(String),
    #[error("the session was closed: the client broke the protocol, or another connection took it over")]
    Closed,
    #[error("its key was removed from the key file")]
    Barred,
    #[error("the client read or sent nothing for {} s", PATIENCE.as_secs())]
    Slow,
}

impl LocalListener {
    fn run(mut self) {
        while !self.is_closed.load(Ordering::Relaxed) {
            self.accept();
            self.parts.registry.empty_discarded();
            let parts = &self.parts;
            self.callers.retain_mut(|caller| match caller.serve(parts) {
                Ok(()) => true,
                Err(leave) => {
                    tracing::info!(pid = caller.pid, reason = %leave, "a split client disconnected");
                    false
                }
            });
            self.wait();
        }
        for caller in &self.callers {
            let _ = caller.connection.send(&FromLayers::Draining, &[]);
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok(Some(Called { connection, pid })) => {
                    let strangers = self.callers.iter().filter(|caller| caller.session.is_none()).count();
                    if strangers < MAX_CALLERS {
                        self.callers.push(LocalCaller::new(connection, pid));
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a split client");
                    std::thread::sleep(NO_DESCRIPTORS);
                    return;
                }
            }
        }
    }

    /// Sleeps until a client sends a message or can take its answer, at most for [`LOOK`].
    fn wait(&self) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        fds.extend(self.callers.iter().map(|caller| {
            // A client's next message is read only after it has taken its answer.
            let flags = if caller.owed.is_some() { PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(caller.connection.as_fd(), flags)
        }));
        let timeout = Timespec::try_from(LOOK).ok();
        // An interruption needs no handling: the next round checks everything.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

impl LocalCaller {
    fn new(connection: LayersEnd, pid: u32) -> Self {
        let owes_since = Some(Instant::now());
        Self { connection, pid, session: None, principal: None, owed: None, owes_since, knows_of_end: false }
    }

    /// Handles the client's messages, and sends answers while the client takes them.
    fn serve(&mut self, parts: &LocalParts) -> Result<(), LocalDisconnect> {
        if self.session.as_ref().is_some_and(RegisteredSession::is_closed) {
            return Err(LocalDisconnect::Closed);
        }
        if !self.principal.as_ref().is_none_or(|principal| parts.authenticator.still_admits(principal)) {
            return Err(LocalDisconnect::Barred);
        }
        if let Some(answer) = self.owed.take() {
            self.reply(answer)?;
        }
        for _ in 0..MAX_MESSAGES {
            if self.owed.is_some() {
                break;
            }
            let received =
                self.connection.receive().map_err(|error| LocalDisconnect::Gone(error.to_string()))?;
            let Some((message, _)) = received else { break };
            let makes_channel = matches!(message, ToLayers::Channel(_));
            self.heard(message, parts)?;
            if makes_channel {
                // Creating the memory takes as long as many other messages.
                break;
            }
        }
        self.tell_of_end(parts)?;
        match self.owes_since {
            Some(since) if since.elapsed() > PATIENCE => Err(LocalDisconnect::Slow),
            _ => Ok(()),
        }
    }

    fn tell_of_end(&mut self, parts: &LocalParts) -> Result<(), LocalDisconnect> {
        let is_news = parts.registry.is_draining() && self.session.is_some() && !self.knows_of_end;
        if is_news && self.owed.is_none() {
            self.knows_of_end = true;
            self.reply(FromLayers::Draining)?;
        }
        Ok(())
    }

    fn heard(&mut self, message: ToLayers, parts: &LocalParts) -> Result<(), LocalDisconnect> {
        match (message, &mut self.session) {
            (ToLayers::Close, _) => Err(LocalDisconnect::Done),
            (ToLayers::Open(open), None) => self.open(&open, parts),
            (ToLayers::Open(_), Some(_)) => self.reply(malformed("the session is open: close it first")),
            (_, None) => self.reply(malformed("open a session first")),
            (ToLayers::Fetch(fetch), Some(_)) => self.reply(fetched(&fetch, &*parts.blobs)),
            (ToLayers::GetStats, Some(session)) => {
                let stats = session.stats();
                self.reply(FromLayers::Stats(stats))
            }
            (ToLayers::Channel(bytes), Some(session)) => match connect(session, &self.connection, bytes) {
                Ok(()) => Ok(()),
                Err(refused) => self.reply(FromLayers::Refused(refused)),
            },
        }
    }

    fn open(&mut self, open: &SessionOpen, parts: &LocalParts) -> Result<(), LocalDisconnect> {
        match admit(open, parts) {
            Ok((principal, session)) => {
                let (opened, info) = (session.opened().clone(), session.info());
                let (tenant, name, masking) = (&info.tenant, &info.name, &info.masking);
                tracing::info!(pid = self.pid, session = opened.session, %tenant, name, masking, "a \
                    split client opened a session");
                (self.session, self.principal) = (Some(session), Some(principal));
                self.owes_since = None;
                self.reply(FromLayers::Opened(opened))
            }
            Err(refused) => {
                let reason = refused.message.clone();
                self.reply(FromLayers::Refused(refused))?;
                Err(LocalDisconnect::Refused(reason))
            }
        }
    }

    fn reply(&mut self, answer: FromLayers) -> Result<(), LocalDisconnect> {
        match self.connection.send(&answer, &[]) {
            Ok(()) => {
                if self.session.is_some() {
                    self.owes_since = None;
                }
                Ok(())
            }
            Err(SendError::Full) => {
                self.owed = Some(answer);
                self.owes_since.get_or_insert_with(Instant::now);
                Ok(())
            }
            Err(error) => Err(LocalDisconnect::Gone(error.to_string())),
        }
    }
}

fn admit(open: &SessionOpen, parts: &LocalParts) -> Result<(Principal, RegisteredSession), SessionRefused> {
    if open.layout_hash != LAYOUT_HASH {
        let message =
            "client and executor disagree about the layout of shared memory: run one release".to_owned();
        return Err(refused(RefusalCode::Version, message));
    }
    let unknown = || {
        parts.registry.count_refusal();
        refused(RefusalCode::Unauthenticated, REFUSED.to_owned())
    };
    let principal = parts.authenticator.by_key(open.key.as_bytes()).ok_or_else(unknown)?;
    let session = parts.registry.open(&principal.tenant, open, SessionTransport::Channel, None)?;
    Ok((principal, session))
}

/// Creates a channel and sends the client its end.
fn connect(
    session: &mut RegisteredSession,
    connection: &LayersEnd,
    bytes: u64,
) -> Result<(), SessionRefused> {
    session.channel(bytes, |channel: &ExecutorChannel| {
        let geometry = channel.geometry();
        let ready = ChannelReady {
            region_bytes: channel.region_bytes(),
            slab_bytes: geometry.slab_bytes,
            depth: geometry.depth,
        };
        let unable = |message: String| refused(RefusalCode::Busy, message);
        let fd = channel.fd().ok_or_else(|| unable("the channel belongs to this process only".to_owned()))?;
        let sent = connection.send(&FromLayers::ChannelReady(ready), &[fd]);
        failpoint::pass("layer.channel_made");
        sent.map_err(|error| unable(format!("cannot send the channel: {error}")))
    })
}

fn fetched(fetch: &Fetch, blobs: &dyn Blobs) -> FromLayers {
    let Fetch { blob, offset, bytes } = *fetch;
    match blobs.read(blob, offset, bytes.min(MAX_FETCH_BYTES)) {
        Ok(bytes) => FromLayers::Fetched(Fetched { blob, offset, bytes }),
        Err(refused) => FromLayers::Refused(refused),
    }
}

fn malformed(message: &str) -> FromLayers {
    FromLayers::Refused(refused(RefusalCode::Malformed, message.to_owned()))
}

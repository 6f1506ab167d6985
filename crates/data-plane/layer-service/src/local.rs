//! The door for clients of this host: a socket of control messages, and a channel of shared memory for each of them.
//!
//! One connection is one session. Nobody can hold the door up: no call here waits, each caller has its bounded turn, and
//! who does not take its answers is hung up on. A client that dies takes its session with it.

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

/// How often sessions are looked at, at least.
const LOOK: Duration = Duration::from_millis(100);

/// Messages of one client that are heard before the others have their turn.
const MAX_MESSAGES: usize = 64;

/// How long a caller may take to open a session, and a client to take an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Callers without a session; more are hung up on.
const MAX_CALLERS: usize = 32;

/// After this the process has no descriptors to spare; others may give some back.
const NO_DESCRIPTORS: Duration = Duration::from_millis(50);

/// What the door asks.
#[derive(Debug, Clone)]
pub struct LocalParts {
    /// For sessions.
    pub registry: Registry,
    /// Who may come in.
    pub authenticator: Arc<Authenticator>,
    /// For the catalog and the model's files.
    pub blobs: Arc<dyn Blobs>,
}

/// The open door. Dropped, it is closed, and the socket's file is gone.
#[derive(Debug)]
pub struct LocalServer {
    is_closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl LocalServer {
    /// Opens a door at `socket`, in a directory that only this user may enter.
    ///
    /// # Errors
    /// If the socket cannot be bound or the thread not be started.
    pub fn open(socket: &Path, parts: LocalParts) -> anyhow::Result<Self> {
        let bound = LayersListener::bind(socket);
        let listener =
            bound.with_context(|| format!("split clients cannot be taken in at {}", socket.display()))?;
        let is_closed = Arc::new(AtomicBool::new(false));
        let door = LocalListener { listener, parts, is_closed: Arc::clone(&is_closed), callers: Vec::new() };
        let spawned = std::thread::Builder::new().name("layers".to_owned()).spawn(move || door.run());
        let thread = Some(spawned.context("cannot start the thread of the layers' socket")?);
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

/// A connection.
struct LocalCaller {
    connection: LayersEnd,
    pid: u32,
    session: Option<RegisteredSession>,
    principal: Option<Principal>,
    /// An answer it has not taken.
    owed: Option<FromLayers>,
    /// Since when it does not do what it should.
    owes_since: Option<Instant>,
    knows_of_end: bool,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
enum LocalDisconnect {
    #[error("it is done")]
    Done,
    #[error("it is gone: {0}")]
    Gone(String),
    #[error("it was refused: {0}")]
    Refused(String),
    #[error("its session was closed: it broke the protocol, or another connection has taken it over")]
    Closed,
    #[error("its key was taken out of the key file")]
    Barred,
    #[error("it took or said nothing for {} s", PATIENCE.as_secs())]
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
                    tracing::info!(pid = caller.pid, reason = %leave, "a client of the layer service has left");
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
                    tracing::warn!(%error, "a client of the layer service was not taken in");
                    std::thread::sleep(NO_DESCRIPTORS);
                    return;
                }
            }
        }
    }

    /// Sleeps until somebody says something or takes what it is owed, or it is time to look again.
    fn wait(&self) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        fds.extend(self.callers.iter().map(|caller| {
            // Nobody is heard before it has taken the answer to what it said.
            let flags = if caller.owed.is_some() { PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(caller.connection.as_fd(), flags)
        }));
        let timeout = Timespec::try_from(LOOK).ok();
        // Interrupted or not: the next round looks at everything.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

impl LocalCaller {
    fn new(connection: LayersEnd, pid: u32) -> Self {
        let owes_since = Some(Instant::now());
        Self { connection, pid, session: None, principal: None, owed: None, owes_since, knows_of_end: false }
    }

    /// Hears what it says and answers, as far as it takes that.
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
                // To make its memory takes as long as many other messages.
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
                let (opened, facts) = (session.opened().clone(), session.facts());
                let (tenant, name, masking) = (&facts.tenant, &facts.name, &facts.masking);
                tracing::info!(pid = self.pid, session = opened.session, %tenant, name, masking, "a client has opened a session");
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

/// Makes a channel and gives the client its end.
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
        let fd = channel.fd().ok_or_else(|| unable("the channel is of this process alone".to_owned()))?;
        let sent = connection.send(&FromLayers::ChannelReady(ready), &[fd]);
        failpoint::pass("layer.channel_made");
        sent.map_err(|error| unable(format!("the channel could not be handed over: {error}")))
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

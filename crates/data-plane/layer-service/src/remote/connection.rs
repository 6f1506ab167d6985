//! A session over ZeroMQ: calls go to the dispatcher, answers come back, until one side ends the session.

use std::{io, sync::Arc, time::Duration};

use kv_cache::ledger::MemoryReservation;
use shmproto::{
    codec::Wire as _,
    layer::{
        CONTROL, CallHeader, HEADER_BYTES, HeaderError,
        control::{Fetch, Fetched, FromLayers, RefusalCode, SessionRefused, ToLayers},
    },
    zmtp::{ZmtpError, ZmtpEvent},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use super::{
    RemoteSettings, RemoteShared,
    link::{IoProgress, Reading, ZmtpLink},
};
use crate::{
    auth::{Principal, REFUSED},
    event_queue::{Payload, Reply},
    registry::{RegisteredSession, refused},
};

pub(super) const MAX_CONTROL_BYTES: usize = 4 << 10;

/// Changes that a connection must handle besides messages of its client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ConnectionUpdate {
    /// Number of changes of the key file.
    pub(super) keys: u64,
    pub(super) is_draining: bool,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionEnd {
    #[error("the client closed it")]
    Closed,
    #[error("the executor closed it, or another connection took it over")]
    LetGo,
    #[error("its key was removed from the key file")]
    Revoked,
    #[error("the client sent nothing for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the client read no answers for {} s", .0.as_secs())]
    Stuck(Duration),
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("the client broke ZMTP: {0}")]
    Zmtp(#[from] ZmtpError),
    #[error("the client sent an invalid call: {0}")]
    Header(#[from] HeaderError),
    #[error("the client sent a message that is neither call nor control message")]
    Nonsense,
}

impl SessionEnd {
    /// Whether the client broke the protocol.
    pub(super) fn is_violation(&self) -> bool {
        matches!(self, Self::Zmtp(_) | Self::Header(_) | Self::Nonsense)
    }
}

#[derive(Debug)]
pub(super) struct AdmittedClient {
    pub(super) session: RegisteredSession,
    pub(super) principal: Principal,
    pub(super) replies: mpsc::Receiver<Reply>,
}

#[derive(Debug)]
pub(super) struct Connection<S> {
    link: ZmtpLink<S>,
    client: AdmittedClient,
    shared: Arc<RemoteShared>,
    news: watch::Receiver<ConnectionUpdate>,
    /// Rows of a call whose message is incomplete.
    coming: IncomingRows,
    /// Read of a blob in progress; the client's next messages wait for it.
    fetch: Option<JoinHandle<FromLayers>>,
    /// Number of heartbeats since the last received byte.
    pings: u32,
    is_told_of_draining: bool,
}

/// State of rows that are being received.
#[derive(Debug)]
enum IncomingRows {
    /// No header has arrived yet.
    Nothing,
    /// The rows are reserved in the tenant's quota.
    Charge(MemoryReservation),
    /// The quota is used up: the call was refused, and its rows are dropped.
    Refused,
}

enum WaitOutcome {
    Reply(Option<Reply>),
    Moved(IoProgress),
    Fetched(FromLayers),
    News,
    Late,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    pub(super) fn new(link: ZmtpLink<S>, client: AdmittedClient, shared: Arc<RemoteShared>) -> Self {
        let mut news = shared.news.subscribe();
        news.mark_changed();
        let coming = IncomingRows::Nothing;
        Self { link, client, shared, news, coming, fetch: None, pings: 0, is_told_of_draining: false }
    }

    /// Serves until the session ends, and returns the reason.
    pub(super) async fn serve(mut self) -> SessionEnd {
        let ending = loop {
            match self.step().await {
                Ok(()) => {}
                Err(ending) => break ending,
            }
        };
        let Self { link, client, .. } = self;
        // The session's resources are freed before the last message is sent.
        drop(client);
        let revoked = matches!(ending, SessionEnd::Revoked)
            .then(|| FromLayers::Refused(refused(RefusalCode::Unauthenticated, REFUSED.to_owned())));
        link.farewell(revoked.as_ref()).await;
        ending
    }

    async fn step(&mut self) -> Result<(), SessionEnd> {
        while self.fetch.is_none()
            && self.link.outbox.has_room()
            && let Some(event) = self.link.next_event()?
        {
            self.react(event)?;
        }
        self.make_room()?;
        match self.wait().await? {
            WaitOutcome::Reply(None) => return Err(SessionEnd::LetGo),
            WaitOutcome::Reply(Some(reply)) => self.answer(reply),
            WaitOutcome::Moved(IoProgress::In) => self.pings = 0,
            WaitOutcome::Moved(IoProgress::Out) => {}
            WaitOutcome::Moved(IoProgress::End) => return Err(SessionEnd::Closed),
            WaitOutcome::Fetched(answer) => {
                self.fetch = None;
                self.link.outbox.put_control(&answer);
            }
            WaitOutcome::News => self.hear_news()?,
            WaitOutcome::Late => self.check_liveness()?,
        }
        Ok(())
    }

    async fn wait(&mut self) -> Result<WaitOutcome, SessionEnd> {
        let (look_at, reading) = (self.next_look(), self.reading());
        let Self { link, client, news, fetch, .. } = self;
        let has_room = link.outbox.has_room();
        tokio::select! {
            biased;
            changed = news.changed() => match changed {
                Ok(()) => Ok(WaitOutcome::News),
                // The server has been dropped.
                Err(_) => Err(SessionEnd::LetGo),
            },
            reply = client.replies.recv(), if has_room => Ok(WaitOutcome::Reply(reply)),
            answer = ended(fetch) => Ok(WaitOutcome::Fetched(answer)),
            moved = link.moved(reading) => Ok(WaitOutcome::Moved(moved?)),
            () = sleep_until(look_at) => Ok(WaitOutcome::Late),
        }
    }

    /// Queues all available answers, so that they are written together.
    fn answer(&mut self, first: Reply) {
        self.link.outbox.put_reply(first);
        while self.link.outbox.has_room()
            && let Ok(reply) = self.client.replies.try_recv()
        {
            self.link.outbox.put_reply(reply);
        }
    }

    fn react(&mut self, event: ZmtpEvent) -> Result<(), SessionEnd> {
        let ZmtpEvent::Message(frames) = event else { return Ok(()) };
        let [first, second] = <[Vec<u8>; 2]>::try_from(frames).map_err(|_| SessionEnd::Nonsense)?;
        if first == CONTROL {
            let message = ToLayers::from_bytes(&second).map_err(|_| SessionEnd::Nonsense)?;
            return self.control(message);
        }
        self.call(call_header(&first)?, second);
        Ok(())
    }

    /// Reserves memory for a call's rows before they arrive; without quota the call is refused.
    fn make_room(&mut self) -> Result<(), SessionEnd> {
        let (IncomingRows::Nothing, Some((frames, bytes))) = (&self.coming, self.link.zmtp().under_way())
        else {
            return Ok(());
        };
        let header = match frames {
            [] if bytes <= HEADER_BYTES => return Ok(()),
            [first] if *first == CONTROL && bytes <= MAX_CONTROL_BYTES => return Ok(()),
            [first] => call_header(first)?,
            _ => return Err(SessionEnd::Nonsense),
        };
        self.coming = match self.client.session.reserve(&header, bytes as u64) {
            Ok(held) => IncomingRows::Charge(held),
            Err(refusal) => {
                self.link.outbox.put_refusal(&refusal);
                self.link.zmtp().skip();
                IncomingRows::Refused
            }
        };
        Ok(())
    }

    fn call(&mut self, header: CallHeader, bytes: Vec<u8>) {
        let session = &self.client.session;
        let held = match std::mem::replace(&mut self.coming, IncomingRows::Nothing) {
            IncomingRows::Refused => return,
            IncomingRows::Charge(held) => Ok(held),
            // The whole message arrived at once.
            IncomingRows::Nothing => session.reserve(&header, bytes.len() as u64),
        };
        let taken = held.and_then(|held| session.call(header, Payload { bytes, held }));
        if let Err(refusal) = taken {
            self.link.outbox.put_refusal(&refusal);
        }
    }

    fn control(&mut self, message: ToLayers) -> Result<(), SessionEnd> {
        let answer = match message {
            ToLayers::Close => return Err(SessionEnd::Closed),
            ToLayers::Fetch(asked) => {
                self.fetch = Some(self.shared.fetch(&asked));
                return Ok(());
            }
            ToLayers::GetStats => FromLayers::Stats(self.client.session.stats()),
            ToLayers::Open(_) => malformed("the session is already open: use it, or close it first"),
            ToLayers::Channel(_) => malformed(
                "channels are only for clients on the same host: connect to the socket layers.sock, or \
                 send rows in messages",
            ),
        };
        self.link.outbox.put_control(&answer);
        Ok(())
    }

    fn hear_news(&mut self) -> Result<(), SessionEnd> {
        let ConnectionUpdate { is_draining, .. } = *self.news.borrow_and_update();
        if !self.shared.authenticator.still_admits(&self.client.principal) {
            return Err(SessionEnd::Revoked);
        }
        if is_draining && !self.is_told_of_draining {
            self.is_told_of_draining = true;
            self.link.outbox.put_control(&FromLayers::Draining);
        }
        Ok(())
    }

    fn reading(&self) -> Reading {
        if self.link.outbox.has_room() && self.fetch.is_none() { Reading::On } else { Reading::Paused }
    }

    /// Returns when the client's liveness must be checked if nothing happens.
    fn next_look(&self) -> Instant {
        let RemoteSettings { ping_every, silence, stuck, .. } = self.shared.settings;
        let quiet = match self.reading() {
            Reading::On => self.link.heard_at() + silence.min(ping_every * (self.pings + 1)),
            // A client that is not read from does not count as silent.
            Reading::Paused => Instant::now() + silence,
        };
        self.link.stuck_since().map_or(quiet, |since| quiet.min(since + stuck))
    }

    /// Sends a heartbeat to a silent client, and disconnects one that stays silent.
    fn check_liveness(&mut self) -> Result<(), SessionEnd> {
        let RemoteSettings { ping_every, silence, stuck, .. } = self.shared.settings;
        let now = Instant::now();
        if self.link.stuck_since().is_some_and(|since| now >= since + stuck) {
            return Err(SessionEnd::Stuck(stuck));
        }
        if self.reading() == Reading::Paused {
            return Ok(());
        }
        if now >= self.link.heard_at() + silence {
            return Err(SessionEnd::Silent(silence));
        }
        if now >= self.link.heard_at() + ping_every * (self.pings + 1) {
            self.pings += 1;
            self.link.zmtp().ping(silence);
        }
        Ok(())
    }
}

impl RemoteShared {
    /// Reads part of a blob on a thread that may wait for the disk.
    fn fetch(&self, asked: &Fetch) -> JoinHandle<FromLayers> {
        let Fetch { blob, offset, bytes } = *asked;
        let blobs = Arc::clone(&self.blobs);
        tokio::task::spawn_blocking(move || match blobs.read(blob, offset, bytes) {
            Ok(bytes) => FromLayers::Fetched(Fetched { blob, offset, bytes }),
            Err(refused) => FromLayers::Refused(refused),
        })
    }
}

fn call_header(frame: &[u8]) -> Result<CallHeader, SessionEnd> {
    let header = <&[u8; HEADER_BYTES]>::try_from(frame).map_err(|_| SessionEnd::Nonsense)?;
    Ok(CallHeader::from_bytes(header)?)
}

/// Waits for a fetch; forever if there is none.
async fn ended(fetch: &mut Option<JoinHandle<FromLayers>>) -> FromLayers {
    match fetch {
        None => std::future::pending().await,
        Some(fetch) => fetch.await.unwrap_or_else(|error| {
            tracing::error!(%error, "reading a file for a split client failed");
            let message = "the executor failed to read: try again".to_owned();
            FromLayers::Refused(SessionRefused {
                code: RefusalCode::NoSuchBlob,
                message,
                retry_after_ms: 1000,
            })
        }),
    }
}

fn malformed(message: &str) -> FromLayers {
    FromLayers::Refused(refused(RefusalCode::Malformed, message.to_owned()))
}

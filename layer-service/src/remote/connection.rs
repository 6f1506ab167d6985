//! A session over ZeroMQ: calls go to the hub, answers come back, until one side has had enough.

use std::{io, sync::Arc, time::Duration};

use cache::ledger::Charge;
use shmproto::{
    codec::Wire as _,
    layer::{
        CONTROL, CallHeader, HEADER_BYTES, HeaderError,
        control::{Fetch, Fetched, FromLayers, RefusalCode, Refused, ToLayers},
    },
    zmtp::{Event, ZmtpError},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use super::{
    Settings, Shared,
    link::{Link, Moved, Reading},
};
use crate::{
    auth::{Principal, REFUSED},
    inbox::{Payload, Reply},
    registry::{Session, refused},
};

/// Longest control message of a client.
pub(super) const MAX_CONTROL_BYTES: usize = 4 << 10;

/// What a connection may have to know that is no message of its client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Counts changes of the key file.
    pub(super) keys: u64,
    /// The executor is about to end.
    pub(super) is_draining: bool,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ending {
    #[error("the client closed it")]
    Closed,
    #[error("the hub let it go, or another connection took it over")]
    LetGo,
    #[error("its key was taken out of the key file")]
    Revoked,
    #[error("nothing was heard of the client for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the client took no answers for {} s", .0.as_secs())]
    Stuck(Duration),
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("the client broke ZMTP: {0}")]
    Zmtp(#[from] ZmtpError),
    #[error("the client sent a call that is none: {0}")]
    Header(#[from] HeaderError),
    #[error("the client sent a message that is neither call nor control message")]
    Nonsense,
}

impl Ending {
    /// Whether the client did what no client of ours does.
    pub(super) fn is_violation(&self) -> bool {
        matches!(self, Self::Zmtp(_) | Self::Header(_) | Self::Nonsense)
    }
}

/// A client that has been let in.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) session: Session,
    pub(super) principal: Principal,
    pub(super) replies: mpsc::Receiver<Reply>,
}

/// One connection of a client.
#[derive(Debug)]
pub(super) struct Connection<S> {
    link: Link<S>,
    client: Client,
    shared: Arc<Shared>,
    news: watch::Receiver<News>,
    /// The rows of a call that has not come wholly.
    coming: Coming,
    /// Part of a blob that is being read; the client's next messages wait for it.
    fetch: Option<JoinHandle<FromLayers>>,
    /// PINGs since something was heard.
    pings: u32,
    is_told_of_draining: bool,
}

/// Rows that are under way.
#[derive(Debug)]
enum Coming {
    /// None whose call is known.
    Nothing,
    /// There is room for them in the tenant's quota.
    Charge(Charge),
    /// There is none: the call was answered, and they are not kept.
    Refused,
}

/// What [`Connection::wait`] has waited for.
enum Waited {
    Reply(Option<Reply>),
    Moved(Moved),
    Fetched(FromLayers),
    News,
    Late,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    pub(super) fn new(link: Link<S>, client: Client, shared: Arc<Shared>) -> Self {
        let mut news = shared.news.subscribe();
        news.mark_changed();
        let coming = Coming::Nothing;
        Self { link, client, shared, news, coming, fetch: None, pings: 0, is_told_of_draining: false }
    }

    /// Serves until the session ends, and says why.
    pub(super) async fn serve(mut self) -> Ending {
        let ending = loop {
            match self.step().await {
                Ok(()) => {}
                Err(ending) => break ending,
            }
        };
        let Self { link, client, .. } = self;
        // What the session held is free before the last word is said.
        drop(client);
        let revoked = matches!(ending, Ending::Revoked)
            .then(|| FromLayers::Refused(refused(RefusalCode::Unauthenticated, REFUSED.to_owned())));
        link.farewell(revoked.as_ref()).await;
        ending
    }

    async fn step(&mut self) -> Result<(), Ending> {
        while self.fetch.is_none()
            && self.link.outbox.has_room()
            && let Some(event) = self.link.next_event()?
        {
            self.react(event)?;
        }
        self.make_room()?;
        match self.wait().await? {
            Waited::Reply(None) => return Err(Ending::LetGo),
            Waited::Reply(Some(reply)) => self.answer(reply),
            Waited::Moved(Moved::In) => self.pings = 0,
            Waited::Moved(Moved::Out) => {}
            Waited::Moved(Moved::End) => return Err(Ending::Closed),
            Waited::Fetched(answer) => {
                self.fetch = None;
                self.link.outbox.put_control(&answer);
            }
            Waited::News => self.hear_news()?,
            Waited::Late => self.look()?,
        }
        Ok(())
    }

    async fn wait(&mut self) -> Result<Waited, Ending> {
        let (look_at, reading) = (self.next_look(), self.reading());
        let Self { link, client, news, fetch, .. } = self;
        let has_room = link.outbox.has_room();
        tokio::select! {
            biased;
            changed = news.changed() => match changed {
                Ok(()) => Ok(Waited::News),
                // The door has closed.
                Err(_) => Err(Ending::LetGo),
            },
            reply = client.replies.recv(), if has_room => Ok(Waited::Reply(reply)),
            answer = ended(fetch) => Ok(Waited::Fetched(answer)),
            moved = link.moved(reading) => Ok(Waited::Moved(moved?)),
            () = sleep_until(look_at) => Ok(Waited::Late),
        }
    }

    /// Answers that are there together are written together.
    fn answer(&mut self, first: Reply) {
        self.link.outbox.put_reply(first);
        while self.link.outbox.has_room()
            && let Ok(reply) = self.client.replies.try_recv()
        {
            self.link.outbox.put_reply(reply);
        }
    }

    fn react(&mut self, event: Event) -> Result<(), Ending> {
        let Event::Message(frames) = event else { return Ok(()) };
        let [first, second] = <[Vec<u8>; 2]>::try_from(frames).map_err(|_| Ending::Nonsense)?;
        if first == CONTROL {
            let message = ToLayers::from_bytes(&second).map_err(|_| Ending::Nonsense)?;
            return self.control(message);
        }
        self.call(call_header(&first)?, second);
        Ok(())
    }

    /// Counts the rows of a call before they are there. What there is no room for is refused and not kept.
    fn make_room(&mut self) -> Result<(), Ending> {
        let (Coming::Nothing, Some((frames, bytes))) = (&self.coming, self.link.zmtp().under_way()) else {
            return Ok(());
        };
        let header = match frames {
            [] if bytes <= HEADER_BYTES => return Ok(()),
            [first] if *first == CONTROL && bytes <= MAX_CONTROL_BYTES => return Ok(()),
            [first] => call_header(first)?,
            _ => return Err(Ending::Nonsense),
        };
        self.coming = match self.client.session.hold(&header, bytes as u64) {
            Ok(held) => Coming::Charge(held),
            Err(refusal) => {
                self.link.outbox.put_refusal(&refusal);
                self.link.zmtp().skip();
                Coming::Refused
            }
        };
        Ok(())
    }

    fn call(&mut self, header: CallHeader, bytes: Vec<u8>) {
        let session = &self.client.session;
        let held = match std::mem::replace(&mut self.coming, Coming::Nothing) {
            Coming::Refused => return,
            Coming::Charge(held) => Ok(held),
            // It came at once.
            Coming::Nothing => session.hold(&header, bytes.len() as u64),
        };
        let taken = held.and_then(|held| session.call(header, Payload { bytes, held }));
        if let Err(refusal) = taken {
            self.link.outbox.put_refusal(&refusal);
        }
    }

    fn control(&mut self, message: ToLayers) -> Result<(), Ending> {
        let answer = match message {
            ToLayers::Close => return Err(Ending::Closed),
            ToLayers::Fetch(asked) => {
                self.fetch = Some(self.shared.fetch(&asked));
                return Ok(());
            }
            ToLayers::GetStats => FromLayers::Stats(self.client.session.stats()),
            ToLayers::Open(_) => malformed("the session is open already: use it, or close it first"),
            ToLayers::Channel(_) => malformed(
                "channels are for clients of the same host: connect to the socket layers.sock, or send rows in messages",
            ),
        };
        self.link.outbox.put_control(&answer);
        Ok(())
    }

    fn hear_news(&mut self) -> Result<(), Ending> {
        let News { is_draining, .. } = *self.news.borrow_and_update();
        if !self.shared.authenticator.still_admits(&self.client.principal) {
            return Err(Ending::Revoked);
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

    /// When the client is to be looked after if nothing happens.
    fn next_look(&self) -> Instant {
        let Settings { ping_every, silence, stuck, .. } = self.shared.settings;
        let quiet = match self.reading() {
            Reading::On => self.link.heard_at() + silence.min(ping_every * (self.pings + 1)),
            // Who is not listened to is not silent.
            Reading::Paused => Instant::now() + silence,
        };
        self.link.stuck_since().map_or(quiet, |since| quiet.min(since + stuck))
    }

    /// Asks a silent client whether it is there, and gives up one that is not.
    fn look(&mut self) -> Result<(), Ending> {
        let Settings { ping_every, silence, stuck, .. } = self.shared.settings;
        let now = Instant::now();
        if self.link.stuck_since().is_some_and(|since| now >= since + stuck) {
            return Err(Ending::Stuck(stuck));
        }
        if self.reading() == Reading::Paused {
            return Ok(());
        }
        if now >= self.link.heard_at() + silence {
            return Err(Ending::Silent(silence));
        }
        if now >= self.link.heard_at() + ping_every * (self.pings + 1) {
            self.pings += 1;
            self.link.zmtp().ping(silence);
        }
        Ok(())
    }
}

impl Shared {
    /// Reads part of a blob where a disk may be waited for.
    fn fetch(&self, asked: &Fetch) -> JoinHandle<FromLayers> {
        let Fetch { blob, offset, bytes } = *asked;
        let blobs = Arc::clone(&self.blobs);
        tokio::task::spawn_blocking(move || match blobs.read(blob, offset, bytes) {
            Ok(bytes) => FromLayers::Fetched(Fetched { blob, offset, bytes }),
            Err(refused) => FromLayers::Refused(refused),
        })
    }
}

fn call_header(frame: &[u8]) -> Result<CallHeader, Ending> {
    let header = <&[u8; HEADER_BYTES]>::try_from(frame).map_err(|_| Ending::Nonsense)?;
    Ok(CallHeader::from_bytes(header)?)
}

/// Waits for a fetch; for ever if there is none.
async fn ended(fetch: &mut Option<JoinHandle<FromLayers>>) -> FromLayers {
    match fetch {
        None => std::future::pending().await,
        Some(fetch) => fetch.await.unwrap_or_else(|error| {
            tracing::error!(%error, "reading for a layer client failed");
            let message = "the executor failed to read: try again".to_owned();
            FromLayers::Refused(Refused { code: RefusalCode::NoSuchBlob, message, retry_after_ms: 1000 })
        }),
    }
}

fn malformed(message: &str) -> FromLayers {
    FromLayers::Refused(refused(RefusalCode::Malformed, message.to_owned()))
}

//! Handshake of a connection: authentication and opening of a session.
//!
//! A client authenticates with a certificate, with ZMTP's PLAIN (user `key`, the API key as password), or
//! with the key in its [`SessionOpen`](shmproto::layer::control::SessionOpen). A refusal is always the answer
//! to that message: libzmq cannot report why a login was rejected, and the kind of refusal reveals nothing.
//! Without a key file, a client is the tenant `public`, or the one that its certificate names.

use std::{io, sync::Arc};

use shmproto::{
    codec::Wire as _,
    layer::{
        CONTROL,
        control::{FromLayers, RefusalCode, SessionOpen, SessionRefused, ToLayers},
    },
    zmtp::{Login, ZmtpError, ZmtpEvent, ZmtpLimits},
};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{
    RemoteShared,
    connection::{AdmittedClient, MAX_CONTROL_BYTES},
    link::{IoProgress, Reading, ZmtpLink},
};
use crate::{
    SessionTransport,
    auth::{Principal, REFUSED},
    event_queue::Replies,
    registry::{MAX_CALLS, refused},
};

/// ZMTP user name of a login with a key.
const KEY_USER: &str = "key";
/// Maximum length of a frame before a session is open.
const MAX_OPEN_BYTES: usize = 4 << 10;

#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("it took longer than {} s", .0.as_secs())]
    Late(std::time::Duration),
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("the client broke ZMTP: {0}")]
    Zmtp(#[from] ZmtpError),
    #[error("the client disconnected before it opened a session")]
    Left,
    #[error("its first message does not open a session")]
    NotOpen,
    #[error(
        "its certificate has no tenant: the subject's common name must be 1 to 64 letters, digits, '_', \
         '.' and '-'"
    )]
    Certificate,
    #[error("it has no valid key or certificate")]
    Unauthenticated,
    #[error("its session was refused: {0}")]
    Refused(String),
}

/// Transport and certificate of a new connection.
#[derive(Debug, Clone)]
pub(super) struct ArrivedClient {
    pub(super) transport: SessionTransport,
    pub(super) certified: Option<Principal>,
}

impl RemoteShared {
    /// Authenticates a client, by certificate or key; a key beside a certificate must be the same tenant's.
    fn admit(&self, arrival: &ArrivedClient, key: Option<&str>) -> Option<Principal> {
        let by_key = || self.authenticator.by_key(key.unwrap_or_default().as_bytes());
        match &arrival.certified {
            None => by_key(),
            Some(certified) if key.is_none() || !self.authenticator.asks_for_keys() => {
                Some(certified.clone())
            }
            Some(certified) => by_key().filter(|principal| principal.tenant == certified.tenant),
        }
    }
}

/// Authenticates the peer and opens its session.
pub(super) async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    arrival: &ArrivedClient,
    shared: &Arc<RemoteShared>,
) -> Result<(ZmtpLink<S>, AdmittedClient), HandshakeError> {
    let mut link = ZmtpLink::new(stream, ZmtpLimits::new(MAX_OPEN_BYTES));
    let mut logged_in = None;
    let open = loop {
        match link.next_event()? {
            None if link.moved(Reading::On).await? == IoProgress::End => return Err(HandshakeError::Left),
            None => {}
            Some(ZmtpEvent::Login(login)) => {
                logged_in = Some(log_in(&login, arrival, shared));
                link.zmtp().accept();
            }
            Some(ZmtpEvent::Message(frames)) => break first_message(&frames)?,
            Some(_) => {}
        }
    };
    let key = (!open.key.is_empty()).then_some(open.key.as_str());
    let principal = logged_in.unwrap_or_else(|| shared.admit(arrival, key));
    let Some(principal) = principal else {
        shared.registry.count_refusal();
        return decline(link, refused(RefusalCode::Unauthenticated, REFUSED.to_owned())).await;
    };
    let (replies, queue) = Replies::queue(2 * MAX_CALLS as usize);
    match shared.registry.open(&principal.tenant, &open, arrival.transport, Some(replies)) {
        Err(refusal) => decline(link, refusal).await,
        Ok(session) => {
            link.outbox.put_control(&FromLayers::Opened(session.opened().clone()));
            link.zmtp().set_limits(ZmtpLimits::new(shared.max_frame_bytes.max(MAX_CONTROL_BYTES)));
            Ok((link, AdmittedClient { session, principal, replies: queue }))
        }
    }
}

/// Checks the login; the work is the same for every defect, to reveal nothing by its duration.
fn log_in(login: &Login, arrival: &ArrivedClient, shared: &RemoteShared) -> Option<Principal> {
    shared.admit(arrival, Some(&login.password)).filter(|_| login.username == KEY_USER)
}

fn first_message(frames: &[Vec<u8>]) -> Result<SessionOpen, HandshakeError> {
    let [first, second] = frames else { return Err(HandshakeError::NotOpen) };
    match ToLayers::from_bytes(second) {
        Ok(ToLayers::Open(open)) if *first == CONTROL => Ok(open),
        _ => Err(HandshakeError::NotOpen),
    }
}

async fn decline<S: AsyncRead + AsyncWrite + Unpin, T>(
    link: ZmtpLink<S>,
    refusal: SessionRefused,
) -> Result<T, HandshakeError> {
    let (code, message) = (refusal.code, refusal.message.clone());
    link.farewell(Some(&FromLayers::Refused(refusal))).await;
    match code {
        RefusalCode::Unauthenticated => Err(HandshakeError::Unauthenticated),
        _ => Err(HandshakeError::Refused(message)),
    }
}

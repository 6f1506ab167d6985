//! The executor's end: a ROUTER that serves DEALERs.

use std::time::Duration;

use super::command::{ZmtpCommand, put_command, put_properties};
use super::greeting::{PeerRole, mechanism, put_rest};
use super::link::{ZmtpConnection, link_methods};
use super::{Mechanism, ZmtpError, ZmtpEvent, ZmtpLimits};

/// Maximum size of a rejection's reason in bytes.
const MAX_REASON_BYTES: usize = 255;

/// Security mechanisms that a server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptedMechanisms {
    /// NULL only: the transport authenticates the client.
    Null,
    /// PLAIN only: the client must log in.
    Plain,
    /// The mechanism that the client requests.
    Either,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerStage {
    Greeting,
    /// PLAIN: waits for the credentials.
    Hello,
    /// PLAIN: waits for the caller's decision about the login.
    Judged,
    /// PLAIN: waits for the peer's socket type.
    Initiate,
    /// NULL: waits for the peer's socket type.
    Properties,
    Ready,
    Rejected,
}

/// Server's end of one connection.
#[derive(Debug)]
pub struct ZmtpServer {
    link: ZmtpConnection,
    accepts: AcceptedMechanisms,
    stage: ServerStage,
    mechanism: Option<Mechanism>,
}

impl AcceptedMechanisms {
    fn takes(self, mechanism: Mechanism) -> bool {
        match self {
            Self::Null => mechanism == Mechanism::Null,
            Self::Plain => mechanism == Mechanism::Plain,
            Self::Either => true,
        }
    }
}

impl ZmtpServer {
    link_methods!();

    /// Creates the state of a connection that was just accepted.
    #[must_use]
    pub fn new(limits: ZmtpLimits, accepts: AcceptedMechanisms) -> Self {
        Self { link: ZmtpConnection::new(limits), accepts, stage: ServerStage::Greeting, mechanism: None }
    }

    /// Sets limits that apply from the next frame on, for when the client is known.
    pub fn set_limits(&mut self, limits: ZmtpLimits) {
        self.link.limits = limits;
    }

    /// Returns the accepted mechanism that the client requested, once it is known.
    #[must_use]
    pub fn mechanism(&self) -> Option<Mechanism> {
        self.mechanism
    }

    /// Returns the earlier frames of an incomplete message, and the length in bytes of its current frame. The
    /// caller asks after [`Self::next_event`] returned no event, to reserve memory before the bytes come.
    #[must_use]
    pub fn under_way(&self) -> Option<(&[Vec<u8>], usize)> {
        self.link.under_way()
    }

    /// Drops the content of the current frame: its message will contain an empty frame instead.
    pub fn skip(&mut self) {
        self.link.skip();
    }

    /// Returns the next event; the caller repeats the call until there is none.
    ///
    /// # Errors
    /// Returns the client's violation of the protocol, and again at every later call.
    pub fn next_event(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
        self.link.check()?;
        let step = self.step();
        self.link.fail(step)
    }

    /// Accepts the client of the last [`ZmtpEvent::Login`].
    pub fn accept(&mut self) {
        if self.stage == ServerStage::Judged {
            put_command(self.link.output(), "WELCOME", &[]);
            self.stage = ServerStage::Initiate;
        }
    }

    /// Rejects the client. The reason, cut to 255 bytes, must be sent before the connection is closed. libzmq
    /// takes the reasons `300`, `400` and `500` as a refusal, and others as a fault.
    pub fn reject(&mut self, reason: &str) {
        if self.stage == ServerStage::Judged {
            let reason = &reason[..reason.floor_char_boundary(MAX_REASON_BYTES)];
            let length = u8::try_from(reason.len()).unwrap_or(u8::MAX);
            put_command(self.link.output(), "ERROR", &[&[length], reason.as_bytes()]);
            self.stage = ServerStage::Rejected;
        }
    }

    fn step(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
        loop {
            match self.stage {
                ServerStage::Greeting => match self.link.greeting()? {
                    None => return Ok(None),
                    Some(greeting) => self.greet(mechanism(&greeting)?)?,
                },
                ServerStage::Hello => match self.link.handshake()? {
                    None => return Ok(None),
                    Some(ZmtpCommand::Hello(login)) => {
                        self.stage = ServerStage::Judged;
                        return Ok(Some(ZmtpEvent::Login(login)));
                    }
                    Some(other) => return Err(other.unexpected()),
                },
                ServerStage::Judged => return Ok(None),
                ServerStage::Initiate | ServerStage::Properties => match (self.stage, self.link.handshake()?)
                {
                    (_, None) => return Ok(None),
                    (ServerStage::Initiate, Some(ZmtpCommand::Initiate(kind))) => {
                        put_properties(self.link.output(), "READY", "ROUTER");
                        return self.ready(Mechanism::Plain, kind);
                    }
                    (ServerStage::Properties, Some(ZmtpCommand::Ready(kind))) => {
                        return self.ready(Mechanism::Null, kind);
                    }
                    (_, Some(other)) => return Err(other.unexpected()),
                },
                ServerStage::Ready => return self.link.traffic(),
                ServerStage::Rejected => return Err(ZmtpError::Rejected),
            }
        }
    }

    /// Answers a greeting with the mechanism that the client requests.
    fn greet(&mut self, mechanism: Mechanism) -> Result<(), ZmtpError> {
        if !self.accepts.takes(mechanism) {
            return Err(ZmtpError::Mechanism(format!("{mechanism:?}").to_uppercase()));
        }
        put_rest(self.link.output(), mechanism, PeerRole::Server);
        self.mechanism = Some(mechanism);
        self.stage = match mechanism {
            Mechanism::Plain => ServerStage::Hello,
            Mechanism::Null => {
                put_properties(self.link.output(), "READY", "ROUTER");
                ServerStage::Properties
            }
        };
        Ok(())
    }

    fn ready(&mut self, mechanism: Mechanism, kind: String) -> Result<Option<ZmtpEvent>, ZmtpError> {
        if kind != "DEALER" {
            return Err(ZmtpError::SocketType(kind));
        }
        self.stage = ServerStage::Ready;
        Ok(Some(ZmtpEvent::Ready(mechanism)))
    }
}

//! The executor's end: a ROUTER that serves DEALERs.

use std::time::Duration;

use super::command::{ZmtpCommand, put_command, put_properties};
use super::greeting::{PeerRole, mechanism, put_rest};
use super::link::{ZmtpConnection, link_methods};
use super::{Mechanism, ZmtpError, ZmtpEvent, ZmtpLimits};

/// Longest reason of a rejection, in bytes.
const MAX_REASON_BYTES: usize = 255;

/// Which mechanisms are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcceptedMechanisms {
    /// The transport says who the client is.
    Null,
    /// The client must log in.
    Plain,
    /// Whichever the client asks for.
    Either,
}

/// How far the handshake is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerStage {
    Greeting,
    /// PLAIN: who is it?
    Hello,
    /// PLAIN: somebody is asked whether this one may come in.
    Judged,
    /// PLAIN: what kind of socket is it?
    Initiate,
    /// NULL: the same.
    Properties,
    Ready,
    Rejected,
}

/// The server's end of one connection.
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

    /// A connection that was just accepted.
    #[must_use]
    pub fn new(limits: ZmtpLimits, accepts: AcceptedMechanisms) -> Self {
        Self { link: ZmtpConnection::new(limits), accepts, stage: ServerStage::Greeting, mechanism: None }
    }

    /// Other limits from the next frame on: once it is known who the client is.
    pub fn set_limits(&mut self, limits: ZmtpLimits) {
        self.link.limits = limits;
    }

    /// The mechanism that the client asked for and that is taken, once that is known.
    #[must_use]
    pub fn mechanism(&self) -> Option<Mechanism> {
        self.mechanism
    }

    /// Of a message that has not come wholly: the frames before, and the bytes of the one that has begun to come. To be
    /// asked after [`Self::next_event`] gave nothing, so that room is found before the bytes are there.
    #[must_use]
    pub fn under_way(&self) -> Option<(&[Vec<u8>], usize)> {
        self.link.under_way()
    }

    /// Keeps nothing of the frame that has begun to come: its message will have an empty one in its place.
    pub fn skip(&mut self) {
        self.link.skip();
    }

    /// What came; to be called until there is nothing.
    ///
    /// # Errors
    ///
    /// What the client did wrong; the same for ever.
    pub fn next_event(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
        self.link.check()?;
        let step = self.step();
        self.link.fail(step)
    }

    /// Lets in the client that [`ZmtpEvent::Login`] told of.
    pub fn accept(&mut self) {
        if self.stage == ServerStage::Judged {
            put_command(self.link.output(), "WELCOME", &[]);
            self.stage = ServerStage::Initiate;
        }
    }

    /// Turns it away. The reason, cut to 255 bytes, is to be sent before the connection is closed. libzmq takes the
    /// reasons `300`, `400` and `500` for a refusal, and others for a fault.
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

    /// Answers a greeting with the mechanism it asks for.
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

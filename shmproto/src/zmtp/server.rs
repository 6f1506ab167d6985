//! The executor's end: a ROUTER that serves DEALERs.

use std::time::Duration;

use super::command::{Command, put_command, put_properties};
use super::greeting::{Role, mechanism, put_rest};
use super::link::{Link, link_methods};
use super::{Event, Limits, Mechanism, ZmtpError};

/// Longest reason of a rejection, in bytes.
const MAX_REASON_BYTES: usize = 255;

/// Which mechanisms are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accepts {
    /// The transport says who the client is.
    Null,
    /// The client must log in.
    Plain,
    /// Whichever the client asks for.
    Either,
}

/// How far the handshake is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
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
pub struct Server {
    link: Link,
    accepts: Accepts,
    stage: Stage,
    mechanism: Option<Mechanism>,
}

impl Accepts {
    fn takes(self, mechanism: Mechanism) -> bool {
        match self {
            Self::Null => mechanism == Mechanism::Null,
            Self::Plain => mechanism == Mechanism::Plain,
            Self::Either => true,
        }
    }
}

impl Server {
    link_methods!();

    /// A connection that was just accepted.
    #[must_use]
    pub fn new(limits: Limits, accepts: Accepts) -> Self {
        Self { link: Link::new(limits), accepts, stage: Stage::Greeting, mechanism: None }
    }

    /// Other limits from the next frame on: once it is known who the client is.
    pub fn set_limits(&mut self, limits: Limits) {
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
    pub fn next_event(&mut self) -> Result<Option<Event>, ZmtpError> {
        self.link.check()?;
        let step = self.step();
        self.link.fail(step)
    }

    /// Lets in the client that [`Event::Login`] told of.
    pub fn accept(&mut self) {
        if self.stage == Stage::Judged {
            put_command(self.link.output(), "WELCOME", &[]);
            self.stage = Stage::Initiate;
        }
    }

    /// Turns it away. The reason, cut to 255 bytes, is to be sent before the connection is closed. libzmq takes the
    /// reasons `300`, `400` and `500` for a refusal, and others for a fault.
    pub fn reject(&mut self, reason: &str) {
        if self.stage == Stage::Judged {
            let reason = &reason[..reason.floor_char_boundary(MAX_REASON_BYTES)];
            let length = u8::try_from(reason.len()).unwrap_or(u8::MAX);
            put_command(self.link.output(), "ERROR", &[&[length], reason.as_bytes()]);
            self.stage = Stage::Rejected;
        }
    }

    fn step(&mut self) -> Result<Option<Event>, ZmtpError> {
        loop {
            match self.stage {
                Stage::Greeting => match self.link.greeting()? {
                    None => return Ok(None),
                    Some(greeting) => self.greet(mechanism(&greeting)?)?,
                },
                Stage::Hello => match self.link.handshake()? {
                    None => return Ok(None),
                    Some(Command::Hello(login)) => {
                        self.stage = Stage::Judged;
                        return Ok(Some(Event::Login(login)));
                    }
                    Some(other) => return Err(other.unexpected()),
                },
                Stage::Judged => return Ok(None),
                Stage::Initiate | Stage::Properties => match (self.stage, self.link.handshake()?) {
                    (_, None) => return Ok(None),
                    (Stage::Initiate, Some(Command::Initiate(kind))) => {
                        put_properties(self.link.output(), "READY", "ROUTER");
                        return self.ready(Mechanism::Plain, kind);
                    }
                    (Stage::Properties, Some(Command::Ready(kind))) => {
                        return self.ready(Mechanism::Null, kind);
                    }
                    (_, Some(other)) => return Err(other.unexpected()),
                },
                Stage::Ready => return self.link.traffic(),
                Stage::Rejected => return Err(ZmtpError::Rejected),
            }
        }
    }

    /// Answers a greeting with the mechanism it asks for.
    fn greet(&mut self, mechanism: Mechanism) -> Result<(), ZmtpError> {
        if !self.accepts.takes(mechanism) {
            return Err(ZmtpError::Mechanism(format!("{mechanism:?}").to_uppercase()));
        }
        put_rest(self.link.output(), mechanism, Role::Server);
        self.mechanism = Some(mechanism);
        self.stage = match mechanism {
            Mechanism::Plain => Stage::Hello,
            Mechanism::Null => {
                put_properties(self.link.output(), "READY", "ROUTER");
                Stage::Properties
            }
        };
        Ok(())
    }

    fn ready(&mut self, mechanism: Mechanism, kind: String) -> Result<Option<Event>, ZmtpError> {
        if kind != "DEALER" {
            return Err(ZmtpError::SocketType(kind));
        }
        self.stage = Stage::Ready;
        Ok(Some(Event::Ready(mechanism)))
    }
}

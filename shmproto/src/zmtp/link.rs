//! Code that both ends share: bytes in and out, messages from frames, and heartbeats.

use std::time::Duration;

use super::command::{ZmtpCommand, put_command};
use super::greeting::{GREETING_BYTES, OPENING, check_beginning};
use super::input::{FrameInput, FrameKind};
use super::{ZmtpError, ZmtpEvent, ZmtpLimits};

/// Maximum number of bytes of unsent pongs before the peer counts as slow.
const MAX_OUTGOING_BYTES: usize = 16 << 10;

#[derive(Debug)]
pub(super) struct ZmtpConnection {
    input: FrameInput,
    output: Vec<u8>,
    /// Frames of an incomplete message.
    frames: Vec<Vec<u8>>,
    pub(super) limits: ZmtpLimits,
    /// Bytes of the handshake that have come.
    shaken: usize,
    peer_ttl: Option<Duration>,
    failed: Option<ZmtpError>,
}

impl ZmtpConnection {
    pub(super) fn new(limits: ZmtpLimits) -> Self {
        Self {
            input: FrameInput::new(),
            output: OPENING.to_vec(),
            frames: Vec::new(),
            limits,
            shaken: 0,
            peer_ttl: None,
            failed: None,
        }
    }

    pub(super) fn space(&mut self) -> &mut [u8] {
        self.input.space()
    }

    pub(super) fn advance(&mut self, count: usize) {
        self.input.advance(count);
    }

    pub(super) fn outgoing(&self) -> &[u8] {
        &self.output
    }

    pub(super) fn sent(&mut self, count: usize) {
        self.output.drain(..count.min(self.output.len()));
    }

    pub(super) fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    pub(super) fn held_bytes(&self) -> usize {
        let frames: usize = self.frames.iter().map(Vec::capacity).sum();
        self.input.held_bytes() + self.output.capacity() + frames
    }

    pub(super) fn under_way(&self) -> Option<(&[Vec<u8>], usize)> {
        self.input.announced().map(|bytes| (self.frames.as_slice(), bytes))
    }

    pub(super) fn skip(&mut self) {
        self.input.skip();
    }

    pub(super) fn peer_ttl(&self) -> Option<Duration> {
        self.peer_ttl
    }

    pub(super) fn ping(&mut self, ttl: Duration) {
        let tenths = u16::try_from(ttl.as_millis() / 100).unwrap_or(u16::MAX);
        put_command(&mut self.output, "PING", &[&tenths.to_be_bytes()]);
    }

    /// Stores an error, which every later call returns.
    pub(super) fn fail<T>(&mut self, answer: Result<T, ZmtpError>) -> Result<T, ZmtpError> {
        if let Err(error) = &answer {
            self.failed = Some(error.clone());
        }
        answer
    }

    pub(super) fn check(&self) -> Result<(), ZmtpError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Returns the peer's greeting, if it is complete.
    pub(super) fn greeting(&mut self) -> Result<Option<[u8; GREETING_BYTES]>, ZmtpError> {
        let staged = self.input.staged();
        check_beginning(staged)?;
        let Some(greeting) = staged.first_chunk::<GREETING_BYTES>().copied() else { return Ok(None) };
        self.input.consume(GREETING_BYTES);
        self.shaken = GREETING_BYTES;
        Ok(Some(greeting))
    }

    /// Returns the next command of the handshake, if it is complete.
    pub(super) fn handshake(&mut self) -> Result<Option<ZmtpCommand>, ZmtpError> {
        let Some(frame) = self.input.frame(&self.limits)? else { return Ok(None) };
        if frame.kind != FrameKind::Command {
            return Err(ZmtpError::Early);
        }
        self.shaken = self.shaken.saturating_add(frame.body.len());
        if self.shaken > self.limits.max_handshake_bytes {
            return Err(ZmtpError::HandshakeTooLong(self.limits.max_handshake_bytes));
        }
        ZmtpCommand::read(&frame.body).map(Some)
    }

    /// Returns the next message or pong, if it is complete.
    pub(super) fn traffic(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
        while let Some(frame) = self.input.frame(&self.limits)? {
            match frame.kind {
                // Commands may also come between the frames of a message, because libzmq pings by its timer.
                FrameKind::Command => {
                    if let Some(event) = self.command(&frame.body)? {
                        return Ok(Some(event));
                    }
                }
                FrameKind::More | FrameKind::Last => {
                    if self.frames.len() >= self.limits.max_frames {
                        return Err(ZmtpError::TooManyFrames(self.limits.max_frames));
                    }
                    self.frames.push(frame.body);
                    if frame.kind == FrameKind::Last {
                        return Ok(Some(ZmtpEvent::Message(std::mem::take(&mut self.frames))));
                    }
                }
            }
        }
        Ok(None)
    }

    fn command(&mut self, body: &[u8]) -> Result<Option<ZmtpEvent>, ZmtpError> {
        match ZmtpCommand::read(body)? {
            ZmtpCommand::Ping(ttl, context) => {
                self.peer_ttl = (ttl > 0).then(|| Duration::from_millis(u64::from(ttl) * 100));
                if self.output.len() > MAX_OUTGOING_BYTES {
                    return Err(ZmtpError::Slow);
                }
                put_command(&mut self.output, "PONG", &[&context]);
                Ok(None)
            }
            ZmtpCommand::Pong => Ok(Some(ZmtpEvent::Pong)),
            ZmtpCommand::Error(reason) => Err(ZmtpError::Peer(reason)),
            other => Err(other.unexpected()),
        }
    }
}

impl ZmtpCommand {
    /// Returns the error of this command in a state where it is not allowed.
    pub(super) fn unexpected(self) -> ZmtpError {
        let name = match self {
            Self::Hello(_) => "HELLO",
            Self::Welcome => "WELCOME",
            Self::Initiate(_) => "INITIATE",
            Self::Ready(_) => "READY",
            Self::Error(reason) => return ZmtpError::Peer(reason),
            Self::Ping(..) => "PING",
            Self::Pong => "PONG",
            Self::Other(name) => return ZmtpError::Unexpected(name),
        };
        ZmtpError::Unexpected(name.to_owned())
    }
}

/// Defines the public methods that both ends forward to their link.
macro_rules! link_methods {
    () => {
        /// Returns the memory for the next bytes; empty only if [`Self::next_event`] has an event first. For
        /// a large frame, the memory is the one that the caller receives with the frame.
        pub fn space(&mut self) -> &mut [u8] {
            self.link.space()
        }

        /// Records that `count` bytes were read into [`Self::space`], from its beginning.
        pub fn advance(&mut self, count: usize) {
            self.link.advance(count);
        }

        /// Takes as many of `bytes` from the front as there is space for.
        pub fn feed(&mut self, bytes: &mut &[u8]) {
            let space = self.space();
            let count = space.len().min(bytes.len());
            space[..count].copy_from_slice(&bytes[..count]);
            *bytes = &bytes[count..];
            self.advance(count);
        }

        /// Returns bytes of handshake and heartbeats to send, between whole messages only.
        #[must_use]
        pub fn outgoing(&self) -> &[u8] {
            self.link.outgoing()
        }

        /// Records that the first `count` bytes of [`Self::outgoing`] were sent.
        pub fn sent(&mut self, count: usize) {
            self.link.sent(count);
        }

        /// Queues a ping on a ready connection; the peer should give up this end after `ttl` of silence.
        pub fn ping(&mut self, ttl: Duration) {
            self.link.ping(ttl);
        }

        /// Returns the silence after which the peer wants to be given up, if it announced one.
        #[must_use]
        pub fn peer_ttl(&self) -> Option<Duration> {
            self.link.peer_ttl()
        }

        /// Returns the memory held for incomplete or unsent data, in bytes.
        #[must_use]
        pub fn held_bytes(&self) -> usize {
            self.link.held_bytes()
        }
    };
}
pub(super) use link_methods;

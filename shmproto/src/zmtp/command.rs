//! Commands: a name, and fields. What is said between greeting and messages, and to see whether the peer lives.

use super::output::{Flags, put_frame};
use super::{Login, ZmtpError};

/// Most bytes of a ping's context, which is to be sent back.
const MAX_CONTEXT_BYTES: usize = 16;

/// A command that was understood.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ZmtpCommand {
    /// PLAIN: who the client is.
    Hello(Login),
    /// PLAIN: the client may go on.
    Welcome,
    /// PLAIN: the client's properties. Its kind of socket.
    Initiate(String),
    /// The peer's properties. Its kind of socket.
    Ready(String),
    /// What went wrong.
    Error(String),
    /// Tenths of seconds, and what is to be sent back.
    Ping(u16, Vec<u8>),
    Pong,
    /// The name of one that is not for this end.
    Other(String),
}

/// The unread rest of a command's fields.
struct CommandFields<'a> {
    rest: &'a [u8],
    name: &'static str,
}

impl<'a> CommandFields<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], ZmtpError> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or(ZmtpError::Malformed(self.name))?;
        self.rest = rest;
        Ok(head)
    }

    /// Bytes behind their count in a byte.
    fn short(&mut self) -> Result<&'a [u8], ZmtpError> {
        let count = self.take(1)?[0];
        self.take(count.into())
    }

    /// Bytes behind their count in four.
    fn long(&mut self) -> Result<&'a [u8], ZmtpError> {
        let count = self.take(4)?.try_into().map_or(u32::MAX, u32::from_be_bytes);
        self.take(count as usize)
    }

    fn text(&self, bytes: &[u8]) -> Result<String, ZmtpError> {
        String::from_utf8(bytes.to_vec()).map_err(|_| ZmtpError::Malformed(self.name))
    }

    fn end(&self) -> Result<(), ZmtpError> {
        if self.rest.is_empty() { Ok(()) } else { Err(ZmtpError::Malformed(self.name)) }
    }

    /// The kind of socket among properties; the others, an identity among them, mean nothing here.
    fn socket_type(&mut self) -> Result<String, ZmtpError> {
        let mut found = None;
        while !self.rest.is_empty() {
            let (name, value) = (self.short()?, self.long()?);
            if name.is_empty() {
                return Err(ZmtpError::Malformed(self.name));
            }
            if name.eq_ignore_ascii_case(b"Socket-Type") && found.replace(self.text(value)?).is_some() {
                return Err(ZmtpError::Malformed(self.name));
            }
        }
        found.ok_or(ZmtpError::Malformed(self.name))
    }
}

impl ZmtpCommand {
    /// Reads the body of a command frame.
    pub(super) fn read(body: &[u8]) -> Result<Self, ZmtpError> {
        let mut fields = CommandFields { rest: body, name: "name" };
        let name = fields.short()?;
        let mut named = |name| CommandFields { name, rest: std::mem::take(&mut fields.rest) };
        let (command, fields) = match name {
            b"HELLO" => {
                let mut fields = named("HELLO");
                let (username, password) = (fields.short()?, fields.short()?);
                let (username, password) = (fields.text(username)?, fields.text(password)?);
                (Self::Hello(Login { username, password }), fields)
            }
            b"WELCOME" => (Self::Welcome, named("WELCOME")),
            b"INITIATE" => {
                let mut fields = named("INITIATE");
                (Self::Initiate(fields.socket_type()?), fields)
            }
            b"READY" => {
                let mut fields = named("READY");
                (Self::Ready(fields.socket_type()?), fields)
            }
            b"ERROR" => {
                let mut fields = named("ERROR");
                let reason = fields.short()?;
                (Self::Error(String::from_utf8_lossy(reason).into_owned()), fields)
            }
            b"PING" => {
                let mut fields = named("PING");
                let ttl = fields.take(2)?.try_into().map_or(0, u16::from_be_bytes);
                let context = fields.take(fields.rest.len())?;
                if context.len() > MAX_CONTEXT_BYTES {
                    return Err(ZmtpError::Malformed("PING"));
                }
                (Self::Ping(ttl, context.to_vec()), fields)
            }
            // Its context is that of a ping of ours, which has none.
            b"PONG" => return Ok(Self::Pong),
            other => return Ok(Self::Other(String::from_utf8_lossy(other).into_owned())),
        };
        fields.end()?;
        Ok(command)
    }
}

/// Appends a command: its name, then its fields.
pub(super) fn put_command(out: &mut Vec<u8>, name: &'static str, fields: &[&[u8]]) {
    let mut body = vec![u8::try_from(name.len()).unwrap_or(u8::MAX)];
    body.extend_from_slice(name.as_bytes());
    fields.iter().for_each(|field| body.extend_from_slice(field));
    put_frame(out, Flags::Command, &body);
}

/// Appends READY or INITIATE with the kind of this end's socket.
pub(super) fn put_properties(out: &mut Vec<u8>, name: &'static str, socket_type: &str) {
    let length = u32::try_from(socket_type.len()).unwrap_or(u32::MAX).to_be_bytes();
    put_command(out, name, &[b"\x0bSocket-Type", &length, socket_type.as_bytes()]);
}

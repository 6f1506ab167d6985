//! Commands, each with a name and fields: they end the handshake and check whether the peer is alive.

use super::output::{Flags, put_frame};
use super::{Login, ZmtpError};

/// Maximum size of a ping's context in bytes; the pong repeats the context.
const MAX_CONTEXT_BYTES: usize = 16;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ZmtpCommand {
    /// PLAIN: credentials of the client.
    Hello(Login),
    /// PLAIN: the login is accepted.
    Welcome,
    /// PLAIN: properties of the client; holds its socket type.
    Initiate(String),
    /// Properties of the peer; holds its socket type.
    Ready(String),
    /// Reason for which the peer ends the connection.
    Error(String),
    /// Ping with its timeout in tenths of a second, and the context to send back.
    Ping(u16, Vec<u8>),
    Pong,
    /// Name of a command that this end does not know.
    Other(String),
}

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

    /// Takes bytes after a one-byte count.
    fn short(&mut self) -> Result<&'a [u8], ZmtpError> {
        let count = self.take(1)?[0];
        self.take(count.into())
    }

    /// Takes bytes after a four-byte count.
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

    /// Takes all properties and returns the socket type; other properties, such as the identity, are ignored.
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
            // The context repeats that of this end's ping, which has none.
            b"PONG" => return Ok(Self::Pong),
            other => return Ok(Self::Other(String::from_utf8_lossy(other).into_owned())),
        };
        fields.end()?;
        Ok(command)
    }
}

pub(super) fn put_command(out: &mut Vec<u8>, name: &'static str, fields: &[&[u8]]) {
    let mut body = vec![u8::try_from(name.len()).unwrap_or(u8::MAX)];
    body.extend_from_slice(name.as_bytes());
    fields.iter().for_each(|field| body.extend_from_slice(field));
    put_frame(out, Flags::Command, &body);
}

/// Appends READY or INITIATE with the socket type of this end.
pub(super) fn put_properties(out: &mut Vec<u8>, name: &'static str, socket_type: &str) {
    let length = u32::try_from(socket_type.len()).unwrap_or(u32::MAX).to_be_bytes();
    put_command(out, name, &[b"\x0bSocket-Type", &length, socket_type.as_bytes()]);
}

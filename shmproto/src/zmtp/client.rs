//! The client's end: a DEALER.

use std::time::Duration;

use super::command::{ZmtpCommand, put_command, put_properties};
use super::greeting::{PeerRole, mechanism, put_rest};
use super::link::{ZmtpConnection, link_methods};
use super::{Login, Mechanism, ZmtpError, ZmtpEvent, ZmtpLimits};

/// Maximum size of a name or password in bytes.
const MAX_CREDENTIAL_BYTES: usize = 255;

/// Error of a name or password that the protocol cannot carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the {what} has {bytes} bytes, and at most 255 can be sent: use a shorter one")]
pub struct CredentialsError {
    /// Field that is too long: `name` or `password`.
    pub what: &'static str,
    /// Size of the field in bytes.
    pub bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientStage {
    Greeting,
    /// PLAIN: waits for the server to accept the login.
    Welcome,
    /// Waits for the peer's socket type.
    Properties,
    Ready,
    Refused,
}

/// Client's end of one connection.
#[derive(Debug)]
pub struct ZmtpClient {
    link: ZmtpConnection,
    mechanism: Mechanism,
    /// Credentials, dropped once they are sent.
    login: Option<Login>,
    stage: ClientStage,
}

impl ZmtpClient {
    link_methods!();

    /// Creates a connection without credentials; the transport may authenticate the client.
    #[must_use]
    pub fn null(limits: ZmtpLimits) -> Self {
        Self::new(limits, None)
    }

    /// Creates a connection that logs in with name and password.
    ///
    /// # Errors
    /// Returns an error if name or password are too long.
    pub fn plain(limits: ZmtpLimits, username: &str, password: &str) -> Result<Self, CredentialsError> {
        for (what, text) in [("name", username), ("password", password)] {
            if text.len() > MAX_CREDENTIAL_BYTES {
                return Err(CredentialsError { what, bytes: text.len() });
            }
        }
        let login = Login { username: username.to_owned(), password: password.to_owned() };
        Ok(Self::new(limits, Some(login)))
    }

    fn new(limits: ZmtpLimits, login: Option<Login>) -> Self {
        let mut link = ZmtpConnection::new(limits);
        let mechanism = if login.is_some() { Mechanism::Plain } else { Mechanism::Null };
        put_rest(link.output(), mechanism, PeerRole::Client);
        Self { link, mechanism, login, stage: ClientStage::Greeting }
    }

    /// Returns the next event; the caller repeats the call until there is none.
    ///
    /// # Errors
    /// Returns the server's violation of the protocol, and again at every later call.
    pub fn next_event(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
        self.link.check()?;
        let step = self.step();
        self.link.fail(step)
    }

    fn step(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
        loop {
            match self.stage {
                ClientStage::Greeting => match self.link.greeting()? {
                    None => return Ok(None),
                    Some(greeting) => self.greet(mechanism(&greeting)?)?,
                },
                ClientStage::Welcome => match self.link.handshake()? {
                    None => return Ok(None),
                    Some(ZmtpCommand::Welcome) => {
                        put_properties(self.link.output(), "INITIATE", "DEALER");
                        self.stage = ClientStage::Properties;
                    }
                    Some(ZmtpCommand::Error(reason)) => return Ok(Some(self.refused(reason))),
                    Some(other) => return Err(other.unexpected()),
                },
                ClientStage::Properties => match self.link.handshake()? {
                    None => return Ok(None),
                    Some(ZmtpCommand::Ready(kind)) => return self.ready(kind),
                    Some(ZmtpCommand::Error(reason)) => return Ok(Some(self.refused(reason))),
                    Some(other) => return Err(other.unexpected()),
                },
                ClientStage::Ready => return self.link.traffic(),
                ClientStage::Refused => return Err(ZmtpError::Rejected),
            }
        }
    }

    fn greet(&mut self, mechanism: Mechanism) -> Result<(), ZmtpError> {
        if mechanism != self.mechanism {
            return Err(ZmtpError::Mechanism(format!("{mechanism:?}").to_uppercase()));
        }
        let output = self.link.output();
        let Some(Login { username, password }) = self.login.take() else {
            put_properties(output, "READY", "DEALER");
            self.stage = ClientStage::Properties;
            return Ok(());
        };
        let lengths = [&username, &password].map(|text| u8::try_from(text.len()).unwrap_or(u8::MAX));
        let fields = [&lengths[..1], username.as_bytes(), &lengths[1..], password.as_bytes()];
        put_command(output, "HELLO", &fields);
        self.stage = ClientStage::Welcome;
        Ok(())
    }

    fn ready(&mut self, kind: String) -> Result<Option<ZmtpEvent>, ZmtpError> {
        if kind != "ROUTER" {
            return Err(ZmtpError::SocketType(kind));
        }
        self.stage = ClientStage::Ready;
        Ok(Some(ZmtpEvent::Ready(self.mechanism)))
    }

    fn refused(&mut self, reason: String) -> ZmtpEvent {
        self.stage = ClientStage::Refused;
        ZmtpEvent::Refused(reason)
    }
}

//! Greeting, the first 64 bytes of either side: signature, version, mechanism.
//!
//! ```text
//! 0 signature [10] | 10 major u8 | 11 minor u8 | 12 mechanism [20] | 32 as-server u8 | 33 zeros [31]
//! ```

use super::{Mechanism, ZmtpError};

pub(super) const GREETING_BYTES: usize = 64;

/// Signature and version of this end, which are sent before the peer's greeting.
pub(super) const OPENING: [u8; 12] = [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerRole {
    Server,
    Client,
}

impl Mechanism {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Null => b"NULL",
            Self::Plain => b"PLAIN",
        }
    }
}

/// Appends the rest of a greeting, after [`OPENING`].
pub(super) fn put_rest(out: &mut Vec<u8>, mechanism: Mechanism, role: PeerRole) {
    let mut rest = [0; GREETING_BYTES - OPENING.len()];
    let name = mechanism.name();
    rest[..name.len()].copy_from_slice(name);
    // Only PLAIN distinguishes server and client.
    rest[20] = u8::from(mechanism == Mechanism::Plain && role == PeerRole::Server);
    out.extend_from_slice(&rest);
}

/// Refuses another protocol or version at the first byte that shows it.
pub(super) fn check_beginning(bytes: &[u8]) -> Result<(), ZmtpError> {
    let wrong = |at: usize, wanted: u8| bytes.get(at).is_some_and(|&byte| byte != wanted);
    if wrong(0, 0xff) || wrong(9, 0x7f) {
        return Err(ZmtpError::Signature);
    }
    match bytes.get(10) {
        Some(&major) if major < 3 => Err(ZmtpError::Version(major)),
        _ => Ok(()),
    }
}

/// Returns the mechanism of a complete greeting.
pub(super) fn mechanism(greeting: &[u8; GREETING_BYTES]) -> Result<Mechanism, ZmtpError> {
    check_beginning(greeting)?;
    let field = &greeting[12..32];
    let name = field.split(|&byte| byte == 0).next().unwrap_or(field);
    let padded = field[name.len()..].iter().all(|&byte| byte == 0);
    let known = [Mechanism::Null, Mechanism::Plain].into_iter().find(|known| known.name() == name);
    known.filter(|_| padded).ok_or_else(|| ZmtpError::Mechanism(String::from_utf8_lossy(name).into_owned()))
}

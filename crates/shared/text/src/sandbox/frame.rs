//! Framing of the pipes: each message is JSON, preceded by its length in four bytes.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Maximum message size in bytes, enough for a vocabulary of a million tokens and for any conversation.
const MAX_BYTES: u32 = 256 << 20;

/// Message: the process has read its setup.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ready;

/// Message: the reply to a question.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply<A> {
    Answer(A),
    /// Reply for work that panicked.
    Failed,
    /// The work exceeded its CPU time. The process ends after this message.
    TooMuchTime,
}

/// Why a message was not transferred.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer has closed its pipe.
    #[error("its pipe is closed")]
    Closed,
    /// Reading or writing the pipe failed.
    #[error(transparent)]
    Pipe(#[from] io::Error),
    /// The message exceeds the maximum size.
    #[error("a message of {0} bytes is longer than {MAX_BYTES}")]
    TooLong(u64),
    /// The message is not valid JSON of its type.
    #[error("a message cannot be read: {0}")]
    Unknown(#[from] serde_json::Error),
}

pub(super) fn write(to: &mut impl Write, message: &impl Serialize) -> Result<(), FrameError> {
    let bytes = serde_json::to_vec(message)?;
    let too_long = || FrameError::TooLong(bytes.len() as u64);
    let length =
        u32::try_from(bytes.len()).ok().filter(|length| *length <= MAX_BYTES).ok_or_else(too_long)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(&bytes)?;
    Ok(to.flush()?)
}

/// Reads the next message; `None` at the end of the stream.
pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<T>, FrameError> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u32::from_le_bytes(length);
    if length > MAX_BYTES {
        return Err(FrameError::TooLong(length.into()));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written_up_to_the_end() {
        let mut pipe = Vec::new();
        write(&mut pipe, &"a source").unwrap();
        write(&mut pipe, &Reply::Answer("too deep")).unwrap();
        let mut pipe = &pipe[..];
        assert_eq!(read::<String>(&mut pipe).unwrap().as_deref(), Some("a source"));
        let reply = read::<Reply<String>>(&mut pipe).unwrap().unwrap();
        assert!(matches!(reply, Reply::Answer(why) if why == "too deep"));
        assert!(read::<Reply<String>>(&mut pipe).unwrap().is_none());
    }

    #[test]
    fn a_message_that_is_too_long_or_cut_off_is_refused_before_it_is_kept() {
        let too_long = read::<String>(&mut &u32::MAX.to_le_bytes()[..]);
        assert!(matches!(too_long, Err(FrameError::TooLong(_))));
        let mut cut = Vec::new();
        write(&mut cut, &"a source").unwrap();
        cut.pop();
        assert!(matches!(read::<String>(&mut &cut[..]), Err(FrameError::Pipe(_))));
    }
}

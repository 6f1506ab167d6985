//! What a gateway asks of an executor on another host, at its TLS door.
//!
//! The handshake's application protocol ([`ALPN`]) tells a gateway's connection from a split client's. Each connection serves
//! for one thing:
//!
//! ```text
//! gateway                              executor
//!   Ask::Tunnel                  ->
//!                                <-    Answer::Admitted                 or Refused, and the end
//!   bytes of the executor's own socket, both ways, until one side ends
//!
//!   Ask::Lend(files)             ->
//!                                <-    Answer::Admitted                 or Refused, and the end
//!   their bytes, one file after the other, and a digest of all of them
//!                                <-    Answer::Lent(path)               or Refused, and the end
//!   nothing; when the connection ends, the files are removed
//! ```
//!
//! Messages of both sides are frames: a `u32` count of bytes, at most [`MAX_FRAME_BYTES`], and the message.

use crate::{codec::Wire, wire_enum, wire_struct};

/// The application protocol of the handshake.
pub const ALPN: &[u8] = b"holobiont-gateway/1";

/// Longest message.
pub const MAX_FRAME_BYTES: usize = 8 << 10;

/// Bytes of the digest behind the files: BLAKE3 of all their bytes, one file after the other.
pub const DIGEST_BYTES: usize = 32;

wire_enum! {
    /// What a connection is for.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum RemoteRequest {
        /// It carries what a gateway of the executor's own host would say at its socket.
        Tunnel = 0,
        /// It brings an adapter's files, which lie there as long as it lasts.
        Lend(Vec<StagedFile>) = 1,
    }
}

wire_struct! {
    /// A file to come.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct StagedFile {
        /// Which of the three it is.
        pub name: FileName,
        /// Its length.
        pub bytes: u64,
    }
}

wire_enum! {
    /// What a file of an adapter may be called: names are never taken from the wire.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum FileName {
        /// PEFT's configuration.
        Config = 0,
        /// PEFT's weights.
        Weights = 1,
        /// Both, as GGUF.
        Gguf = 2,
    }
}

wire_enum! {
    /// What is answered.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum RemoteReply {
        /// Go on.
        Admitted = 0,
        /// The files are whole; under this path they can be loaded.
        Lent(String) = 1,
        /// The connection ends; the text says why and what to do.
        Refused(String) = 2,
    }
}

impl FileName {
    /// All of them, in the order in which they are sent.
    pub const ALL: [Self; 3] = [Self::Config, Self::Weights, Self::Gguf];

    /// As files are called.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Config => "adapter_config.json",
            Self::Weights => "adapter_model.safetensors",
            Self::Gguf => "adapter.gguf",
        }
    }
}

/// A message as it travels.
#[must_use]
pub fn frame(message: &impl Wire) -> Vec<u8> {
    let body = message.to_bytes();
    let mut bytes = Vec::with_capacity(4 + body.len());
    // Messages are made of a few names and numbers.
    u32::try_from(body.len()).unwrap_or(u32::MAX).put(&mut bytes);
    bytes.extend(body);
    bytes
}

/// Bytes of the message behind a frame's first four; `None` if that is more than any message has.
#[must_use]
pub fn body_bytes(first: [u8; 4]) -> Option<usize> {
    let bytes = u32::from_le_bytes(first) as usize;
    (bytes <= MAX_FRAME_BYTES).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_says_its_length_and_none_is_longer_than_allowed() {
        let ask = RemoteRequest::Lend(vec![StagedFile { name: FileName::Gguf, bytes: 7 }]);
        let bytes = frame(&ask);
        let (first, body) = bytes.split_first_chunk().unwrap();
        assert_eq!((body_bytes(*first), RemoteRequest::from_bytes(body)), (Some(body.len()), Ok(ask)));
        let longest = u32::try_from(MAX_FRAME_BYTES).unwrap();
        assert_eq!(body_bytes(longest.to_le_bytes()), Some(MAX_FRAME_BYTES));
        assert_eq!(body_bytes((longest + 1).to_le_bytes()), None);
    }

    #[test]
    fn no_file_is_called_as_the_wire_says() {
        assert!(FileName::from_bytes(&[3]).is_err());
        let names: std::collections::BTreeSet<_> = FileName::ALL.map(FileName::text).into();
        assert_eq!(names.len(), FileName::ALL.len());
    }
}

//! Requests of a gateway to an executor on another host, over the executor's TLS port.
//!
//! The application protocol of the handshake ([`ALPN`]) distinguishes a gateway's connection from a split
//! client's. Each connection serves one request:
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

/// Application protocol of the TLS handshake.
pub const ALPN: &[u8] = b"holobiont-gateway/1";

/// Maximum size of a message in bytes.
pub const MAX_FRAME_BYTES: usize = 8 << 10;

/// Size in bytes of the digest after the files: BLAKE3 of all their bytes in order.
pub const DIGEST_BYTES: usize = 32;

wire_enum! {
    /// Purpose of a connection.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum RemoteRequest {
        /// Tunnel to the executor's own socket, as a gateway on the executor's host would use it.
        Tunnel = 0,
        /// Transfer of an adapter's files, which stay on the executor's host while the connection lasts.
        Lend(Vec<StagedFile>) = 1,
    }
}

wire_struct! {
    /// File that the gateway will send.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct StagedFile {
        /// Kind of the file.
        pub name: FileName,
        /// Size of the file in bytes.
        pub bytes: u64,
    }
}

wire_enum! {
    /// Name of an adapter file; the wire carries no other names.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum FileName {
        /// Configuration in PEFT's format.
        Config = 0,
        /// Weights in PEFT's format.
        Weights = 1,
        /// Configuration and weights in GGUF.
        Gguf = 2,
    }
}

wire_enum! {
    /// Answer to a request.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum RemoteReply {
        /// The request is admitted; the gateway may continue.
        Admitted = 0,
        /// The files are complete and can be loaded from this path.
        Lent(String) = 1,
        /// The connection ends; the text says why and what to do.
        Refused(String) = 2,
    }
}

impl FileName {
    /// All names, in the order in which files are sent.
    pub const ALL: [Self; 3] = [Self::Config, Self::Weights, Self::Gguf];

    /// Returns the file name on disk.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Config => "adapter_config.json",
            Self::Weights => "adapter_model.safetensors",
            Self::Gguf => "adapter.gguf",
        }
    }
}

/// Encodes a message with its length, for the wire.
#[must_use]
pub fn frame(message: &impl Wire) -> Vec<u8> {
    let body = message.to_bytes();
    let mut bytes = Vec::with_capacity(4 + body.len());
    // Messages consist of a few names and numbers, so the length fits.
    u32::try_from(body.len()).unwrap_or(u32::MAX).put(&mut bytes);
    bytes.extend(body);
    bytes
}

/// Returns the size of the message after a frame's first four bytes; `None` above [`MAX_FRAME_BYTES`].
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

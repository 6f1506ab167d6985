//! Splits received bytes into frames, with memory in proportion to the bytes received.

use super::{ZmtpError, ZmtpLimits};

/// Size of the read-ahead buffer, for heads, commands, small frames and both ends of large frames.
const STAGING_BYTES: usize = 16 << 10;

/// Smallest growth of a frame's memory, in bytes.
const STEP_BYTES: usize = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    More,
    Last,
    Command,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct ZmtpFrame {
    pub(super) kind: FrameKind,
    pub(super) body: Vec<u8>,
}

/// Incomplete frame. `bytes` has capacity for the next bytes, and `filled` bytes of it have come.
#[derive(Debug)]
struct FrameBody {
    kind: FrameKind,
    bytes: Vec<u8>,
    filled: usize,
    length: usize,
    /// Whether the content is dropped.
    is_skipped: bool,
}

/// Received bytes that form no complete frame yet.
#[derive(Debug)]
pub(super) struct FrameInput {
    staging: Vec<u8>,
    from: usize,
    to: usize,
    body: Option<FrameBody>,
}

impl FrameBody {
    fn left(&self) -> usize {
        self.length - self.filled
    }

    /// Makes capacity for `wanted` more bytes, and for as many again as came, up to the frame's length.
    fn grow(&mut self, wanted: usize) {
        let capacity = (self.filled + wanted).max(2 * self.filled).max(STEP_BYTES).min(self.length);
        if capacity > self.bytes.len() {
            self.bytes.reserve_exact(capacity - self.bytes.len());
            self.bytes.resize(capacity, 0);
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        if self.is_skipped {
            self.filled += bytes.len();
            return;
        }
        if self.bytes.len() < self.filled + bytes.len() {
            self.grow(bytes.len());
        }
        self.bytes[self.filled..][..bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }
}

impl FrameInput {
    pub(super) fn new() -> Self {
        Self { staging: vec![0; STAGING_BYTES], from: 0, to: 0, body: None }
    }

    /// Whether all next bytes belong to a large frame and go directly to its memory.
    fn is_direct(&self) -> bool {
        let is_large = |body: &FrameBody| !body.is_skipped && body.left() >= STAGING_BYTES;
        self.from == self.to && self.body.as_ref().is_some_and(is_large)
    }

    /// Returns the memory for the next bytes; not empty if all received frames were taken.
    pub(super) fn space(&mut self) -> &mut [u8] {
        if self.is_direct()
            && let Some(body) = &mut self.body
        {
            if body.filled == body.bytes.len() {
                body.grow(STAGING_BYTES);
            }
            return &mut body.bytes[body.filled..];
        }
        self.staging.copy_within(self.from..self.to, 0);
        (self.from, self.to) = (0, self.to - self.from);
        &mut self.staging[self.to..]
    }

    pub(super) fn advance(&mut self, count: usize) {
        if self.is_direct()
            && let Some(body) = &mut self.body
        {
            body.filled = (body.filled + count).min(body.bytes.len());
        } else {
            self.to = (self.to + count).min(self.staging.len());
        }
    }

    /// Returns received bytes that were not yet decoded.
    pub(super) fn staged(&self) -> &[u8] {
        &self.staging[self.from..self.to]
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.from = (self.from + count).min(self.to);
    }

    /// Returns the length of the incomplete message frame; `None` if its content is dropped.
    pub(super) fn announced(&self) -> Option<usize> {
        let body = self.body.as_ref()?;
        (body.kind != FrameKind::Command && !body.is_skipped).then_some(body.length)
    }

    /// Drops the content of the incomplete frame, which will be returned empty.
    pub(super) fn skip(&mut self) {
        if let Some(body) = &mut self.body {
            body.bytes = Vec::new();
            body.is_skipped = true;
        }
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.staging.len() + self.body.as_ref().map_or(0, |body| body.bytes.capacity())
    }

    /// Returns the next frame, if it is complete.
    pub(super) fn frame(&mut self, limits: &ZmtpLimits) -> Result<Option<ZmtpFrame>, ZmtpError> {
        let mut body = match self.body.take() {
            Some(body) => body,
            None => match self.head(limits)? {
                Some(body) => body,
                None => return Ok(None),
            },
        };
        let count = body.left().min(self.to - self.from);
        body.append(&self.staging[self.from..][..count]);
        self.from += count;
        if body.left() == 0 {
            return Ok(Some(ZmtpFrame { kind: body.kind, body: body.bytes }));
        }
        self.body = Some(body);
        Ok(None)
    }

    /// Decodes the head of a frame, if it is complete: flags, and a length of one byte or eight.
    fn head(&mut self, limits: &ZmtpLimits) -> Result<Option<FrameBody>, ZmtpError> {
        let staged = self.staged();
        let Some((&flags, rest)) = staged.split_first() else { return Ok(None) };
        let kind = match flags & !LONG {
            0 => FrameKind::Last,
            MORE => FrameKind::More,
            COMMAND => FrameKind::Command,
            _ => return Err(ZmtpError::Flags(flags)),
        };
        let (bytes, head) = match (flags & LONG != 0, rest) {
            (false, [length, ..]) => (u64::from(*length), 2),
            (true, [a, b, c, d, e, f, g, h, ..]) => (u64::from_be_bytes([*a, *b, *c, *d, *e, *f, *g, *h]), 9),
            _ => return Ok(None),
        };
        let (most, is_command) = match kind {
            FrameKind::Command => (limits.max_command_bytes, true),
            FrameKind::More | FrameKind::Last => (limits.max_frame_bytes, false),
        };
        let length = match usize::try_from(bytes) {
            Ok(length) if length <= most => length,
            _ if is_command => return Err(ZmtpError::CommandTooLong { bytes, most }),
            _ => return Err(ZmtpError::FrameTooLong { bytes, most }),
        };
        self.consume(head);
        Ok(Some(FrameBody { kind, bytes: Vec::new(), filled: 0, length, is_skipped: false }))
    }
}

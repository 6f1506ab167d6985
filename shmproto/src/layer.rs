//! Messages between a split client and the executor's layer service, independent of the transport.
//!
//! A *call* is a header of 64 bytes and rows of activations. Shared memory carries the header in a ring and
//! the rows in a slab ([`crate::channel`]); ZeroMQ carries both in a message of two frames ([`crate::zmtp`]).
//! A *control message* opens a session and fetches the client weights and the catalog. A control message is a
//! datagram beside the channel, or a ZeroMQ message whose first frame is [`CONTROL`].
//!
//! # Layout
//!
//! - this file: calls and replies
//! - [`control`]: control messages, and the catalog of sites
//! - [`seeded_rows`]: rows that do not travel, because both sides can generate them

pub mod control;
pub mod seeded_rows;

/// Version of the layer protocol: calls, replies and control messages.
pub const LAYER_VERSION: u32 = 4;

/// Size of a call's or a reply's header in bytes.
pub const HEADER_BYTES: usize = 64;

/// First word of a call's header: version and kind, so that other bytes are seldom taken for a header.
const CALL_MAGIC: u32 = u32::from_le_bytes(*b"HLC1");
const REPLY_MAGIC: u32 = u32::from_le_bytes(*b"HLR1");

/// First frame of a ZeroMQ message whose second frame is a control message.
pub const CONTROL: [u8; 4] = *b"HLM1";

/// Maximum number of rows in a call.
pub const MAX_ROWS: u32 = 1 << 16;

/// Error of bytes that are no valid header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The header begins with another word than the magic number.
    #[error("the header begins with {0:#010x}: the peer speaks another protocol or version")]
    Magic(u32),
    /// The code of a field has no meaning.
    #[error("the header's {what} is {code}, which names nothing")]
    Code {
        /// Name of the field.
        what: &'static str,
        /// Code in the field.
        code: u8,
    },
    /// A number exceeds the limit of the protocol.
    #[error("the header's {what} is {value}, above {most}")]
    Range {
        /// Name of the field.
        what: &'static str,
        /// Value of the field.
        value: u64,
        /// Largest value that is allowed.
        most: u64,
    },
    /// A reserved byte is not zero.
    #[error("reserved bytes of the header are not zero: the peer speaks a later version")]
    Reserved,
}

macro_rules! coded {
    ($(#[$meta:meta])* pub enum $name:ident as $what:literal { $($(#[$vmeta:meta])* $variant:ident = $code:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name { $($(#[$vmeta])* $variant = $code),* }
        impl $name {
            /// All values, in the order of their codes.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the value with this code.
            ///
            /// # Errors
            /// Returns an error if no value has this code.
            pub fn from_code(code: u8) -> Result<Self, HeaderError> {
                match code {
                    $($code => Ok(Self::$variant),)*
                    code => Err(HeaderError::Code { what: $what, code }),
                }
            }
        }
    };
}

coded! {
    /// Operation of a call on its rows.
    pub enum SiteOp as "operation" {
        /// Product with bias: `x Wᵀ + bias`.
        Forward = 0,
        /// Product without bias: `x Wᵀ`.
        ForwardNoBias = 1,
        /// Gradient of the input: `g W`; needs no saved activations.
        Backward = 2,
    }
}

coded! {
    /// Arithmetic of a call.
    pub enum SitePath as "path" {
        /// Quantized path: as the resident engine computes, with the same bits as without a split.
        Fast = 0,
        /// Float path: 32-bit activations and the weights as stored; for training, masking and comparison.
        Linear = 1,
        /// Modular path: integers modulo 2^48 or 2^64 and the weights' own integers, exactly and without
        /// bias. An integer has six or eight bytes, the lowest first, without padding. The rows travel as
        /// [`Dtype::F32`], but the bytes are never interpreted as floats.
        Ring = 2,
    }
}

coded! {
    /// Source of a call's rows.
    pub enum RowSource as "source of rows" {
        /// The rows follow the header.
        Rows = 0,
        /// A [`SeededRows`](seeded_rows::SeededRows) follows, which generates the rows; modular path only.
        Draw = 1,
    }
}

coded! {
    /// Purpose of a call; the lower the code, the more urgent.
    pub enum CallClass as "class" {
        /// Decode of the next tokens.
        Decode = 0,
        /// Verification of a token tree.
        Verify = 1,
        /// Prefill of a prompt.
        Prefill = 2,
        /// Fine-tuning, forward or backward.
        Training = 3,
        /// Effects of pads, computed ahead of time.
        Noise = 4,
    }
}

coded! {
    /// Element type of rows in transit. The arithmetic is the same; bf16 rounds the transmitted values.
    pub enum Dtype as "number format" {
        /// IEEE single precision, 32 bits.
        F32 = 0,
        /// Upper 16 bits of a single, rounded to nearest even.
        Bf16 = 1,
    }
}

impl Dtype {
    /// Returns the size of a value in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

coded! {
    /// Result of a call.
    pub enum CallStatus as "status" {
        /// The call succeeded and its rows follow.
        Done = 0,
        /// The tenant's quota of rows or bytes is used up; `retry_after_ms` says when to retry.
        Quota = 1,
        /// The rows, widths or slab offsets do not fit the site.
        Shape = 2,
        /// Too many calls wait; retry after `retry_after_ms`.
        Busy = 3,
        /// The executor is about to end; open a session with its successor.
        Draining = 4,
        /// The site lacks the path: the requested arithmetic must not be rounded, and would be.
        Nonlinear = 5,
        /// The site or part does not exist.
        UnknownSite = 6,
        /// The sequence number was used for another call, or is lower than one already answered.
        Sequence = 7,
        /// An internal error of the executor; the client may retry the call.
        Failed = 8,
        /// Operation, path, dtype and source of rows are incompatible: the modular path has neither bias nor
        /// bf16, and no other path has seeded rows.
        Unsuited = 9,
    }
}

/// Code in a header for all linear layers of a site.
const ALL_PARTS: u8 = u8::MAX;

/// Header of a call: computes rows through a site.
///
/// ```text
///  0 magic u32 | 4 op u8 | 5 path u8 | 6 class u8 | 7 dtype u8 | 8 site u32 | 12 part u8, 0xff: all
/// 13 source u8 | 14 zero [2] | 16 sequence u64 | 24 rows u32 | 28 zero u32 | 32 input u64 | 40 output u64
/// 48 zero [16]
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallHeader {
    /// Operation on the rows.
    pub op: SiteOp,
    /// Arithmetic of the call.
    pub path: SitePath,
    /// Purpose of the rows, which decides the urgency.
    pub class: CallClass,
    /// Element type of the rows, in both directions.
    pub dtype: Dtype,
    /// Number of the site in the catalog.
    pub site: u32,
    /// One linear layer of the site; `None` for all.
    pub part: Option<u8>,
    /// Source of the rows: transmitted or seeded.
    pub source: RowSource,
    /// Ascending number of the call in its session. A client may repeat an unanswered call under its number.
    pub sequence: u64,
    /// Number of rows, 1 to [`MAX_ROWS`].
    pub rows: u32,
    /// Offset of the rows in the slab in bytes, a multiple of 64; 0 without a slab.
    pub input: u64,
    /// Offset of the answer in the slab in bytes, a multiple of 64; 0 without a slab.
    pub output: u64,
}

/// Header of the answer to a call.
///
/// ```text
///  0 magic u32 | 4 status u8 | 5 dtype u8 | 6 zero u16 | 8 retry_after_ms u32 | 12 rows u32
/// 16 sequence u64 | 24 waited_us u32 | 28 batch_rows u32 | 32 zero [32]
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader {
    /// Result of the call.
    pub status: CallStatus,
    /// Element type of the rows, as in the call.
    pub dtype: Dtype,
    /// Delay after which to retry a refused call, in milliseconds.
    pub retry_after_ms: u32,
    /// Number of rows that follow: all of the call's, or none.
    pub rows: u32,
    /// Sequence number of the call.
    pub sequence: u64,
    /// Time for which the call was queued, in microseconds.
    pub waited_us: u32,
    /// Number of rows in the batch of the call, its own included.
    pub batch_rows: u32,
}

type Header = [u8; HEADER_BYTES];

fn read_u32(header: &Header, at: usize) -> u32 {
    u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"))
}

fn long(header: &Header, at: usize) -> u64 {
    u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"))
}

fn zero(header: &Header, ranges: &[std::ops::Range<usize>]) -> Result<(), HeaderError> {
    let reserved = ranges.iter().flat_map(|range| &header[range.clone()]);
    if reserved.copied().all(|byte| byte == 0) { Ok(()) } else { Err(HeaderError::Reserved) }
}

fn magic(header: &Header, wanted: u32) -> Result<(), HeaderError> {
    match read_u32(header, 0) {
        found if found == wanted => Ok(()),
        found => Err(HeaderError::Magic(found)),
    }
}

impl CallHeader {
    /// Encodes the header for the wire.
    #[must_use]
    pub fn to_bytes(&self) -> Header {
        let mut header = [0; HEADER_BYTES];
        header[0..4].copy_from_slice(&CALL_MAGIC.to_le_bytes());
        header[4..8].copy_from_slice(&[self.op as u8, self.path as u8, self.class as u8, self.dtype as u8]);
        header[8..12].copy_from_slice(&self.site.to_le_bytes());
        header[12] = self.part.unwrap_or(ALL_PARTS);
        header[13] = self.source as u8;
        header[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        header[24..28].copy_from_slice(&self.rows.to_le_bytes());
        header[32..40].copy_from_slice(&self.input.to_le_bytes());
        header[40..48].copy_from_slice(&self.output.to_le_bytes());
        header
    }

    /// Decodes a peer's header. Only the holder of the catalog can check site, shape and slab offsets.
    ///
    /// # Errors
    /// Returns an error if the bytes are no valid call header.
    pub fn from_bytes(header: &Header) -> Result<Self, HeaderError> {
        magic(header, CALL_MAGIC)?;
        zero(header, &[14..16, 28..32, 48..HEADER_BYTES])?;
        let rows = read_u32(header, 24);
        if rows == 0 || rows > MAX_ROWS {
            return Err(HeaderError::Range { what: "rows", value: rows.into(), most: MAX_ROWS.into() });
        }
        Ok(Self {
            op: SiteOp::from_code(header[4])?,
            path: SitePath::from_code(header[5])?,
            class: CallClass::from_code(header[6])?,
            dtype: Dtype::from_code(header[7])?,
            site: read_u32(header, 8),
            part: (header[12] != ALL_PARTS).then_some(header[12]),
            source: RowSource::from_code(header[13])?,
            sequence: long(header, 16),
            rows,
            input: long(header, 32),
            output: long(header, 40),
        })
    }
}

impl ReplyHeader {
    /// Creates an answer without rows.
    #[must_use]
    pub fn refusal(call: &CallHeader, status: CallStatus, retry_after_ms: u32) -> Self {
        let CallHeader { dtype, sequence, .. } = *call;
        Self { status, dtype, retry_after_ms, rows: 0, sequence, waited_us: 0, batch_rows: 0 }
    }

    /// Encodes the header for the wire.
    #[must_use]
    pub fn to_bytes(&self) -> Header {
        let mut header = [0; HEADER_BYTES];
        header[0..4].copy_from_slice(&REPLY_MAGIC.to_le_bytes());
        header[4..6].copy_from_slice(&[self.status as u8, self.dtype as u8]);
        header[8..12].copy_from_slice(&self.retry_after_ms.to_le_bytes());
        header[12..16].copy_from_slice(&self.rows.to_le_bytes());
        header[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        header[24..28].copy_from_slice(&self.waited_us.to_le_bytes());
        header[28..32].copy_from_slice(&self.batch_rows.to_le_bytes());
        header
    }

    /// Decodes a peer's header.
    ///
    /// # Errors
    /// Returns an error if the bytes are no valid reply header.
    pub fn from_bytes(header: &Header) -> Result<Self, HeaderError> {
        magic(header, REPLY_MAGIC)?;
        zero(header, &[6..8, 32..HEADER_BYTES])?;
        Ok(Self {
            status: CallStatus::from_code(header[4])?,
            dtype: Dtype::from_code(header[5])?,
            retry_after_ms: read_u32(header, 8),
            rows: read_u32(header, 12),
            sequence: long(header, 16),
            waited_us: read_u32(header, 24),
            batch_rows: read_u32(header, 28),
        })
    }
}

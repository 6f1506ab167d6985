//! What a split client and the executor's layer service say to each other, whatever carries it.
//!
//! A *call* is 64 bytes and rows of numbers: through shared memory a descriptor in a ring and a place in a slab
//! ([`crate::channel`]), through ZeroMQ a message of two frames ([`crate::zmtp`]). A *control message* opens a session and
//! fetches what the client must know of the base; it is a datagram beside the channel, or a message whose first frame
//! says [`CONTROL`].
//!
//! # Layout
//!
//! - this file: calls and replies
//! - [`control`]: control messages, and the catalog of sites
//! - [`seeded_rows`]: rows that do not travel, because both sides can make them

pub mod control;
pub mod seeded_rows;

/// Version of the layer protocol: calls, replies and control messages.
pub const LAYER_VERSION: u32 = 4;

/// Bytes of a call's or a reply's header.
pub const HEADER_BYTES: usize = 64;

/// First word of every header: version and kind, so that other bytes are seldom taken for one.
const CALL_MAGIC: u32 = u32::from_le_bytes(*b"HLC1");
const REPLY_MAGIC: u32 = u32::from_le_bytes(*b"HLR1");

/// First frame of a ZeroMQ message whose second frame is a control message.
pub const CONTROL: [u8; 4] = *b"HLM1";

/// Most rows of a call.
pub const MAX_ROWS: u32 = 1 << 16;

/// Why a header is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// It begins with something else.
    #[error("the header begins with {0:#010x}: the peer speaks another protocol or version")]
    Magic(u32),
    /// A code names nothing.
    #[error("the header's {what} is {code}, which names nothing")]
    Code {
        /// The name of the field.
        what: &'static str,
        /// What it holds.
        code: u8,
    },
    /// A number is beyond what the protocol allows.
    #[error("the header's {what} is {value}, above {most}")]
    Range {
        /// The name of the field.
        what: &'static str,
        /// What it holds.
        value: u64,
        /// What it may hold.
        most: u64,
    },
    /// Bytes that must be zero are not.
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
            /// All there are, by code.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// What a code names.
            ///
            /// # Errors
            /// If it names nothing.
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
    /// What is done with the rows.
    pub enum Op as "operation" {
        /// `x Wᵀ + bias`.
        Forward = 0,
        /// `x Wᵀ`.
        ForwardNoBias = 1,
        /// `g W`; nothing was saved for it.
        Backward = 2,
    }
}

coded! {
    /// With which arithmetic.
    pub enum Path as "path" {
        /// As the resident engine computes: the same bits as without a split.
        Fast = 0,
        /// Activations of 32 bits and the weights as stored: for training, masking, comparison.
        Linear = 1,
        /// Whole numbers modulo 2^48 or 2^64 and the weights' own integers: exact. Numbers have six or eight bytes, the lowest
        /// first, and lie one behind the other; rows of them travel as [`Dtype::F32`] and are never taken for floats. There is no
        /// bias.
        Ring = 2,
    }
}

coded! {
    /// Where the rows of a call come from.
    pub enum RowSource as "source of rows" {
        /// They follow.
        Rows = 0,
        /// A [`SeededRows`](seeded_rows::SeededRows) follows, from which the executor makes them; on the ring path alone.
        Draw = 1,
    }
}

coded! {
    /// What the rows are for; the lower, the more urgent.
    pub enum CallClass as "class" {
        /// Next tokens.
        Decode = 0,
        /// A drafted tree to verify.
        Verify = 1,
        /// A prompt.
        Prefill = 2,
        /// Fine-tuning, forward or backward.
        Training = 3,
        /// Effects of noise, computed ahead.
        Noise = 4,
    }
}

coded! {
    /// How numbers travel. Arithmetic is the same; bf16 rounds what is sent.
    pub enum Dtype as "number format" {
        /// 32 bits.
        F32 = 0,
        /// The upper 16 of these, rounded to the nearest even.
        Bf16 = 1,
    }
}

impl Dtype {
    /// Bytes of a number.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

coded! {
    /// What became of a call.
    pub enum CallStatus as "status" {
        /// The rows follow.
        Done = 0,
        /// The tenant's quota of rows or bytes is used up; `retry_after_ms` says when it is worth trying again.
        Quota = 1,
        /// Rows, widths or places do not fit the site.
        Shape = 2,
        /// Too many calls wait; try again after `retry_after_ms`.
        Busy = 3,
        /// The executor is about to end; open a session with its successor.
        Draining = 4,
        /// The site has no such path: what was asked must not be rounded, and would be.
        Nonlinear = 5,
        /// There is no such site or part.
        UnknownSite = 6,
        /// The number was used for another call, or is lower than one already answered.
        Sequence = 7,
        /// A fault in the executor; the call may be repeated.
        Failed = 8,
        /// Operation, path, number format and source of rows do not go together: the ring path has neither bias nor bf16, and no
        /// other has draws.
        Unsuited = 9,
    }
}

/// All linear layers of a site, in a header.
const ALL_PARTS: u8 = u8::MAX;

/// A call: these rows, through this site.
///
/// ```text
///  0 magic u32 | 4 op u8 | 5 path u8 | 6 class u8 | 7 dtype u8 | 8 site u32 | 12 part u8, 0xff: all | 13 source u8 | 14 zero [2]
/// 16 sequence u64 | 24 rows u32 | 28 zero u32 | 32 input u64 | 40 output u64 | 48 zero [16]
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallHeader {
    /// What to do.
    pub op: Op,
    /// With which arithmetic.
    pub path: Path,
    /// What its rows are for, and so how urgent it is.
    pub class: CallClass,
    /// How the rows travel, both ways.
    pub dtype: Dtype,
    /// Which site of the catalog.
    pub site: u32,
    /// One of its linear layers, or all.
    pub part: Option<u8>,
    /// Whether its rows follow.
    pub source: RowSource,
    /// Number of the call in its session: ascending. A call may be repeated with its number until it is answered.
    pub sequence: u64,
    /// Rows, 1 to [`MAX_ROWS`].
    pub rows: u32,
    /// Byte of the slab where the rows begin, a multiple of 64; 0 where there is no slab.
    pub input: u64,
    /// Byte of the slab where the answer goes, a multiple of 64; 0 where there is no slab.
    pub output: u64,
}

/// The answer to a call.
///
/// ```text
///  0 magic u32 | 4 status u8 | 5 dtype u8 | 6 zero u16 | 8 retry_after_ms u32 | 12 rows u32 | 16 sequence u64
/// 24 waited_us u32 | 28 batch_rows u32 | 32 zero [32]
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader {
    /// What became of it.
    pub status: CallStatus,
    /// As the call's.
    pub dtype: Dtype,
    /// When a refused call is worth repeating, in milliseconds.
    pub retry_after_ms: u32,
    /// Rows that follow: as many as the call had, or none.
    pub rows: u32,
    /// The call's number.
    pub sequence: u64,
    /// Microseconds the call waited for its turn.
    pub waited_us: u32,
    /// Rows it was computed together with, its own among them.
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
    /// As it travels.
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

    /// Reads one that a peer sent. Whether site, shape and places exist is for whoever knows the catalog.
    ///
    /// # Errors
    /// If it is none.
    pub fn from_bytes(header: &Header) -> Result<Self, HeaderError> {
        magic(header, CALL_MAGIC)?;
        zero(header, &[14..16, 28..32, 48..HEADER_BYTES])?;
        let rows = read_u32(header, 24);
        if rows == 0 || rows > MAX_ROWS {
            return Err(HeaderError::Range { what: "rows", value: rows.into(), most: MAX_ROWS.into() });
        }
        Ok(Self {
            op: Op::from_code(header[4])?,
            path: Path::from_code(header[5])?,
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
    /// An answer without rows.
    #[must_use]
    pub fn refusal(call: &CallHeader, status: CallStatus, retry_after_ms: u32) -> Self {
        let CallHeader { dtype, sequence, .. } = *call;
        Self { status, dtype, retry_after_ms, rows: 0, sequence, waited_us: 0, batch_rows: 0 }
    }

    /// As it travels.
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

    /// Reads one that a peer sent.
    ///
    /// # Errors
    /// If it is none.
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

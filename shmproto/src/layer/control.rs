//! Control messages: they open a session and fetch the catalog and the client weights.
//!
//! ```text
//! client                               executor
//!   Open(version, key, ...)      ->
//!                                <-    Opened(session, limits, catalog_bytes)   or Refused
//!   Fetch(CATALOG, 0, ...)       ->
//!                                <-    Fetched(...)                             until all of it is there
//!   (local) Channel(slab bytes)  ->
//!                                <-    ChannelReady, with a descriptor
//!   calls ...
//!   Close                        ->
//! ```

use super::SitePath;
use crate::fd_passing::{Connection, FdMessage, Listening};
use crate::{wire_enum, wire_struct};

/// Blob number of the encoded [`Catalog`]; blob `n + 1` is file `n` of [`Catalog::files`].
pub const CATALOG: u32 = 0;

/// Maximum number of bytes in one [`Fetched`].
pub const MAX_FETCH_BYTES: u32 = 48 << 10;

/// Maximum size of an encoded catalog in bytes.
pub const MAX_CATALOG_BYTES: u32 = 16 << 20;

/// Maximum size of a client's name in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// The executor's listening socket for control connections.
pub type LayersListener = Listening<FromLayers, ToLayers>;

/// Executor's end of a control connection.
pub type LayersEnd = Connection<FromLayers, ToLayers>;

/// Client's end of a control connection: `ClientEnd::to(path)`.
pub type ClientEnd = Connection<ToLayers, FromLayers>;

wire_enum! {
    /// Message from a client to the executor.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum ToLayers {
        /// First message; answered by [`FromLayers::Opened`] or [`FromLayers::Refused`].
        Open(SessionOpen) = 0,
        /// Request for part of a blob; answered by [`FromLayers::Fetched`] or [`FromLayers::Refused`].
        Fetch(Fetch) = 1,
        /// Request for a channel with a slab of at least this many bytes, in local sessions only. A second
        /// channel replaces the first, whose calls in flight are dropped. Answered by
        /// [`FromLayers::ChannelReady`] or [`FromLayers::Refused`].
        Channel(u64) = 2,
        /// Request for the session's usage; answered by [`FromLayers::Stats`].
        GetStats = 3,
        /// End of the session; not answered.
        Close = 4,
    }
}

wire_enum! {
    /// Message from the executor to a client.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum FromLayers {
        /// The session is open.
        Opened(SessionOpened) = 0,
        /// The request is refused; the session continues unless the request was [`ToLayers::Open`].
        Refused(SessionRefused) = 1,
        /// Requested part of a blob.
        Fetched(Fetched) = 2,
        /// New channel, with the descriptor of its region.
        ChannelReady(ChannelReady) = 3,
        /// Usage of the session.
        Stats(SessionStats) = 4,
        /// The executor is about to end and accepts no new calls.
        Draining = 5,
    }
}

impl FdMessage for ToLayers {
    fn descriptors(&self) -> usize {
        0
    }

    fn text_bytes(&self) -> usize {
        match self {
            Self::Open(SessionOpen { key, name, masking, .. }) => {
                key.len().max(name.len()).max(masking.len())
            }
            Self::Fetch(_) | Self::Channel(_) | Self::GetStats | Self::Close => 0,
        }
    }
}

impl FdMessage for FromLayers {
    fn descriptors(&self) -> usize {
        usize::from(matches!(self, Self::ChannelReady(_)))
    }

    fn text_bytes(&self) -> usize {
        match self {
            Self::Opened(opened) => opened.tenant.len(),
            Self::Refused(refused) => refused.message.len(),
            Self::Fetched(_) | Self::ChannelReady(_) | Self::Stats(_) | Self::Draining => 0,
        }
    }
}

wire_struct! {
    /// Identity and options of a client that opens a session.
    #[derive(Clone, PartialEq, Eq)]
    pub struct SessionOpen {
        /// [`super::LAYER_VERSION`] of the client.
        pub version: u32,
        /// [`crate::channel::LAYOUT_HASH`] of a local client, else 0.
        pub layout_hash: u64,
        /// API key, if the transport has not authenticated the client; empty for none.
        pub key: String,
        /// Name of the client in the operator's lists: at most 64 bytes, no control characters.
        pub name: String,
        /// Masking mode, shown to the operator and refused if unknown: `off`, `paper`, `pads` or `shares`.
        pub masking: String,
        /// Session to resume after a lost connection; 0 for a new one.
        pub session: u64,
    }
}

impl std::fmt::Debug for SessionOpen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { version, name, masking, session, .. } = self;
        let mut shown = f.debug_struct("Open");
        shown.field("version", version).field("name", name).field("masking", masking);
        shown.field("session", session).finish_non_exhaustive()
    }
}

wire_struct! {
    /// Number and limits of an open session.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SessionOpened {
        /// Number of the session, never used again by this executor.
        pub session: u64,
        /// Random number of the executor process; another process does not know this session.
        pub instance: u64,
        /// Tenant as which the client was authenticated.
        pub tenant: String,
        /// Size of the encoded [`Catalog`] in bytes.
        pub catalog_bytes: u32,
        /// Maximum number of rows in one call.
        pub max_rows: u32,
        /// Maximum number of waiting rows of the tenant, over all its sessions.
        pub max_waiting_rows: u32,
        /// Maximum number of bytes of the tenant in slabs and messages, over all its sessions.
        pub max_bytes: u64,
    }
}

wire_struct! {
    /// Byte range of a blob to fetch.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Fetch {
        /// Number of the blob: [`CATALOG`], or a file.
        pub blob: u32,
        /// Offset of the first byte.
        pub offset: u64,
        /// Number of bytes, at most [`MAX_FETCH_BYTES`].
        pub bytes: u32,
    }
}

wire_struct! {
    /// Bytes of a fetched blob.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Fetched {
        /// Number of the blob, as in the request.
        pub blob: u32,
        /// Offset of the first byte, as in the request.
        pub offset: u64,
        /// The requested bytes; fewer if the blob ends earlier.
        pub bytes: Vec<u8>,
    }
}

wire_struct! {
    /// Sizes of a new channel.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ChannelReady {
        /// Size of the region in bytes.
        pub region_bytes: u64,
        /// Size of the slab in bytes.
        pub slab_bytes: u64,
        /// Number of headers in each ring.
        pub depth: u32,
    }
}

wire_struct! {
    /// Reason of a refusal, in words that a person can act on.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SessionRefused {
        /// Kind of refusal, for programs.
        pub code: RefusalCode,
        /// Cause and next step, for people.
        pub message: String,
        /// Delay after which to retry, in milliseconds; 0 if a retry is useless.
        pub retry_after_ms: u32,
    }
}

wire_enum! {
    /// Kind of a refusal.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum RefusalCode {
        /// The client speaks another version or has another layout.
        Version = 0,
        /// The key or certificate is missing or invalid.
        Unauthenticated = 1,
        /// The tenant has reached its limit of sessions or bytes.
        Quota = 2,
        /// The executor has reached its limit of sessions.
        Busy = 3,
        /// The executor is about to end.
        Draining = 4,
        /// The message is malformed or not valid in this state.
        Malformed = 5,
        /// The blob does not exist, or the range is not entirely public.
        NoSuchBlob = 6,
        /// The masking mode is unknown, or the base has sites that cannot serve it.
        Masking = 7,
        /// The session to resume is unknown, or belongs to another tenant.
        NoSuchSession = 8,
    }
}

wire_struct! {
    /// Resources that a session has used.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct SessionStats {
        /// Number of calls answered with rows.
        pub calls: u64,
        /// Number of refused calls.
        pub refused: u64,
        /// Number of computed rows, by [`super::CallClass`].
        pub rows: [u64; 5],
        /// Number of row bytes received.
        pub bytes_in: u64,
        /// Number of row bytes sent.
        pub bytes_out: u64,
        /// Total time for which the session's calls were queued, in microseconds.
        pub wait_us: u64,
        /// Compute time in microseconds, shared in proportion to rows.
        pub compute_us: u64,
        /// Sum over the session's calls of the rows in their batches.
        pub batch_rows: u64,
    }
}

wire_struct! {
    /// Description of the base for split clients.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Catalog {
        /// Name that the operator gives the model.
        pub model: String,
        /// Architecture of the model, from its files.
        pub architecture: String,
        /// Content hash of the base.
        pub base_hash: [u8; 32],
        /// Longest sequence of the resident engine, in tokens; 0 without one.
        pub context_length: u32,
        /// Element type of the resident engine's KV cache: a client with the same type gets the same bits.
        pub kv_dtype: KvDtype,
        /// Element type of the resident engine's adapters.
        pub adapter_dtype: AdapterDtype,
        /// All sites, in the order of their numbers.
        pub sites: Vec<Site>,
        /// The model's files, without the linear layers, which clients do not need.
        pub files: Vec<ClientFileEntry>,
    }
}

wire_enum! {
    /// Element type of a KV cache.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum KvDtype {
        /// Single precision, 32 bits.
        F32 = 0,
        /// Half precision: 16 bits, 11 of them precision.
        F16 = 1,
        /// 8 bits, with a 32-bit scale for each key and each value of a head: its largest magnitude / 127.
        Int8 = 2,
        /// Brain float: 16 bits, 8 of them precision, also for queries and softmax weights.
        Bf16 = 3,
    }
}

wire_enum! {
    /// Element type of adapters in the resident engine.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum AdapterDtype {
        /// As many bits as the adapter's own values need.
        Exact = 0,
        /// Half precision: 16 bits, 11 of them precision; multiplied in 32 bits.
        F16 = 1,
        /// Brain float: 16 bits, 8 of them precision, also for the activations that are multiplied with them.
        Bf16 = 2,
    }
}

wire_struct! {
    /// Linear group that split clients can call.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Site {
        /// Number of input features.
        pub columns: u32,
        /// Available paths. Bit 0: quantized; bit 1: float; bit 2: both compute the same; bit 3: modular.
        pub paths: u8,
        /// Linear layers of the site, with their outputs side by side.
        pub parts: Vec<SiteLayer>,
        /// Parameters of the modular path; present if bit 3 is set.
        pub ring: Option<ModularWeights>,
    }
}

/// A site's paths before they are a number of bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SitePaths {
    /// The quantized path computes what the float path computes.
    pub fast_is_linear: bool,
    /// The site has the modular path.
    pub has_ring: bool,
}

impl SitePaths {
    const FAST: u8 = 1;
    const LINEAR: u8 = 2;
    const FAST_IS_LINEAR: u8 = 4;
    const RING: u8 = 8;

    /// Returns the field [`Site::paths`]. Every site has the quantized path and the float path.
    #[must_use]
    pub fn to_bits(self) -> u8 {
        let optional = [(self.fast_is_linear, Self::FAST_IS_LINEAR), (self.has_ring, Self::RING)];
        let optional = optional.into_iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit);
        optional.fold(Self::FAST | Self::LINEAR, |bits, bit| bits | bit)
    }
}

impl Site {
    /// True if the site computes on `path`.
    #[must_use]
    pub fn has_path(&self, path: SitePath) -> bool {
        let bits = match path {
            SitePath::Fast => SitePaths::FAST,
            SitePath::Linear => SitePaths::LINEAR | SitePaths::FAST_IS_LINEAR,
            SitePath::Ring => SitePaths::RING,
        };
        self.paths & bits != 0
    }
}

wire_struct! {
    /// Integers of a site's weights: each weight is one of them times `2^weight_exponent`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ModularWeights {
        /// Exponent of two for the weights of all parts.
        pub weight_exponent: i32,
        /// Largest sum of weight magnitudes over one output, forward and backward; bounds the answers.
        pub l1: [u64; 2],
        /// Hash of the integers: executors with equal hashes have equal weights.
        pub commitment: [u8; 32],
    }
}

wire_struct! {
    /// Linear layer of a site.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SiteLayer {
        /// Name of the module.
        pub name: String,
        /// Number of output features.
        pub rows: u32,
        /// 1 if the layer adds a bias, else 0.
        pub has_bias: u8,
    }
}

wire_struct! {
    /// File of which only some ranges are public; a client's copy has holes elsewhere.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ClientFileEntry {
        /// Plain file name, without directories.
        pub name: String,
        /// Size of the complete file in bytes.
        pub bytes: u64,
        /// Offset and length of each range in bytes, ascending.
        pub ranges: Vec<(u64, u64)>,
    }
}

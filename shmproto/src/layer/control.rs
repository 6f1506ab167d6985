//! Control messages: opening a session, and fetching what a client must know of the base.
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

use crate::fd_passing::{Connection, FdMessage, Listening};
use crate::{wire_enum, wire_struct};

/// The blob that is the [`Catalog`], encoded; blob `n + 1` is file `n` of [`Catalog::files`].
pub const CATALOG: u32 = 0;

/// Most bytes of one [`Fetched`].
pub const MAX_FETCH_BYTES: u32 = 48 << 10;

/// Most bytes of a catalog.
pub const MAX_CATALOG_BYTES: u32 = 16 << 20;

/// Most bytes of what a client calls itself.
pub const MAX_NAME_BYTES: usize = 64;

/// The executor's socket beside its channels.
pub type LayersListener = Listening<FromLayers, ToLayers>;

/// The executor's end of a connection over that socket.
pub type LayersEnd = Connection<FromLayers, ToLayers>;

/// The client's end: `ClientEnd::to(path)`.
pub type ClientEnd = Connection<ToLayers, FromLayers>;

wire_enum! {
    /// From a client to the executor.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum ToLayers {
        /// First message; answered by [`FromLayers::Opened`] or [`FromLayers::Refused`].
        Open(SessionOpen) = 0,
        /// Part of a blob; answered by [`FromLayers::Fetched`] or [`FromLayers::Refused`].
        Fetch(Fetch) = 1,
        /// A slab of at least this many bytes; local sessions only. A second time replaces the first: what was in
        /// flight is forgotten. Answered by [`FromLayers::ChannelReady`] or [`FromLayers::Refused`].
        Channel(u64) = 2,
        /// What the session has used; answered by [`FromLayers::Stats`].
        GetStats = 3,
        /// The session ends; not answered.
        Close = 4,
    }
}

wire_enum! {
    /// From the executor to a client.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum FromLayers {
        /// The session is open.
        Opened(SessionOpened) = 0,
        /// What was asked for is refused; the session goes on unless it was [`ToLayers::Open`].
        Refused(SessionRefused) = 1,
        /// Part of a blob.
        Fetched(Fetched) = 2,
        /// The channel; with the descriptor of its region.
        ChannelReady(ChannelReady) = 3,
        /// What the session has used.
        Stats(SessionStats) = 4,
        /// The executor is about to end: no new calls are taken.
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
    /// Who wants a session.
    #[derive(Clone, PartialEq, Eq)]
    pub struct SessionOpen {
        /// [`super::LAYER_VERSION`] of the client.
        pub version: u32,
        /// [`crate::channel::LAYOUT_HASH`] of a local client, else 0.
        pub layout_hash: u64,
        /// API key, where the transport has not said who the client is; empty for none.
        pub key: String,
        /// What the client calls itself in the operator's lists: at most 64 bytes, no control characters.
        pub name: String,
        /// How it protects its activations; told to the operator, and refused if unknown: `off`, `paper`,
        /// `pads` or `shares`.
        pub masking: String,
        /// A session to take over after a lost connection; 0 for a new one.
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
    /// A session.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SessionOpened {
        /// Its number, never used again by this executor.
        pub session: u64,
        /// Chosen at random when the executor starts; another one knows nothing of this session.
        pub instance: u64,
        /// The tenant the client was authenticated as.
        pub tenant: String,
        /// Bytes of the encoded [`Catalog`].
        pub catalog_bytes: u32,
        /// Most rows of one call.
        pub max_rows: u32,
        /// Rows the tenant may have waiting, over all its sessions.
        pub max_waiting_rows: u32,
        /// Bytes the tenant may have in slabs and messages, over all its sessions.
        pub max_bytes: u64,
    }
}

wire_struct! {
    /// Which part of which blob.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Fetch {
        /// [`CATALOG`], or a file.
        pub blob: u32,
        /// First byte.
        pub offset: u64,
        /// How many, at most [`MAX_FETCH_BYTES`].
        pub bytes: u32,
    }
}

wire_struct! {
    /// Part of a blob.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Fetched {
        /// As asked.
        pub blob: u32,
        /// As asked.
        pub offset: u64,
        /// As many as were asked for, or what there is of them.
        pub bytes: Vec<u8>,
    }
}

wire_struct! {
    /// A channel was made.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ChannelReady {
        /// Bytes of the region.
        pub region_bytes: u64,
        /// Bytes of the slab in it.
        pub slab_bytes: u64,
        /// Descriptors of each ring.
        pub depth: u32,
    }
}

wire_struct! {
    /// Why not, in words a person can act on.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SessionRefused {
        /// For programs.
        pub code: RefusalCode,
        /// For people: cause and next step.
        pub message: String,
        /// When it is worth trying again, in milliseconds; 0 if it is not.
        pub retry_after_ms: u32,
    }
}

wire_enum! {
    /// What kind of refusal.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum RefusalCode {
        /// The client speaks another version or has another layout.
        Version = 0,
        /// No, or no valid, key or certificate.
        Unauthenticated = 1,
        /// The tenant has as many sessions or bytes as it may.
        Quota = 2,
        /// The executor has as many sessions as it takes.
        Busy = 3,
        /// The executor is about to end.
        Draining = 4,
        /// The message makes no sense here.
        Malformed = 5,
        /// There is no such blob, or not all of it is given out.
        NoSuchBlob = 6,
        /// The masking mode is unknown, or the base has sites that cannot serve it.
        Masking = 7,
        /// The session to take over is not known, or another tenant's.
        NoSuchSession = 8,
    }
}

wire_struct! {
    /// What a session has used.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct SessionStats {
        /// Calls answered with rows.
        pub calls: u64,
        /// Calls refused.
        pub refused: u64,
        /// Rows computed, by [`super::CallClass`].
        pub rows: [u64; 5],
        /// Bytes of rows received.
        pub bytes_in: u64,
        /// Bytes of rows sent.
        pub bytes_out: u64,
        /// Microseconds its calls waited for their turn.
        pub wait_us: u64,
        /// Microseconds of computing, shared in proportion to rows.
        pub compute_us: u64,
        /// Rows of the batches its calls were computed in.
        pub batch_rows: u64,
    }
}

wire_struct! {
    /// What a client must know of the base.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Catalog {
        /// What the operator calls the model.
        pub model: String,
        /// Its architecture, as its files say.
        pub architecture: String,
        /// Content identity of the base.
        pub base_hash: [u8; 32],
        /// Longest sequence of the resident engine, in tokens; 0 without one.
        pub context_length: u32,
        /// How the resident engine keeps keys and values: a client that does likewise answers with the same bits.
        pub kv_dtype: KvDtype,
        /// How it keeps adapters.
        pub adapter_dtype: AdapterDtype,
        /// The sites, by number.
        pub sites: Vec<Site>,
        /// The model's files, as far as a client needs them: everything but the linear layers.
        pub files: Vec<ClientFileEntry>,
    }
}

wire_enum! {
    /// The numbers of keys and values.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum KvDtype {
        /// 32 bits.
        F32 = 0,
        /// 16 bits, 11 of them precision.
        F16 = 1,
        /// 8 bits, and a scale of 32 for each key and each value of a head: its largest magnitude / 127.
        Int8 = 2,
    }
}

wire_enum! {
    /// The numbers of adapters.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum AdapterDtype {
        /// As many bits as hold the adapter's own.
        Exact = 0,
        /// 16 bits, 11 of them precision; multiplied in 32.
        F16 = 1,
        /// 16 bits, 8 of them precision, and so are the activations they meet.
        Bf16 = 2,
    }
}

wire_struct! {
    /// A linear group.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Site {
        /// Input features.
        pub columns: u32,
        /// Bit 0: it has the fast path; bit 1: the linear path; bit 2: both are the same arithmetic; bit 3: the ring path.
        pub paths: u8,
        /// Its linear layers, outputs side by side.
        pub parts: Vec<SiteLayer>,
        /// What there is to know of the ring path; there if bit 3 is set.
        pub ring: Option<ModularWeights>,
    }
}

wire_struct! {
    /// The integers that the weights of a site consist of: each weight is one of them times `2^weight_exponent`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ModularWeights {
        /// Of all parts.
        pub weight_exponent: i32,
        /// The largest sum of magnitudes that an output is a product with, forward and backward: what bounds its answer.
        pub l1: [u64; 2],
        /// Hash of the integers: executors with the same have the same weights.
        pub commitment: [u8; 32],
    }
}

wire_struct! {
    /// A linear layer of a site.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct SiteLayer {
        /// Name of the module.
        pub name: String,
        /// Output features.
        pub rows: u32,
        /// 1 if it adds a bias.
        pub has_bias: u8,
    }
}

wire_struct! {
    /// A file of which only some ranges are given out; elsewhere a client's copy has holes.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ClientFileEntry {
        /// A plain file name.
        pub name: String,
        /// Its whole length.
        pub bytes: u64,
        /// First byte and length of each range, ascending.
        pub ranges: Vec<(u64, u64)>,
    }
}

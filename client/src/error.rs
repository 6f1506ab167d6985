//! What can go wrong between a client and its executor.
//!
//! [`LinkError`] is about one connection; a session mends most of them by making another. [`CallError`] is what remains
//! after that: what a caller is told. `pads`: what of it is about pads.

mod pads;

use std::io;

use shmproto::{
    fd_passing::ConnectError,
    layer::control::{RefusalCode, SessionRefused},
};

pub use self::pads::PoolError;

/// Why a connection could not be made, or is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Nobody is there, on this host.
    #[error(transparent)]
    Local(#[from] ConnectError),
    /// Nobody is there.
    #[error("{address} cannot be reached ({source}): is the executor running, with its layer service on?")]
    Unreachable {
        /// The executor's, as it was written.
        address: String,
        /// Cause.
        source: io::Error,
    },
    /// It ended.
    #[error("the connection to the executor was lost ({0})")]
    Lost(String),
    /// Nothing came.
    #[error("the executor has not answered for {waited_ms} ms")]
    Silent {
        /// For how long.
        waited_ms: u64,
    },
    /// What came makes no sense.
    #[error("the executor breaks the protocol ({0}): client and executor must be of one version")]
    Protocol(String),
    /// TLS could not be agreed upon.
    #[error("TLS with {address} failed ({reason}): see --ca, --cert and --cert-key")]
    Tls {
        /// With whom.
        address: String,
        /// Cause.
        reason: String,
    },
    /// The executor does not know this client.
    #[error("the executor does not accept this client ({0}): show another API key or certificate")]
    Unauthenticated(String),
    /// A file with certificates or a key is not what it should be.
    #[error(transparent)]
    Credentials(#[from] security::tls_client::CredentialsError),
    /// The executor said no to a control message.
    #[error("the executor refuses ({}): {}", refusal_text(.0.code), .0.message)]
    Refused(SessionRefused),
    /// The executor is about to end.
    #[error("the executor is about to end: its successor will take the call")]
    Draining,
}

impl LinkError {
    /// An error of a socket that was open.
    pub(crate) fn lost(error: &io::Error) -> Self {
        Self::Lost(error.to_string())
    }

    /// True if another connection may go better.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Lost(_) | Self::Silent { .. } | Self::Draining => true,
            Self::Local(error) => !matches!(error, ConnectError::Path(_) | ConnectError::Stranger { .. }),
            Self::Refused(refused) => match refused.code {
                RefusalCode::Draining => true,
                RefusalCode::Quota | RefusalCode::Busy => refused.retry_after_ms > 0,
                _ => false,
            },
            Self::Protocol(_) | Self::Tls { .. } | Self::Unauthenticated(_) | Self::Credentials(_) => false,
        }
    }

    /// When the peer says it is worth trying again, in milliseconds.
    pub(crate) fn retry_after_ms(&self) -> u32 {
        match self {
            Self::Refused(refused) => refused.retry_after_ms,
            _ => 0,
        }
    }
}

/// A refusal in a word.
fn refusal_text(code: RefusalCode) -> &'static str {
    match code {
        RefusalCode::Version => "another version",
        RefusalCode::Unauthenticated => "not authenticated",
        RefusalCode::Quota => "quota",
        RefusalCode::Busy => "busy",
        RefusalCode::Draining => "ending",
        RefusalCode::Malformed => "malformed",
        RefusalCode::NoSuchBlob => "no such file",
        RefusalCode::Masking => "masking",
        RefusalCode::NoSuchSession => "no such session",
    }
}

/// Why a call, or the session it belongs to, ended without an answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The connection could not be made, and trying again would not help.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The executor went away and has not come back.
    #[error(
        "the executor (instance {instance:016x}) is gone, and no successor came within {waited_ms} ms: start it again \
         and repeat the request"
    )]
    PeerGone {
        /// Which one it was.
        instance: u64,
        /// How long it was waited for.
        waited_ms: u64,
        /// What the last attempt met.
        source: LinkError,
    },
    /// Another base is served now.
    #[error(
        "the executor now serves another base ({found:.12}) than this session began with ({had:.12}): begin a new \
         session; what was computed cannot go on"
    )]
    OtherBase {
        /// As hexadecimal.
        had: String,
        /// As hexadecimal.
        found: String,
    },
    /// The tenant may have no more rows or bytes waiting.
    #[error(
        "the quota of tenant `{tenant}` was used up for {waited_ms} ms: run fewer clients, or ask the operator for more"
    )]
    Quota {
        /// Whose.
        tenant: String,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// Too many calls waited.
    #[error("the executor was busy for {waited_ms} ms: try again later")]
    Busy {
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// Rows or widths do not fit.
    #[error("{rows} rows do not fit site {site} ({reason}): client and executor disagree about the base")]
    Shape {
        /// Which site.
        site: u32,
        /// Rows of the call.
        rows: usize,
        /// In what way.
        reason: &'static str,
    },
    /// The site cannot be asked without rounding.
    #[error(
        "site {site} has no linear path, which masking and training need: use `--masking off`, or another base"
    )]
    Nonlinear {
        /// Which site.
        site: u32,
    },
    /// The site cannot be asked exactly.
    #[error(
        "site {site} has no ring path, which pads, shares and --verify need: whoever runs the executor offers it with \
         `[layers] exact = true` (--layer-exact), but for bases that come from a disk"
    )]
    NoRing {
        /// Which site.
        site: u32,
    },
    /// What is asked does not go together.
    #[error(
        "a call to site {site} does not go together ({reason}): client and executor must be of one version"
    )]
    Unsuited {
        /// Which site.
        site: u32,
        /// In what way.
        reason: &'static str,
    },
    /// A row is none.
    #[error("row {row} of {site} holds what is no number, or infinite: the model or the adapter overflows")]
    NotFinite {
        /// Which site.
        site: String,
        /// Which row of the call.
        row: usize,
    },
    /// An executor's answer is not what the weights make of what it was asked.
    #[error("the executor's answer at {site} is wrong: it computes with other weights, or lies; use another")]
    Wrong {
        /// Which site.
        site: String,
    },
    /// Two that should have the same weights do not.
    #[error(
        "the weights differ at {site}: both executors, and a model at hand, must be of one release of one model"
    )]
    OtherWeights {
        /// Where first.
        site: String,
    },
    /// Weights are not those that this client pinned.
    #[error("the executor commits to weights {found}, and {pinned} were asked for by --commitment")]
    OtherCommitment {
        /// As hexadecimal.
        pinned: String,
        /// As hexadecimal.
        found: String,
    },
    /// Both shares would be in one hand.
    #[error(
        "both executors are one (instance {instance:016x}), which would see everything: name another with --second-executor"
    )]
    SameExecutor {
        /// Which one.
        instance: u64,
    },
    /// There are no pads.
    #[error(transparent)]
    Pads(Box<PoolError>),
    /// The masking mode cannot be had.
    #[error("masking is not possible: {0}; or say `--masking off`, and the executor sees activations")]
    Masking(&'static str),
    /// The catalog has no such site.
    #[error("the executor has no site {site}: its base is of another shape")]
    UnknownSite {
        /// Which site.
        site: u32,
    },
    /// The executor failed on the call, again and again.
    #[error("the executor failed {attempts} times on a call to site {site}: its log says why")]
    Failed {
        /// Which site.
        site: u32,
        /// How often it was tried.
        attempts: u32,
    },
}

impl CallError {
    /// A link's error as a call's: refusals for lack of room have names of their own.
    pub(crate) fn of_link(error: LinkError, tenant: &str, waited_ms: u64) -> Self {
        match &error {
            LinkError::Refused(refused) if refused.code == RefusalCode::Quota => {
                Self::Quota { tenant: tenant.to_owned(), waited_ms }
            }
            LinkError::Refused(refused) if refused.code == RefusalCode::Busy => Self::Busy { waited_ms },
            _ => Self::Link(error),
        }
    }
}

/// The client's own device, its CPU, does not fail.
impl From<std::convert::Infallible> for CallError {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

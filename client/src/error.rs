//! Errors between a client and its executor.
//!
//! A [`LinkError`] concerns one connection; a session recovers from most of them with another connection. A
//! [`CallError`] is a failure after these retries, which the caller gets. `pads`: errors of pads on disk.

mod pads;

use std::io;

use shmproto::{
    fd_passing::ConnectError,
    layer::control::{RefusalCode, SessionRefused},
};

pub use self::pads::PoolError;

/// Reason why a connection failed or cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// An executor on this host cannot be reached.
    #[error(transparent)]
    Local(#[from] ConnectError),
    /// The executor cannot be reached.
    #[error("cannot reach {address} ({source}): start the executor with its layer service")]
    Unreachable {
        /// Address, as the user wrote it.
        address: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The connection was closed or broke.
    #[error("the connection to the executor was lost ({0})")]
    Lost(String),
    /// The executor sent no data for too long.
    #[error("the executor has not answered for {waited_ms} ms")]
    Silent {
        /// Waiting time, in milliseconds.
        waited_ms: u64,
    },
    /// The executor sent invalid data.
    #[error("the executor broke the protocol ({0}): use client and executor of the same version")]
    Protocol(String),
    /// The TLS handshake or connection failed.
    #[error("TLS with {address} failed ({reason}): see --ca, --cert and --cert-key")]
    Tls {
        /// Address of the executor.
        address: String,
        /// Reason of the failure.
        reason: String,
    },
    /// The executor does not know this client.
    #[error("the executor does not accept this client ({0}): use another API key or certificate")]
    Unauthenticated(String),
    /// A file with certificates or a key is not valid.
    #[error(transparent)]
    Credentials(#[from] security::tls_client::CredentialsError),
    /// The executor refused a control message.
    #[error("the executor refuses ({}): {}", refusal_text(.0.code), .0.message)]
    Refused(SessionRefused),
    /// The executor is shutting down.
    #[error("the executor is shutting down: repeat the call with its successor")]
    Draining,
}

impl LinkError {
    pub(crate) fn lost(error: &io::Error) -> Self {
        Self::Lost(error.to_string())
    }

    /// True if another connection may succeed.
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

    /// Returns the peer's retry delay, in milliseconds; 0 without one.
    pub(crate) fn retry_after_ms(&self) -> u32 {
        match self {
            Self::Refused(refused) => refused.retry_after_ms,
            _ => 0,
        }
    }
}

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

/// Reason why a call, or its session, ended without an answer.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The connection failed, and a retry would not help.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The executor is gone and has not come back.
    #[error(
        "the executor (instance {instance:016x}) ended, and no successor started within {waited_ms} ms: \
         restart it and repeat the request"
    )]
    PeerGone {
        /// Instance number of the lost executor.
        instance: u64,
        /// Waiting time, in milliseconds.
        waited_ms: u64,
        /// Error of the last attempt.
        source: LinkError,
    },
    /// The executor now serves another base.
    #[error(
        "the executor now serves another base ({found:.12}) than at the start of the session \
         ({had:.12}): begin a new session"
    )]
    OtherBase {
        /// Content hash of the session's base, in hexadecimal digits.
        had: String,
        /// Content hash of the present base, in hexadecimal digits.
        found: String,
    },
    /// The tenant's quota of waiting rows or bytes was used up.
    #[error(
        "the quota of tenant `{tenant}` was used up for {waited_ms} ms: run fewer clients, or ask the \
         operator for a higher quota"
    )]
    Quota {
        /// Name of the tenant.
        tenant: String,
        /// Waiting time, in milliseconds.
        waited_ms: u64,
    },
    /// Too many calls waited at the executor.
    #[error("the executor was busy for {waited_ms} ms: try again later")]
    Busy {
        /// Waiting time, in milliseconds.
        waited_ms: u64,
    },
    /// The rows do not fit the site.
    #[error("{rows} rows do not fit site {site} ({reason}): client and executor disagree about the base")]
    Shape {
        /// Number of the site.
        site: u32,
        /// Number of rows in the call.
        rows: usize,
        /// Description of the mismatch.
        reason: &'static str,
    },
    /// The site has no float path.
    #[error(
        "site {site} has no linear path, which masking and training need: use `--masking off`, or another base"
    )]
    Nonlinear {
        /// Number of the site.
        site: u32,
    },
    /// The site has no modular path.
    #[error(
        "site {site} has no ring path, which pads, shares and --verify need: the operator can enable it \
         with `[layers] exact = true` (--layer-exact), except for streamed bases"
    )]
    NoRing {
        /// Number of the site.
        site: u32,
    },
    /// The parameters of the call contradict each other.
    #[error("a call to site {site} is not valid ({reason}): use client and executor of the same version")]
    Unsuited {
        /// Number of the site.
        site: u32,
        /// Description of the contradiction.
        reason: &'static str,
    },
    /// A row contains a value that is not finite.
    #[error("row {row} of {site} has NaN or infinite values: the model or the adapter overflows")]
    NotFinite {
        /// Name of the site.
        site: String,
        /// Number of the row in the call.
        row: usize,
    },
    /// The executor's answer contradicts the weights.
    #[error(
        "the executor's answer at {site} is wrong: it uses other weights or is dishonest; use another \
         executor"
    )]
    Wrong {
        /// Name of the site.
        site: String,
    },
    /// Two models that must have the same weights differ.
    #[error("the weights differ at {site}: both executors and a local model must use the same model files")]
    OtherWeights {
        /// The first site that differs.
        site: String,
    },
    /// The weights are not those that this client pinned.
    #[error("the executor serves the weights {found}, but --commitment requires {pinned}")]
    OtherCommitment {
        /// The pinned hash, in hexadecimal digits.
        pinned: String,
        /// The executor's hash, in hexadecimal digits.
        found: String,
    },
    /// Both shares would go to the same executor.
    #[error(
        "both executors are the same (instance {instance:016x}), which would see everything: name \
         another with --second-executor"
    )]
    SameExecutor {
        /// Instance number of the executor.
        instance: u64,
    },
    /// No pads are available.
    #[error(transparent)]
    Pads(Box<PoolError>),
    /// The masking mode is not possible here.
    #[error("masking is not possible: {0}; or use --masking off, with which the executor sees activations")]
    Masking(&'static str),
    /// The catalog has no such site.
    #[error("the executor has no site {site}: its base has another shape")]
    UnknownSite {
        /// Number of the site.
        site: u32,
    },
    /// The executor failed repeatedly on the call.
    #[error("the executor failed {attempts} times on a call to site {site}: see its log")]
    Failed {
        /// Number of the site.
        site: u32,
        /// Number of failed attempts.
        attempts: u32,
    },
}

impl CallError {
    /// Converts a connection's error into a call's error; quota and busy refusals become their own variants.
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

/// The client's own device, its CPU, never fails.
impl From<std::convert::Infallible> for CallError {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

//! Why an adapter was not fetched. All who wait for one fetch get the same error.

use std::{sync::Arc, time::Duration};

use super::{AdapterError, ResidencyError};
use crate::{
    adapters::{
        jail::JailError,
        store::{BucketError, StoreError},
        uri::UriError,
    },
    executor::CallError,
};

#[derive(Debug, Clone, thiserror::Error)]
pub enum FetchError {
    #[error(transparent)]
    Uri(#[from] UriError),
    #[error(
        "'{0}' cannot be fetched, because this server allows no URIs; set --allowed-adapter-uris, or load the \
         adapter by a path"
    )]
    Disabled(String),
    #[error(
        "'{0}' is not below a prefix from which adapters may be fetched (--allowed-adapter-uris); use another \
         URI, or ask the administrator to allow this one"
    )]
    NotAllowed(String),
    #[error("'{uri}' cannot be fetched, because HF_HUB_OFFLINE forbids downloads; unset it on the server")]
    Offline { uri: String },
    /// The source answered that there is no such adapter, or that the server may not read it.
    #[error(
        "'{uri}' has no {what}, or the server may not read it; check the URI and the server's credentials"
    )]
    Missing {
        uri: String,
        /// File or repository that was not found.
        what: String,
    },
    /// The source could not be reached, broke off, or broke its protocol.
    #[error("fetching '{uri}' failed: {reason}; try again later")]
    Failed { uri: String, reason: String },
    #[error("fetching '{uri}' took longer than {limit_ms} ms (--fetch-timeout-ms); try again later")]
    Timeout { uri: String, limit_ms: u128 },
    #[error(
        "the weights of '{uri}' have the SHA-256 {found}, not {expected}; check where the digest comes from"
    )]
    OtherDigest { uri: String, expected: String, found: String },
    #[error(
        "'{uri}' has {bytes} bytes, and a tenant's adapters loaded by URI may have {limit_bytes} \
         (--tenant-fetched-bytes), without those in use or pinned; try again later, or remove some"
    )]
    Quota { uri: String, bytes: u64, limit_bytes: u64 },
    #[error("{0} adapters of this tenant are being fetched, which is the limit; try again shortly")]
    Busy(usize),
    /// The files were fetched, but are not an adapter that can be loaded.
    #[error(transparent)]
    Load(Arc<AdapterError>),
    #[error("fetching '{0}' ended without a result; see the log")]
    Stopped(String),
}

impl FetchError {
    /// Whether a repetition at once would fail too, so that the failure is worth remembering.
    pub(in crate::adapters) fn lasts(&self) -> bool {
        match self {
            Self::Busy(_) | Self::Stopped(_) => false,
            Self::Load(error) => matches!(
                **error,
                AdapterError::NoModules(_)
                    | AdapterError::Text(_)
                    | AdapterError::Store(StoreError::Jail(_) | StoreError::TooLarge { .. })
                    | AdapterError::Residency(
                        ResidencyError::NeverFits(_) | ResidencyError::Call(CallError::Refused(_))
                    )
            ),
            _ => true,
        }
    }
}

/// A fetch failed, now or recently.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
pub struct FetchRefusal {
    pub error: FetchError,
    /// Time after which the fetch is tried again; `None` if no failure is remembered.
    pub retry_after: Option<Duration>,
}

impl From<FetchError> for FetchRefusal {
    fn from(error: FetchError) -> Self {
        Self { error, retry_after: None }
    }
}

impl From<AdapterError> for FetchError {
    fn from(error: AdapterError) -> Self {
        match error {
            AdapterError::Fetch(refusal) => refusal.error,
            error => Self::Load(Arc::new(error)),
        }
    }
}

impl From<StoreError> for FetchError {
    fn from(error: StoreError) -> Self {
        Self::Load(Arc::new(error.into()))
    }
}

impl From<JailError> for FetchError {
    fn from(error: JailError) -> Self {
        StoreError::from(error).into()
    }
}

impl FetchError {
    /// Returns the error of reading `uri` from its bucket.
    pub(in crate::adapters) fn of_bucket(uri: &str, error: &BucketError) -> Self {
        Self::Failed { uri: uri.to_owned(), reason: error.to_string() }
    }
}

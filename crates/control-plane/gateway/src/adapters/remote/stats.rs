//! Counters of fetches, by scheme and outcome.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::adapters::uri::UriScheme;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchOutcome {
    Fetched,
    Failed,
    /// The URI is not allowed.
    Refused,
    /// A recent failure was repeated without a fetch.
    Remembered,
}

impl FetchOutcome {
    pub(crate) const EACH: [Self; 4] = [Self::Fetched, Self::Failed, Self::Refused, Self::Remembered];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fetched => "fetched",
            Self::Failed => "failed",
            Self::Refused => "refused",
            Self::Remembered => "remembered",
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct FetchCounters([SchemeCounters; UriScheme::EACH.len()]);

#[derive(Debug, Default)]
struct SchemeCounters {
    outcomes: [AtomicU64; FetchOutcome::EACH.len()],
    bytes: AtomicU64,
}

/// Counts of one scheme since the gateway started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SchemeStats {
    pub(crate) scheme: UriScheme,
    pub(crate) outcomes: [(FetchOutcome, u64); FetchOutcome::EACH.len()],
    /// Bytes of files received, also by fetches that failed.
    pub(crate) bytes: u64,
}

/// Counts received bytes of one scheme.
pub(super) struct FetchedBytes<'a>(&'a AtomicU64);

impl FetchedBytes<'_> {
    pub(super) fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Relaxed);
    }
}

impl FetchCounters {
    pub(super) fn count(&self, scheme: UriScheme, outcome: FetchOutcome) {
        self.0[scheme as usize].outcomes[outcome as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn bytes(&self, scheme: UriScheme) -> FetchedBytes<'_> {
        FetchedBytes(&self.0[scheme as usize].bytes)
    }

    pub(super) fn read(&self) -> [SchemeStats; UriScheme::EACH.len()] {
        UriScheme::EACH.map(|scheme| {
            let counters = &self.0[scheme as usize];
            let count = |outcome: FetchOutcome| (outcome, counters.outcomes[outcome as usize].load(Relaxed));
            SchemeStats {
                scheme,
                outcomes: FetchOutcome::EACH.map(count),
                bytes: counters.bytes.load(Relaxed),
            }
        })
    }
}

//! Records of batches, as the database stores them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{caller::KeyRole, clock::seconds_since_1970};

/// Route that answers the lines of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchEndpoint {
    ChatCompletions,
    Completions,
    Embeddings,
    Responses,
}

impl BatchEndpoint {
    pub(crate) const ALL: [Self; 4] =
        [Self::ChatCompletions, Self::Completions, Self::Embeddings, Self::Responses];

    #[must_use]
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
        }
    }
}

/// A batch as its caller described it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchSpec {
    pub(crate) endpoint: BatchEndpoint,
    /// Id of the file with the lines.
    pub(crate) input_file: String,
    /// Seconds after which the result files are deleted; `None` keeps them.
    pub(crate) output_ttl_s: Option<u64>,
    /// Free key-value pairs of the caller.
    pub(crate) metadata: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchStatus {
    /// The input file is being checked.
    Validating,
    /// The input file has faults, and no line was computed.
    Failed,
    InProgress,
    /// The result files are being stored.
    Finalizing,
    Completed,
    /// The window ended before all lines were computed.
    Expired,
    Cancelling,
    Cancelled,
}

impl BatchStatus {
    /// True if the status cannot change any more.
    #[must_use]
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Self::Failed | Self::Completed | Self::Expired | Self::Cancelled)
    }

    /// Name in the API.
    #[must_use]
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Validating => "validating",
            Self::Failed => "failed",
            Self::InProgress => "in_progress",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Expired => "expired",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Role of the key that created a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchRole {
    User,
    Admin,
}

impl From<KeyRole> for BatchRole {
    /// Routes for batches admit no other role than these two.
    fn from(role: KeyRole) -> Self {
        if role == KeyRole::Admin { Self::Admin } else { Self::User }
    }
}

impl From<BatchRole> for KeyRole {
    fn from(role: BatchRole) -> Self {
        match role {
            BatchRole::User => Self::User,
            BatchRole::Admin => Self::Admin,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct LineCounts {
    pub(crate) total: u64,
    /// Lines that were answered with a status below 400.
    pub(crate) completed: u64,
    /// Lines in the error file.
    pub(crate) failed: u64,
}

/// Tokens of all answers of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct BatchUsage {
    pub(crate) input_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) reasoning_tokens: u64,
}

impl BatchUsage {
    pub(crate) fn add(&mut self, other: &Self) {
        self.input_tokens += other.input_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        self.reasoning_tokens += other.reasoning_tokens;
    }
}

/// Fault of the input file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InputFault {
    /// Stable error code for programs.
    pub(crate) code: String,
    /// Number of the line from 1; `None` if the fault is the file's.
    pub(crate) line: Option<u64>,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    /// Id: `batch_` and digits.
    pub(crate) id: String,
    pub(crate) tenant: String,
    pub(crate) role: BatchRole,
    pub(crate) spec: BatchSpec,
    pub(crate) status: BatchStatus,
    /// Time when the batch entered each status, in seconds since 1970.
    pub(crate) entered: BTreeMap<BatchStatus, u64>,
    /// End of the window, in seconds since 1970.
    pub(crate) expires_at: u64,
    /// Whether the window ended before all lines were computed.
    pub(crate) is_late: bool,
    pub(crate) counts: LineCounts,
    pub(crate) usage: BatchUsage,
    pub(crate) faults: Vec<InputFault>,
    /// Id of the file with the answers, unless there are none.
    pub(crate) output_file: Option<String>,
    /// Id of the file with the failed lines, unless there are none.
    pub(crate) error_file: Option<String>,
}

impl BatchRecord {
    /// Creates the record of a new batch, whose window ends after `window_s` seconds.
    #[must_use]
    pub(crate) fn new(id: String, (tenant, role): (&str, BatchRole), spec: BatchSpec, window_s: u64) -> Self {
        let now = seconds_since_1970();
        Self {
            id,
            tenant: tenant.to_owned(),
            role,
            spec,
            status: BatchStatus::Validating,
            entered: BTreeMap::from([(BatchStatus::Validating, now)]),
            expires_at: now + window_s,
            is_late: false,
            counts: LineCounts::default(),
            usage: BatchUsage::default(),
            faults: Vec::new(),
            output_file: None,
            error_file: None,
        }
    }

    pub(crate) fn enter(&mut self, status: BatchStatus) {
        self.status = status;
        self.entered.insert(status, seconds_since_1970());
    }

    #[must_use]
    pub(crate) fn created_at(&self) -> u64 {
        self.entered.get(&BatchStatus::Validating).copied().unwrap_or_default()
    }

    /// Returns the ids that the result files have: of the answers and of the failed lines.
    #[must_use]
    pub(crate) fn result_ids(&self) -> [String; 2] {
        let digits = self.id.trim_start_matches(super::ID_PREFIX);
        ["output", "error"].map(|kind| format!("file-{digits}-{kind}"))
    }

    /// Returns the time when the result files are deleted; `None` before the end of the batch, and if the
    /// files are kept.
    #[must_use]
    pub(crate) fn outputs_expire_at(&self) -> Option<u64> {
        let has_files = self.output_file.is_some() || self.error_file.is_some();
        let ended = self.entered.get(&self.status).filter(|_| has_files && self.status.is_final())?;
        Some(ended + self.spec.output_ttl_s?)
    }

    /// Id of line `number` in results and logs.
    #[must_use]
    pub(crate) fn line_id(&self, number: u64) -> String {
        format!("batch_req_{}_{number}", self.id.trim_start_matches(super::ID_PREFIX))
    }
}

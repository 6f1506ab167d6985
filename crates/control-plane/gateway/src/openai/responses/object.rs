//! The response itself, as it is told at its beginning, at its end, and whenever it is asked for.

use serde::Serialize;
use serde_json::Value;

use super::{super::structured::SchemaWarning, request::ResponseEcho};
use crate::{
    errors::ApiError,
    usage::{CompletionTokensDetails, PromptTokensDetails, Usage},
};

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResponseStatus {
    InProgress,
    Completed,
    /// Cut off at a limit.
    Incomplete,
    Failed,
}

/// See the module's description.
#[derive(Debug, Serialize)]
pub(super) struct Object<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created_at: u64,
    /// Seconds since 1970, once it is complete.
    pub(super) completed_at: Option<u64>,
    pub(super) status: ResponseStatus,
    pub(super) model: &'a str,
    pub(super) adapter_generation: Option<&'a str>,
    pub(super) output: &'a [Value],
    pub(super) error: Option<Failure>,
    pub(super) incomplete_details: Option<Incomplete>,
    pub(super) usage: Option<ResponseUsage>,
    /// What of its form the answer need not keep to, once it is over.
    #[serde(skip_serializing_if = "<[SchemaWarning]>::is_empty")]
    pub(super) warnings: &'a [SchemaWarning],
    #[serde(flatten)]
    pub(super) asked: &'a ResponseEcho,
}

/// Why it failed.
#[derive(Debug, Serialize)]
pub(super) struct Failure {
    code: &'static str,
    message: String,
}

impl From<&ApiError> for Failure {
    fn from(error: &ApiError) -> Self {
        Self { code: error.code(), message: error.last_words() }
    }
}

/// What cut it off.
#[derive(Debug, Serialize)]
pub(super) struct Incomplete {
    pub(super) reason: &'static str,
}

/// [`Usage`] under this API's names.
#[derive(Debug, Serialize)]
pub(super) struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: PromptTokensDetails,
    output_tokens: usize,
    output_tokens_details: CompletionTokensDetails,
    total_tokens: usize,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: usage.prompt_tokens_details,
            output_tokens: usage.completion_tokens,
            output_tokens_details: usage.completion_tokens_details,
            total_tokens: usage.total_tokens,
        }
    }
}

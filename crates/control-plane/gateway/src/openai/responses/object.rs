//! The response object, as events and bodies contain it.

use serde::Serialize;
use serde_json::Value;

use super::{
    super::{adapter_stages::AdapterStage, structured::SchemaWarning},
    request::ResponseEcho,
};
use crate::{
    errors::ApiError,
    usage::{CompletionTokensDetails, PromptTokensDetails, Usage},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResponseStatus {
    InProgress,
    Completed,
    /// The answer was cut at a limit.
    Incomplete,
    Failed,
}

#[derive(Debug, Serialize)]
pub(super) struct Object<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    /// Creation time in seconds since 1970.
    pub(super) created_at: u64,
    /// Completion time in seconds since 1970; null before completion.
    pub(super) completed_at: Option<u64>,
    pub(super) status: ResponseStatus,
    pub(super) model: &'a str,
    pub(super) adapter_generation: Option<&'a str>,
    pub(super) output: &'a [Value],
    pub(super) error: Option<Failure>,
    pub(super) incomplete_details: Option<Incomplete>,
    pub(super) usage: Option<ResponseUsage>,
    /// Stages of an answer that switches adapters, at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) adapter_stages: Option<Vec<AdapterStage<'a>>>,
    /// The parts of a JSON schema that the grammar does not enforce; set at the end.
    #[serde(skip_serializing_if = "<[SchemaWarning]>::is_empty")]
    pub(super) warnings: &'a [SchemaWarning],
    #[serde(flatten)]
    pub(super) asked: &'a ResponseEcho,
}

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

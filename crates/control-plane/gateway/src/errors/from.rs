//! Conversions of other modules' errors to API errors.

use axum::http::StatusCode;
use shmproto::message::{ErrorCode, WireError};
use text::{chat::ChatError, chat_template::TemplateError};

use super::ApiError;
use crate::{
    admission_queue::QueueRefusal, executor::CallError, lifecycle::ServingUnavailable, limits::RateLimited,
    tenant_memory::MemoryFull, text::TextError,
};

impl From<WireError> for ApiError {
    fn from(error: WireError) -> Self {
        let message = error.message;
        match error.code {
            ErrorCode::AdapterNotFound => {
                Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message)
                    .of("model")
            }
            ErrorCode::ContextLengthExceeded => Self::bad_request("context_length_exceeded", message),
            ErrorCode::QueueFull => Self::queue_full(1, message),
            ErrorCode::DeadlineExceeded => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", "deadline_exceeded", message)
            }
            ErrorCode::InvalidRequest => Self::bad_request("invalid_request", message),
            ErrorCode::InvalidAdapter => Self::bad_request("invalid_adapter", message).of("lora_path"),
            ErrorCode::AdapterBudgetExceeded => Self::no_room("adapter_budget_exceeded", message),
            ErrorCode::ShuttingDown => Self::executor_unavailable(message),
            ErrorCode::Internal => Self::internal(message),
            ErrorCode::NoMemory => Self::unavailable("no_memory", message),
            ErrorCode::NotFinite => {
                let status = StatusCode::UNPROCESSABLE_ENTITY;
                Self::new(status, "invalid_request_error", "logits_not_finite", message).of("model")
            }
        }
    }
}

impl From<QueueRefusal> for ApiError {
    fn from(refused: QueueRefusal) -> Self {
        let message = refused.to_string();
        match refused {
            QueueRefusal::Full { wait_s, .. } | QueueRefusal::Overload { wait_s, .. } => {
                Self::queue_full(wait_s, message)
            }
            QueueRefusal::OnlineFirst => Self::queue_full(1, message),
            QueueRefusal::TooMany { .. } => Self::bad_request("too_many_sequences", message),
            QueueRefusal::UsedUp { wait_s, .. } => Self::rate_limited(wait_s, message),
            QueueRefusal::Promise { wait_s, .. } => {
                Self { code: "slo_out_of_reach", ..Self::queue_full(wait_s, message) }
            }
            QueueRefusal::Late => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", "deadline_exceeded", message)
            }
            QueueRefusal::Nobody => Self::executor_unavailable(message),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        let code = match error {
            TextError::Encode(_) | TextError::Chat(ChatError::Encode(_) | ChatError::NoMark) => {
                "invalid_text"
            }
            TextError::NoTemplate => "no_chat_template",
            TextError::Chat(ChatError::Template(TemplateError::Unavailable(_))) => {
                return Self::internal(error.to_string());
            }
            // A prompt that exceeds the rendering limit has more tokens than any context.
            TextError::Chat(ChatError::Template(TemplateError::Limit { .. })) => {
                return Self::bad_request("context_length_exceeded", error.to_string()).of("messages");
            }
            TextError::Chat(ChatError::Template(_) | ChatError::LaterSystem) => "invalid_messages",
        };
        Self::bad_request(code, error.to_string())
    }
}

impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Unavailable(_) | CallError::NotLent(_) => {
                Self::executor_unavailable(error.to_string())
            }
            CallError::Busy { wait_s, .. } => Self::queue_full(wait_s, error.to_string()),
            CallError::Refused(wire) => wire.into(),
        }
    }
}

impl From<ServingUnavailable> for ApiError {
    fn from(error: ServingUnavailable) -> Self {
        Self::executor_unavailable(error.to_string())
    }
}

impl From<RateLimited> for ApiError {
    fn from(error: RateLimited) -> Self {
        Self::rate_limited(error.wait_s, error.to_string())
    }
}

impl From<MemoryFull> for ApiError {
    fn from(full: MemoryFull) -> Self {
        Self::busy("memory_full", full.to_string())
    }
}

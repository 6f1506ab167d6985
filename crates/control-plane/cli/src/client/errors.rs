//! Errors of requests to a gateway, with the next command to try.

use std::io;

use crate::exit::{Exit, Explain};

#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No gateway listens at the address.
    #[error("no gateway answers at {url}")]
    Unreachable { url: String, source: Box<ureq::Error> },
    /// The gateway answered with an error.
    #[error("the gateway refused ({status}{}): {message}", code.as_ref().map(|code| format!(", {code}")).unwrap_or_default())]
    Refused {
        status: u16,
        /// The gateway's stable error code.
        code: Option<String>,
        message: String,
    },
    /// A stream ended in an error event.
    #[error("the gateway ended the answer with an error: {message}")]
    Broken { message: String },
    /// A stream stopped without its end.
    #[error("the connection to the gateway broke before the answer was complete")]
    Lost(#[source] Option<io::Error>),
    /// Answer that is not the JSON that the API defines.
    #[error("the gateway's answer is not the JSON that this command expects")]
    Garbled(#[source] serde_json::Error),
}

impl Explain for ClientError {
    fn exit(&self) -> Exit {
        match self {
            Self::Unreachable { .. } | Self::Lost(_) => Exit::Unavailable,
            Self::Refused { status, code, .. } => match code.as_deref() {
                // The gateway answers these codes with 400, because clients of OpenAI and vLLM expect that.
                Some("adapter_already_loaded") => Exit::Conflict,
                Some("adapter_path_forbidden" | "adapter_outside_root") => Exit::Refused,
                _ => Exit::of_http(*status),
            },
            Self::Broken { .. } | Self::Garbled(_) => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Unreachable { .. } => {
                Some("holobiont up, or name a running gateway with --url or HOLOBIONT_URL".into())
            }
            Self::Refused { code: Some(code), .. } if next_for(code).is_some() => {
                next_for(code).map(str::to_owned)
            }
            Self::Refused { status: 401, .. } => {
                Some("set HOLOBIONT_API_KEY to a valid key; holobiont key add NAME makes one".into())
            }
            Self::Refused { status: 403, .. } => {
                Some("use an administrator's key; holobiont key add NAME --role admin makes one".into())
            }
            Self::Refused { status: 404, .. } => Some("holobiont ls".into()),
            _ => None,
        }
    }
}

/// Returns what to do about the gateway's error `code`, where the code determines it.
fn next_for(code: &str) -> Option<&'static str> {
    Some(match code {
        "adapter_already_loaded" => "holobiont adapters replace NAME DIR",
        "generation_mismatch" => "holobiont show NAME shows the generation that is served now",
        "adapter_path_forbidden" | "adapter_outside_root" => {
            "copy the adapter below [gateway].adapter_root, by default the directory where `holobiont \
             up` was started"
        }
        "invalid_adapter" | "invalid_adapter_path" => {
            "holobiont adapters check DIR lists what is unsupported"
        }
        "adapter_limit_exceeded" | "adapter_budget_exceeded" => {
            "remove an adapter with holobiont adapters rm NAME, or raise [executor].adapter_bytes or \
             [gateway].max_adapters"
        }
        "insufficient_storage" => "free disk space in the state directory",
        "lora_load_busy" | "rate_limit_exceeded" | "queue_full" => "wait a moment and try again",
        "registry_unavailable" => "holobiont logs shows why",
        _ => return None,
    })
}

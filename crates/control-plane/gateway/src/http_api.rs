//! The API that a request uses, which decides the format of errors and headers.

use axum::http::HeaderMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HttpApi {
    /// OpenAI's API, and all routes of our own.
    OpenAi,
    Ollama,
    Anthropic,
}

impl HttpApi {
    /// Header that every client of Anthropic's API sends.
    pub(crate) const ANTHROPIC_VERSION: &'static str = "anthropic-version";

    /// Returns the API of a request. Tinker's routes begin with `/api/v1/` and are not Ollama's. Models have
    /// the same path in Anthropic's and OpenAI's API, so the header decides.
    #[must_use]
    pub(crate) fn of(path: &str, headers: &HeaderMap) -> Self {
        let is_anthropic =
            path.strip_prefix("/v1/messages").is_some_and(|rest| matches!(rest.get(..1), None | Some("/")));
        if path.starts_with("/api/") && !path.starts_with("/api/v1/") {
            Self::Ollama
        } else if is_anthropic || headers.contains_key(Self::ANTHROPIC_VERSION) {
            Self::Anthropic
        } else {
            Self::OpenAi
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_is_told_by_its_paths_or_by_its_header() {
        let plain = HeaderMap::new();
        let versioned = HeaderMap::from_iter([(
            HttpApi::ANTHROPIC_VERSION.parse().unwrap(),
            "2023-06-01".parse().unwrap(),
        )]);
        for (path, headers, api) in [
            ("/v1/messages", &plain, HttpApi::Anthropic),
            ("/v1/messages/count_tokens", &plain, HttpApi::Anthropic),
            ("/v1/messages_of", &plain, HttpApi::OpenAi),
            ("/v1/models", &plain, HttpApi::OpenAi),
            ("/v1/models", &versioned, HttpApi::Anthropic),
            ("/api/chat", &versioned, HttpApi::Ollama),
            ("/api/v1/asample", &plain, HttpApi::OpenAi),
        ] {
            assert_eq!(HttpApi::of(path, headers), api, "{path}");
        }
    }
}

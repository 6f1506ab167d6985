//! Answers of the gateway, compared to the last bit.

use serde_json::Value;

/// The tokens of a completion. Numbers are kept as JSON text, which identifies every `f32`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CompletionAnswer {
    /// Text of the completion.
    pub text: String,
    /// `[token, logprob, top logprobs]` of every token.
    pub scored: Vec<[Value; 3]>,
    /// Finish reason, if the answer has ended.
    pub finish: Option<String>,
}

impl CompletionAnswer {
    /// Appends a choice of a whole answer or of a chunk.
    pub(crate) fn add(&mut self, choice: &Value) {
        self.text.push_str(choice["text"].as_str().expect("a choice has text"));
        if let Some(tokens) = choice["logprobs"]["tokens"].as_array() {
            let of = |field: &str, index: usize| choice["logprobs"][field][index].clone();
            let scored = tokens.iter().enumerate().map(|(index, token)| {
                [token.clone(), of("token_logprobs", index), of("top_logprobs", index)]
            });
            self.scored.extend(scored);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            assert_eq!(self.finish.replace(reason.to_owned()), None, "a choice ends once");
        }
    }

    /// True if this answer is a prefix of `whole`.
    #[must_use]
    pub fn begins(&self, whole: &Self) -> bool {
        whole.text.starts_with(&self.text) && whole.scored.starts_with(&self.scored)
    }
}

/// A whole answer with its metadata.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Tokens and finish reason.
    pub answer: CompletionAnswer,
    /// Number of prompt tokens from the cache.
    pub cached_tokens: u64,
    /// Adapter version that answered; `None` for the base.
    pub generation: Option<String>,
}

impl Reply {
    pub(crate) fn read(body: &Value) -> Self {
        let mut answer = CompletionAnswer::default();
        answer.add(&body["choices"][0]);
        let details = &body["usage"]["prompt_tokens_details"];
        Self {
            answer,
            cached_tokens: details["cached_tokens"].as_u64().expect("usage counts cached tokens"),
            generation: body["adapter_generation"].as_str().map(str::to_owned),
        }
    }
}

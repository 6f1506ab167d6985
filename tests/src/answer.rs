//! What came back, exact to the last bit.

use serde_json::Value;

/// The tokens of a completion. Numbers are kept as JSON wrote them, which names every `f32` uniquely.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CompletionAnswer {
    /// The text.
    pub text: String,
    /// `[token, logprob, top logprobs]` of every token.
    pub scored: Vec<[Value; 3]>,
    /// Why it ended, if it did.
    pub finish: Option<String>,
}

impl CompletionAnswer {
    /// Adds a choice of a whole answer, or what a chunk adds to it.
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

    /// True if `whole` begins with this.
    #[must_use]
    pub fn begins(&self, whole: &Self) -> bool {
        whole.text.starts_with(&self.text) && whole.scored.starts_with(&self.scored)
    }
}

/// A whole answer with what is said about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// The answer.
    pub answer: CompletionAnswer,
    /// Prompt tokens that were not computed anew.
    pub cached_tokens: u64,
    /// Which adapter answered; `None` is the base.
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

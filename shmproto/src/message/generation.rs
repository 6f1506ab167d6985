//! Generation requests and their outputs.

use super::{AdapterIdBytes, OwnerBytes, RequestId, WireError};
use crate::{wire_enum, wire_struct};

wire_struct! {
    /// Parameters of token sampling. Neutral values switch a filter off, and the default is neutral.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Sampling {
        /// Sampling temperature; 0 is greedy.
        pub temperature: f32,
        /// Number of most likely tokens to keep; 0 keeps all tokens.
        pub top_k: u32,
        /// Probability mass to keep; 1 keeps all tokens.
        pub top_p: f32,
        /// Minimum probability relative to the most likely token; 0 keeps all tokens.
        pub min_p: f32,
        /// Subtracted once from the logit of a token already generated; 0 is off.
        pub presence_penalty: f32,
        /// Subtracted per earlier occurrence in the completion; 0 is off.
        pub frequency_penalty: f32,
        /// Divides positive and multiplies negative logits of tokens in prompt or completion; 1 is off.
        pub repetition_penalty: f32,
        /// Values to add to the logits of these tokens.
        pub logit_bias: Vec<(u32, f32)>,
        /// Key of the counter-based generator, together with the position.
        pub seed: u64,
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

wire_struct! {
    /// Request to continue a prompt.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Generate {
        /// Number of the request, which every answer repeats.
        pub request: RequestId,
        /// Id of the adapter; `None` is the base model.
        pub adapter: Option<AdapterIdBytes>,
        /// Hash of tenant and adapter version: KV blocks in this namespace may be shared with this request.
        pub namespace: [u8; 32],
        /// Hash of tenant and base: namespace of KV blocks before the adapter's invocation.
        pub base_namespace: [u8; 32],
        /// Tenant whose share of the memory the request's KV cache counts against.
        pub owner: OwnerBytes,
        /// Token ids of the prompt, at least one.
        pub prompt: Vec<u32>,
        /// Number of tokens at the prompt's end that a lost request generated, fewer than the whole prompt;
        /// penalties count them as completion.
        pub generated: u32,
        /// Maximum number of tokens to generate; 0 only scores the prompt.
        pub max_tokens: u32,
        /// Number of tokens before which no stop token is chosen.
        pub min_tokens: u32,
        /// Tokens that end the generation; the stop token is reported as the last one.
        pub stop_tokens: Vec<u32>,
        /// Parameters of token sampling.
        pub sampling: Sampling,
        /// Log-probabilities to return: `None` none, `Some(n)` the chosen token's and `n` most likely ones.
        pub logprobs: Option<u32>,
        /// Log-probabilities to return for every prompt token, as in `logprobs`.
        pub prompt_logprobs: Option<u32>,
        /// Time from receipt after which the request is given up, in milliseconds; 0 is no deadline.
        pub deadline_ms: u32,
        /// Whether outputs show draft tokens before verification.
        pub provisional: ProvisionalMode,
        /// Rounding of the activations in the base's layers.
        pub precision: Precision,
        /// Grammar of the completion, in the format of `text::grammar`; `None` allows every token. Tokens of
        /// a lost request are part of the completion.
        pub grammar: Option<String>,
        /// Requests a vector of the prompt instead of a generation: then `max_tokens` is 0, and
        /// `prompt_logprobs` and `grammar` are not set.
        pub pooling: Option<Pooling>,
        /// Completion that a replay expects, oldest token first; empty for every other request. The tokens
        /// are verified like draft tokens, and the first sampled token that differs ends the generation.
        pub expected: Vec<u32>,
    }
}

wire_enum! {
    /// How the passes over a prompt become one vector. Hidden states are those after the final norm.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub enum Pooling {
        /// Hidden state of the last token.
        #[default]
        Last = 0,
        /// Mean of all hidden states.
        Mean = 1,
        /// Logits of these tokens after the last token, in this order.
        TokenLogits(Vec<u32>) = 2,
        /// Logits of the labels of the adapter's classification head, from the last token's hidden state.
        ClassLogits = 3,
    }
}

wire_enum! {
    /// Rounding of the activations in the base's layers.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Precision {
        /// Rounding of normal serving on this executor.
        #[default]
        Serving = 0,
        /// No rounding of activations.
        Exact = 1,
    }
}

wire_enum! {
    /// Whether outputs show draft tokens before verification.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ProvisionalMode {
        /// Outputs show verified tokens only.
        #[default]
        Unwanted = 0,
        /// Outputs show the likeliest branch's draft tokens in [`Output::provisional`].
        Wanted = 1,
    }
}

wire_struct! {
    /// Token with its log-probability.
    #[derive(Debug, Clone, PartialEq)]
    pub struct TokenOutput {
        /// Id of the token.
        pub token: u32,
        /// Natural logarithm of the probability; 0 if not requested.
        pub logprob: f32,
        /// The most likely tokens, best first; empty if not requested.
        pub top: Vec<(u32, f32)>,
    }
}

wire_enum! {
    /// Reason for the end of a generation.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Finish {
        /// A stop token was chosen.
        Stop = 0,
        /// The sequence reached `max_tokens` or the context length, or a replay deviated.
        Length = 1,
    }
}

wire_struct! {
    /// Result of a step for one request, or the draft tokens that the step verifies.
    #[derive(Debug, Clone, Default, PartialEq)]
    pub struct Output {
        /// Number of the request.
        pub request: RequestId,
        /// New tokens, oldest first; may be empty.
        pub tokens: Vec<TokenOutput>,
        /// Draft tokens that are being verified, oldest first, in an output without other content. The next
        /// output of the request repeats the accepted ones in `tokens`; the others were never generated.
        pub provisional: Vec<u32>,
        /// Log-probabilities of the prompt from its second token on; sent once, with the first output.
        pub prompt: Vec<TokenOutput>,
        /// Vector of the prompt, if requested, in the last output; [`Pooling`] determines its length.
        pub pooled: Vec<f32>,
        /// Number of prompt tokens from the prefix cache; sent with the first output.
        pub cached_tokens: u32,
        /// Time from receipt to admission in microseconds; sent with the first output.
        pub queued_us: u64,
        /// Part of `queued_us` spent waiting for the adapter to reach the device; sent with the first output.
        pub load_wait_us: u64,
        /// Part of `queued_us` spent waiting for offloaded KV blocks; sent with the first output.
        pub kv_wait_us: u64,
        /// Set on the last output of a successful request.
        pub finish: Option<Finish>,
        /// Set on the last output of a failed request.
        pub error: Option<WireError>,
    }
}

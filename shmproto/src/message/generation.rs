//! What is asked of a generation, and what it says.

use super::{AdapterIdBytes, OwnerBytes, RequestId, WireError};
use crate::{wire_enum, wire_struct};

wire_struct! {
    /// How to choose tokens. Neutral values switch a filter off.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Sampling {
        /// 0 is greedy.
        pub temperature: f32,
        /// 0 keeps all tokens.
        pub top_k: u32,
        /// 1 keeps all tokens.
        pub top_p: f32,
        /// 0 keeps all tokens.
        pub min_p: f32,
        /// Subtracted once from tokens already generated; 0 is off.
        pub presence_penalty: f32,
        /// Subtracted per earlier occurrence in the completion; 0 is off.
        pub frequency_penalty: f32,
        /// Divides positive and multiplies negative logits of tokens seen in prompt or completion; 1 is off.
        pub repetition_penalty: f32,
        /// Added to the logits of these tokens.
        pub logit_bias: Vec<(u32, f32)>,
        /// Keys the counter-based generator together with the position.
        pub seed: u64,
    }
}

wire_struct! {
    /// A prompt and how to continue it.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Generate {
        /// Names the request in every answer.
        pub request: RequestId,
        /// The adapter; `None` is the base model.
        pub adapter: Option<AdapterIdBytes>,
        /// H(tenant, generation): what may share cached prefixes with this request.
        pub namespace: [u8; 32],
        /// H(tenant, base): what may share with it what an adapter does not change, before it is invoked.
        pub base_namespace: [u8; 32],
        /// Whose share of the memory its keys and values are counted against.
        pub owner: OwnerBytes,
        /// The prompt as token ids, at least one.
        pub prompt: Vec<u32>,
        /// So many tokens at the prompt's end were generated before, by a request that was lost: penalties count them as
        /// completion. Fewer than the prompt has.
        pub generated: u32,
        /// Most tokens to generate; 0 only scores the prompt.
        pub max_tokens: u32,
        /// Stop tokens are not chosen before this many tokens.
        pub min_tokens: u32,
        /// Generation ends with one of these (which is reported as the last token).
        pub stop_tokens: Vec<u32>,
        /// How to choose.
        pub sampling: Sampling,
        /// `None`: no log-probabilities; `Some(n)`: of the chosen token and the `n` most likely.
        pub logprobs: Option<u32>,
        /// Like `logprobs`, for every prompt token.
        pub prompt_logprobs: Option<u32>,
        /// Milliseconds from receipt after which the request is given up; 0 is no deadline.
        pub deadline_ms: u32,
        /// Whether drafted tokens are told before they are verified.
        pub provisional: ProvisionalMode,
        /// How finely the base's layers round what they are given.
        pub precision: Precision,
        /// What the completion has to look like, as `text::grammar` writes it; `None` lets every token come. Tokens that were generated
        /// before are part of the completion.
        pub grammar: Option<String>,
        /// If set, the answer is an embedding of the prompt, and nothing is generated: `max_tokens` is 0 then, and
        /// `prompt_logprobs` and `grammar` are not set.
        pub pooling: Option<Pooling>,
    }
}

wire_enum! {
    /// How the hidden states of a prompt, as the final norm gives them, become one vector.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Pooling {
        /// The last token's.
        #[default]
        Last = 0,
        /// Their mean.
        Mean = 1,
    }
}

wire_enum! {
    /// How finely the base's layers round what they are given.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Precision {
        /// As the executor serves.
        #[default]
        Serving = 0,
        /// Not at all.
        Exact = 1,
    }
}

wire_enum! {
    /// Whether drafted tokens are told before they are verified.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum ProvisionalMode {
        /// Nobody wants to see them.
        #[default]
        Unwanted = 0,
        /// Those of the likeliest branch are, in [`Output::provisional`].
        Wanted = 1,
    }
}

wire_struct! {
    /// A token and how likely it was.
    #[derive(Debug, Clone, PartialEq)]
    pub struct TokenOutput {
        /// Token id.
        pub token: u32,
        /// Natural logarithm of the probability; 0 when not asked for.
        pub logprob: f32,
        /// The most likely tokens, best first; empty when not asked for.
        pub top: Vec<(u32, f32)>,
    }
}

wire_enum! {
    /// Why a generation ended.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Finish {
        /// A stop token was chosen.
        Stop = 0,
        /// `max_tokens` or the context length was reached.
        Length = 1,
    }
}

wire_struct! {
    /// What a step produced for one request, or is about to find out.
    #[derive(Debug, Clone, Default, PartialEq)]
    pub struct Output {
        /// The request.
        pub request: RequestId,
        /// New tokens, oldest first; may be empty.
        pub tokens: Vec<TokenOutput>,
        /// Drafted tokens that would be next and are verified now, oldest first, in an output that has nothing else. The next output
        /// of the request has those that came true among its `tokens`; no other was ever said.
        pub provisional: Vec<u32>,
        /// Log-probabilities of the prompt from its second token on; sent once, with the first output.
        pub prompt: Vec<TokenOutput>,
        /// The prompt's embedding, if one was asked for, with the last output; as long as a hidden state.
        pub embedding: Vec<f32>,
        /// Prompt tokens served from the prefix cache; sent with the first output.
        pub cached_tokens: u32,
        /// Microseconds from receipt to admission; sent with the first output.
        pub queued_us: u64,
        /// Of them, microseconds it waited for its adapter to reach the device; sent with the first output.
        pub load_wait_us: u64,
        /// And microseconds it waited for keys and values to be brought back; sent with the first output.
        pub kv_wait_us: u64,
        /// Set on the last output of a request that ended well.
        pub finish: Option<Finish>,
        /// Set on the last output of a request that did not.
        pub error: Option<WireError>,
    }
}

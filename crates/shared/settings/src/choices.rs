//! Settings whose value is one of a few words.

use std::{ffi::OsString, fmt, str::FromStr};

use clap::{ValueEnum, builder::PossibleValue};

use crate::Value;

/// Declares an enum whose values are written as words.
macro_rules! words {
    ($( $(#[doc = $doc:literal])+ $name:ident ($what:literal) { $(
        $(#[doc = $help:literal])+ $value:ident = $word:literal $(or $alias:literal)?,
    )* } )*) => { $(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $( $(#[doc = $help])+ $value, )* }

        impl $name {
            const ALL: &[Self] = &[$( Self::$value ),*];

            /// Returns the word of the value.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$value => $word, )* }
            }

            /// Returns another word for the value, which other servers use.
            const fn alias(self) -> Option<&'static str> {
                match self { $( Self::$value => words!(@alias $($alias)?), )* }
            }
        }

        impl ValueEnum for $name {
            fn value_variants<'a>() -> &'a [Self] {
                Self::ALL
            }

            fn to_possible_value(&self) -> Option<PossibleValue> {
                Some(PossibleValue::new(self.as_str()).aliases(self.alias()))
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let is_named = |value: &&Self| value.as_str() == text || value.alias() == Some(text);
                let known = Self::ALL.iter().find(is_named);
                known.copied().ok_or_else(|| no_such($what, text, Self::ALL.iter().map(|value| value.as_str())))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl Value for $name {
            fn text(&self) -> OsString {
                self.as_str().into()
            }
        }
    )* };
    (@alias) => { None };
    (@alias $alias:literal) => { Some($alias) };
}

fn no_such(what: &str, text: &str, words: impl Iterator<Item = &'static str>) -> String {
    format!("`{text}` is not a {what}; write {}", words.collect::<Vec<_>>().join(" or "))
}

words! {
    /// Division of the weights among the devices of a group.
    DeviceSplit ("division of the weights") {
        /// Each device holds some outputs of every linear layer.
        Outputs = "outputs" or "tensor",
        /// Each device holds some blocks, in order.
        Layers = "layers" or "pipeline",
    }
    /// Data type of the KV cache.
    KvDtype ("number format") {
        /// Data type that suits the weights.
        Auto = "auto",
        /// 32-bit floating point values.
        F32 = "f32",
        /// 16-bit floating point values with 11 bits of precision.
        F16 = "f16",
        /// 16-bit floating point values with 8 bits of precision, multiplied by the CPU's matrix unit.
        Bf16 = "bf16",
        /// 8-bit integers, with a scale for each key and value of a head.
        Int8 = "int8",
    }

    /// Arithmetic of linear layers on a CPU.
    Precision ("precision") {
        /// On a CPU with AMX `bf16` for models of 2^28 weights and more, unless these have f32 or f16; else
        /// `mixed`; on a GPU the only supported one.
        Auto = "auto",
        /// 8-bit integers in all layers.
        Int8 = "int8",
        /// 15 bits where the error of 8 bits would matter, 8 bits elsewhere.
        Mixed = "mixed",
        /// 15-bit integers in all layers.
        Int15 = "int15",
        /// Activations and weights of bf16, summed in 32 bits in the order of the CPU's matrix unit.
        Bf16 = "bf16",
        /// No rounding of activations.
        Exact = "exact",
    }

    /// Data type in which adapters are stored and multiplied.
    AdapterDtype ("number format") {
        /// `exact` for weights of 32 or 16 bits that are not rounded, else `f16`.
        Auto = "auto",
        /// Smallest type that holds the adapter's values exactly.
        Exact = "exact",
        /// 16-bit type with 11 bits of precision, multiplied in 32 bits.
        F16 = "f16",
        /// 16-bit type with 8 bits of precision, for adapters and their activations: twice as fast with long
        /// prompts.
        Bf16 = "bf16",
    }

    /// Start of a request whose adapter is not on the device.
    ColdStart ("cold start") {
        /// Immediate start; CPU workers compute the part that is not yet on the device.
        CpuAssist = "cpu-assist",
        /// Start after the adapter has been copied to the device.
        OnDemand = "on-demand",
        /// No cold starts: a load is answered once the adapter is on the device.
        Cached = "cached",
    }

    /// Eviction policy of a full memory tier.
    CachePolicy ("cache policy") {
        /// ELORA's cost model: cost of reloading, visits, recency, number of adapters needed.
        Elora = "elora",
        /// ELORA with the factor of adapters as the paper prints it.
        Eq4Printed = "eq4-printed",
        /// ELORA with the cost as the paper prints it, which keeps larger entries longer.
        Eq5Printed = "eq5-printed",
        /// Least recently used first.
        Lru = "lru",
        /// RRIP: entries used once are evicted before entries used again.
        Rrip = "rrip",
        /// Fixed share for adapters, least recently used first, without dependencies between blocks.
        Static = "static",
        /// No prefix cache: a block does not outlive its request.
        NoHistory = "no-history",
        /// ELORA without dependencies between blocks.
        NoDependencies = "wom",
        /// ELORA without the number of adapters needed.
        NoAdapterFactor = "wol",
        /// ELORA without the cost of reloading.
        NoCost = "woc",
        /// ELORA without the visits term.
        NoVisits = "wov",
        /// ELORA without the recency term.
        NoRecency = "wou",
        /// ELORA that evicts whole branches at once.
        Branches = "bfs",
    }

    /// Policy that chooses one of several executors for a request.
    Routing ("routing policy") {
        /// Executor with the least cost: Algorithm 1 of CaraServe, corrected.
        RankAware = "rank-aware",
        /// Algorithm 1 of CaraServe as the paper prints it.
        Algo1Printed = "algo1-printed",
        /// Executor with the fewest requests.
        MostIdle = "most-idle",
        /// First executor with a free slot.
        FirstFit = "first-fit",
        /// Random executor for each request.
        Random = "random",
    }

    /// Format in which a model writes tool calls.
    ToolCallParser ("tool-call format") {
        /// Format that the model's chat template shows.
        Auto = "auto",
        /// `<tool_call>` and a JSON object: Hermes, Qwen.
        Hermes = "hermes",
        /// JSON object that is the whole answer: Llama 3.
        Llama3Json = "llama3_json",
        /// `[TOOL_CALLS]` and a list: Mistral.
        Mistral = "mistral",
        /// List of Python calls: Llama 3.2, Gemma 3.
        Pythonic = "pythonic",
        /// `<|tool_call|>` and a list: Granite 3.
        Granite = "granite",
        /// `<tool_call>` and tags for the function and its parameters: Qwen3-Coder, Qwen 3.5.
        Qwen3Coder = "qwen3_coder",
        /// `<|channel|>commentary to=functions.NAME` and a JSON object: gpt-oss.
        Harmony = "harmony" or "openai",
        /// No format: requests with tools are refused.
        None = "none",
    }

    /// Tags around the model's reasoning content.
    ReasoningParser ("reasoning format") {
        /// Tags that the model's chat template shows.
        Auto = "auto",
        /// `<think>` and `</think>`: Qwen 3, DeepSeek R1, SmolLM 3.
        Think = "think",
        /// `[THINK]` and `[/THINK]`: Magistral.
        Mistral = "mistral",
        /// Messages of the channel `analysis`: gpt-oss.
        Harmony = "harmony" or "openai_gptoss",
        /// No tags: reasoning content stays in the answer's text.
        None = "none",
    }

    /// Policy that decides when waiting calls of split clients are computed.
    BatchingPolicy ("batching policy") {
        /// After a wait proportional to the rows, together with the calls that wait for the same linear
        /// group.
        Opportunistic = "opportunistic",
        /// Immediate start of each call alone.
        Alone = "none",
        /// One batch once every active session waits; for comparison.
        Lockstep = "lockstep",
    }

    /// Format of the log.
    LogFormat ("log format") {
        /// Text lines for people.
        Human = "human",
        /// One JSON object per line.
        Json = "json",
        /// `human` on a terminal, else `json`.
        Auto = "auto",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_read_as_it_is_written_and_another_is_answered_with_all_there_are() {
        for dtype in AdapterDtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(*dtype));
        }
        assert_eq!("openai".parse(), Ok(ToolCallParser::Harmony), "the word of vLLM");
        assert_eq!("openai_gptoss".parse(), Ok(ReasoningParser::Harmony), "the word of vLLM");
        let error = "warm".parse::<ColdStart>().unwrap_err();
        assert_eq!(error, "`warm` is not a cold start; write cpu-assist or on-demand or cached");
    }
}

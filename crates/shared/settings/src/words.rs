//! Settings that are one of a few words.

use std::{ffi::OsString, fmt, str::FromStr};

use clap::{ValueEnum, builder::PossibleValue};

use crate::Value;

/// Declares an enum whose values are words.
macro_rules! words {
    ($( $(#[doc = $doc:literal])+ $name:ident ($what:literal) { $(
        $(#[doc = $help:literal])+ $value:ident = $word:literal,
    )* } )*) => { $(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $( $(#[doc = $help])+ $value, )* }

        impl $name {
            const ALL: &[Self] = &[$( Self::$value ),*];

            /// The word for it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$value => $word, )* }
            }
        }

        impl ValueEnum for $name {
            fn value_variants<'a>() -> &'a [Self] {
                Self::ALL
            }

            fn to_possible_value(&self) -> Option<PossibleValue> {
                Some(PossibleValue::new(self.as_str()))
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let known = Self::ALL.iter().find(|value| value.as_str() == text);
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
}

fn no_such(what: &str, text: &str, words: impl Iterator<Item = &'static str>) -> String {
    format!("`{text}` is no {what}; write {}", words.collect::<Vec<_>>().join(" or "))
}

words! {
    /// How keys and values are stored.
    KvDtype ("number format") {
        /// What suits the weights.
        Auto = "auto",
        /// 32 bits.
        F32 = "f32",
        /// 16 bits.
        F16 = "f16",
        /// Bytes, with a scale for each key and value of a head.
        Int8 = "int8",
    }

    /// How finely activations are rounded where they meet integer weights.
    Precision ("precision") {
        /// What suits the device: `mixed` on a CPU; on a GPU the only one it has.
        Auto = "auto",
        /// 8 bits.
        Int8 = "int8",
        /// 15 bits where the error of 8 would matter, 8 elsewhere.
        Mixed = "mixed",
        /// 15 bits.
        Int15 = "int15",
        /// Not at all.
        Exact = "exact",
    }

    /// How adapters are stored and multiplied.
    AdapterDtype ("number format") {
        /// What suits the weights: `exact` for weights of 32 or 16 bits that are not rounded, else `f16`.
        Auto = "auto",
        /// As many bits as hold the adapter's own numbers.
        Exact = "exact",
        /// 16 bits with 11 of precision; multiplied in 32.
        F16 = "f16",
        /// 16 bits with 8 of precision, and so are the activations they meet: twice as fast with long prompts.
        Bf16 = "bf16",
    }

    /// What a request does whose adapter is not on the device.
    ColdStart ("cold start") {
        /// It starts at once; CPU workers compute what has not arrived.
        CpuAssist = "cpu-assist",
        /// It waits until the adapter has arrived.
        OnDemand = "on-demand",
        /// There are none: a load is answered once the adapter is on the device.
        Cached = "cached",
    }

    /// Who leaves a full tier first.
    CachePolicy ("cache policy") {
        /// ELORA's cost model: what it takes to have it back, visits, recency, adapters needed.
        Elora = "elora",
        /// With the factor of adapters as the paper prints it.
        Eq4Printed = "eq4-printed",
        /// With the cost as the paper prints it: what is larger stays longer.
        Eq5Printed = "eq5-printed",
        /// What was used least recently.
        Lru = "lru",
        /// What was asked for once before what was asked for again.
        Rrip = "rrip",
        /// A fixed share for adapters, and no dependencies between blocks.
        Static = "static",
        /// No block outlives its request.
        NoHistory = "no-history",
        /// The cost model without dependencies between blocks.
        NoDependencies = "wom",
        /// Without the number of adapters needed.
        NoAdapterFactor = "wol",
        /// Without what it takes to have it back.
        NoCost = "woc",
        /// Without visits.
        NoVisits = "wov",
        /// Without recency.
        NoRecency = "wou",
        /// Whole branches at once.
        Branches = "bfs",
    }

    /// Which of several executors gets a request.
    Routing ("routing policy") {
        /// Where it costs least: Algorithm 1 of CaraServe, mended.
        RankAware = "rank-aware",
        /// Algorithm 1 as the paper prints it.
        Algo1Printed = "algo1-printed",
        /// Where the fewest are.
        MostIdle = "most-idle",
        /// The first that has a place.
        FirstFit = "first-fit",
        /// Anywhere.
        Random = "random",
    }

    /// How a model writes calls of tools.
    ToolCallParser ("way to write calls of tools") {
        /// The way that its chat template shows.
        Auto = "auto",
        /// `<tool_call>` and a JSON object: Hermes, Qwen.
        Hermes = "hermes",
        /// A JSON object as all of the answer: Llama 3.
        Llama3Json = "llama3_json",
        /// `[TOOL_CALLS]` and a list: Mistral.
        Mistral = "mistral",
        /// A list of Python's calls: Llama 3.2, Gemma 3.
        Pythonic = "pythonic",
        /// `<|tool_call|>` and a list: Granite 3.
        Granite = "granite",
        /// `<tool_call>` and tags for the function and its parameters: Qwen3-Coder, Qwen 3.5.
        Qwen3Coder = "qwen3_coder",
        /// No way: tools are refused.
        None = "none",
    }

    /// What stands around what a model thinks.
    ReasoningParser ("way to write thoughts") {
        /// The tags that its chat template shows.
        Auto = "auto",
        /// `<think>` and `</think>`: Qwen 3, DeepSeek R1, SmolLM 3.
        Think = "think",
        /// `[THINK]` and `[/THINK]`: Magistral.
        Mistral = "mistral",
        /// Nothing: thoughts are part of the answer's text.
        None = "none",
    }

    /// When calls of split clients that wait are computed.
    Batching ("way of batching") {
        /// After a wait in proportion to their rows, with what waits for the same by then.
        Opportunistic = "opportunistic",
        /// At once, each alone.
        Alone = "none",
        /// When every active session waits, all together; for comparison.
        Lockstep = "lockstep",
    }

    /// How the log is written.
    LogFormat ("log format") {
        /// Lines for people.
        Human = "human",
        /// One JSON object a line.
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
        let error = "warm".parse::<ColdStart>().unwrap_err();
        assert_eq!(error, "`warm` is no cold start; write cpu-assist or on-demand or cached");
    }
}

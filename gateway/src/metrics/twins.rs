//! vLLM's names for figures that dashboards and request routers already read.
//!
//! One table says which of our metrics stands behind which name; a twin is the same series written twice, so the
//! two can never differ. They are written only when asked for (`--vllm-metrics`). `vllm:lora_requests_info`, the
//! contract of the Gateway API inference extension, is always written ([`super::lora_info`]).

use super::{
    store::Store,
    table::Id,
    text::{Extra, write_family},
};

/// Another name for one of our metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Twin {
    /// vLLM's name.
    pub name: &'static str,
    /// What it shows.
    pub of: Id,
}

const fn twin(name: &'static str, of: Id) -> Twin {
    Twin { name, of }
}

/// Every twin.
pub const TWINS: &[Twin] = &[
    twin("vllm:num_requests_running", Id::Running),
    twin("vllm:num_requests_waiting", Id::Waiting),
    twin("vllm:kv_cache_usage_perc", Id::KvUsage),
    // What vLLM called it before.
    twin("vllm:gpu_cache_usage_perc", Id::KvUsage),
    twin("vllm:time_to_first_token_seconds", Id::TimeToFirstToken),
    twin("vllm:time_per_output_token_seconds", Id::InterToken),
    // What vLLM calls it now.
    twin("vllm:inter_token_latency_seconds", Id::InterToken),
    twin("vllm:e2e_request_latency_seconds", Id::RequestDuration),
    twin("vllm:request_queue_time_seconds", Id::QueueTime),
    twin("vllm:prompt_tokens_total", Id::PromptTokens),
    twin("vllm:generation_tokens_total", Id::GeneratedTokens),
    twin("vllm:num_preemptions_total", Id::Preemptions),
];

/// Appends all twins; `model_name` is the label that vLLM's dashboards choose by.
pub fn write_twins(out: &mut String, store: &Store, model_name: &str) {
    for twin in TWINS {
        let extra = Some(Extra { name: "model_name", value: model_name });
        write_family(out, twin.name, twin.of.metric(), extra, &store.family(twin.of));
    }
}

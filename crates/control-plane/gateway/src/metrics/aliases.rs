//! vLLM's names for figures that dashboards and request routers already read.
//!
//! One table says which of our metrics stands behind which name; a alias is the same series written twice, so the
//! two can never differ. They are written only when asked for (`--vllm-metrics`). `vllm:lora_requests_info`, the
//! contract of the Gateway API inference extension, is always written ([`super::lora_info`]).

use super::{
    table::Id,
    text::{ExtraLabel, SeriesRows, write_family},
};

/// Another name for one of our metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricAlias {
    /// vLLM's name.
    pub name: &'static str,
    /// Our metric, whose series are written under that name once more.
    pub of: Id,
}

const fn alias(name: &'static str, of: Id) -> MetricAlias {
    MetricAlias { name, of }
}

/// Every alias.
pub const ALIASES: &[MetricAlias] = &[
    alias("vllm:num_requests_running", Id::Running),
    alias("vllm:num_requests_waiting", Id::Waiting),
    alias("vllm:kv_cache_usage_perc", Id::KvUsage),
    // What vLLM called it before.
    alias("vllm:gpu_cache_usage_perc", Id::KvUsage),
    alias("vllm:time_to_first_token_seconds", Id::TimeToFirstToken),
    alias("vllm:time_per_output_token_seconds", Id::InterToken),
    // What vLLM calls it now.
    alias("vllm:inter_token_latency_seconds", Id::InterToken),
    alias("vllm:e2e_request_latency_seconds", Id::RequestDuration),
    alias("vllm:request_queue_time_seconds", Id::QueueTime),
    alias("vllm:prompt_tokens_total", Id::PromptTokens),
    alias("vllm:generation_tokens_total", Id::GeneratedTokens),
    alias("vllm:num_preemptions_total", Id::Preemptions),
];

/// Appends all aliases; `model_name` is the label that vLLM's dashboards choose by.
pub fn write_aliases<'a>(out: &mut String, model_name: &str, series: impl Fn(Id) -> Vec<SeriesRows<'a>>) {
    for alias in ALIASES {
        let extra = Some(ExtraLabel { name: "model_name", value: model_name });
        write_family(out, alias.name, alias.of.metric(), extra, &series(alias.of));
    }
}

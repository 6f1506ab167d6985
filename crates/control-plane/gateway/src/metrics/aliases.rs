//! vLLM's names of metrics, for dashboards and request routers.
//!
//! One table maps each alias to one of our metrics. An alias writes the same series a second time, so the two
//! cannot differ. Aliases are written only with `--vllm-metrics`. `vllm:lora_requests_info`, the contract of
//! the Gateway API inference extension, is always written ([`super::lora_info`]).

use super::{
    table::Id,
    text::{ExtraLabel, SeriesRows, write_family},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricAlias {
    pub name: &'static str,
    pub of: Id,
}

const fn alias(name: &'static str, of: Id) -> MetricAlias {
    MetricAlias { name, of }
}

pub const ALIASES: &[MetricAlias] = &[
    alias("vllm:num_requests_running", Id::Running),
    alias("vllm:num_requests_waiting", Id::Waiting),
    alias("vllm:kv_cache_usage_perc", Id::KvUsage),
    // Former name in vLLM.
    alias("vllm:gpu_cache_usage_perc", Id::KvUsage),
    alias("vllm:time_to_first_token_seconds", Id::TimeToFirstToken),
    alias("vllm:time_per_output_token_seconds", Id::InterToken),
    // Current name in vLLM.
    alias("vllm:inter_token_latency_seconds", Id::InterToken),
    alias("vllm:e2e_request_latency_seconds", Id::RequestDuration),
    alias("vllm:request_queue_time_seconds", Id::QueueTime),
    alias("vllm:prompt_tokens_total", Id::PromptTokens),
    alias("vllm:generation_tokens_total", Id::GeneratedTokens),
    alias("vllm:num_preemptions_total", Id::Preemptions),
];

/// Appends all aliases; vLLM's dashboards filter by the label `model_name`.
pub(crate) fn write_aliases<'a>(
    out: &mut String,
    model_name: &str,
    series: impl Fn(Id) -> Vec<SeriesRows<'a>>,
) {
    for alias in ALIASES {
        let extra = Some(ExtraLabel { name: "model_name", value: model_name });
        write_family(out, alias.name, alias.of.metric(), extra, &series(alias.of));
    }
}

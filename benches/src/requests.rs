//! Settings and requests of an engine in this process.

use model::forward::BLOCK_TOKENS;
use shmproto::message::{
    ColdStart, DeviceFacts, Generate, PROTOCOL_VERSION, Precision, ProvisionalMode, Sampling, Welcome,
};

pub(crate) const CONTEXT: usize = 1024;

pub(crate) fn greedy(request: u64, prompt: &[u32], tokens: usize) -> Generate {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    Generate {
        request,
        adapter: None,
        namespace: [0; 32],
        base_namespace: [0; 32],
        owner: [0; 32],
        prompt: prompt.to_vec(),
        generated: 0,
        max_tokens: tokens as u32,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        sampling,
        logprobs: None,
        prompt_logprobs: None,
        deadline_ms: 0,
        provisional: ProvisionalMode::Unwanted,
        precision: Precision::Serving,
        grammar: None,
        pooling: None,
        expected: Vec::new(),
    }
}

pub(crate) fn welcome() -> Welcome {
    Welcome {
        version: PROTOCOL_VERSION,
        instance: 1,
        model_path: String::new(),
        base_hash: [0; 32],
        text_hash: [0; 32],
        device: DeviceFacts::default(),
        numbers: String::new(),
        context_length: CONTEXT as u32,
        vocab_size: 0,
        adapter_budget_bytes: 0,
        device_budget_bytes: 0,
        cold_start: ColdStart::Cached,
        kv_blocks: 0,
        block_tokens: BLOCK_TOKENS as u32,
        max_running: 1,
        max_waiting: 1,
        chunk_tokens: 512,
        adapters: Vec::new(),
    }
}

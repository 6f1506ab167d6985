//! `llama-server` as a server under test.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{LlamaCpp, PeerWeights};
use crate::{
    http::{Dialect, DialectServer, SseEvent, free_port, with_prompt},
    process::LoggedProcess,
    workload::{AdapterChoice, AnswerKind, BenchRequest, STREAMS, form},
};

const SLOT_TOKENS: usize = 512;

/// Dialect of llama-server's own completion route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Native {
    adapters: usize,
}

pub(crate) type LlamaServer = DialectServer<Native>;

#[derive(Debug, Clone, Copy)]
pub(crate) struct LlamaServerOptions<'a> {
    pub(crate) adapters: &'a [PathBuf],
    pub(crate) slots: usize,
    pub(crate) options: &'a [&'a str],
}

impl Default for LlamaServerOptions<'_> {
    fn default() -> Self {
        Self { adapters: &[], slots: STREAMS, options: &[] }
    }
}

impl LlamaServer {
    /// Starts llama-server with one slot per stream and `adapters` (GGUF files), and waits until it is ready.
    ///
    /// # Errors
    /// Fails if llama-server does not start.
    pub(crate) fn start(
        peer: &LlamaCpp,
        weights: &PeerWeights,
        adapters: &[PathBuf],
        folder: &Path,
    ) -> Result<Self> {
        Self::start_with(
            peer,
            weights,
            &LlamaServerOptions { adapters, ..LlamaServerOptions::default() },
            folder,
        )
    }

    /// Starts llama-server as [`LlamaServer::start`] does, with these options.
    ///
    /// The prompt cache is off: no prompt repeats, so the cache would only cost memory.
    ///
    /// # Errors
    /// If llama-server does not start.
    pub(crate) fn start_with(
        peer: &LlamaCpp,
        weights: &PeerWeights,
        &LlamaServerOptions { adapters, slots, options }: &LlamaServerOptions<'_>,
        folder: &Path,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let port = free_port()?;
        let mut command = Command::new(peer.program("llama-server"));
        command.arg("-m").arg(&weights.file).args(["--host", "127.0.0.1", "--cache-ram", "0", "--no-webui"]);
        for (option, value) in [
            ("--port", usize::from(port)),
            ("-t", peer.threads),
            ("-tb", peer.threads),
            ("-np", slots),
            ("-c", slots * SLOT_TOKENS),
        ] {
            command.arg(option).arg(value.to_string());
        }
        command.args(options);
        if !adapters.is_empty() {
            let files: Vec<String> = adapters.iter().map(|file| file.display().to_string()).collect();
            command.arg("--lora-init-without-apply").arg("--lora").arg(files.join(","));
        }
        let process = LoggedProcess::start(&mut command, &folder.join("log"))?;
        Self::when_ready(process, port, Native { adapters: adapters.len() })
    }
}

impl Dialect for Native {
    fn route(&self) -> &'static str {
        "/completion"
    }

    fn body(&self, job: &BenchRequest) -> Value {
        // A base request must disable an adapter explicitly: by default every loaded adapter applies fully.
        let lora = match job.who {
            AdapterChoice::Base if self.adapters == 0 => json!([]),
            AdapterChoice::Base => json!([{ "id": 0, "scale": 0.0 }]),
            AdapterChoice::Adapter(index) => json!([{ "id": index, "scale": 1.0 }]),
        };
        // A single remaining sampler is the cheapest way to the most likely token.
        let mut body = json!({
            "n_predict": job.generate,
            "cache_prompt": false,
            "samplers": ["top_k"],
            "top_k": 1,
            "lora": lora,
        });
        if job.says == AnswerKind::Form {
            body["json_schema"] = form();
        }
        with_prompt(body, job)
    }

    fn read(&self, event: &Value) -> Result<SseEvent> {
        ensure!(event["error"].is_null(), "the stream ended with an error: {}", event["error"]);
        let tokens = event["tokens"].as_array().map_or(0, Vec::len);
        Ok(SseEvent {
            has_text: tokens > 0,
            generated: event["tokens_predicted"].as_u64().and_then(|n| usize::try_from(n).ok()),
            cached: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{BurstMix, burst};

    const LOADED: Native = Native { adapters: 8 };

    #[test]
    fn a_base_request_switches_the_adapters_off() {
        let body = LOADED.body(&burst(BurstMix::Base, 0)[3]);
        assert_eq!(body["lora"], json!([{ "id": 0, "scale": 0.0 }]));
        assert_eq!((body["cache_prompt"].as_bool(), body["ignore_eos"].as_bool()), (Some(false), Some(true)));
        let body = LOADED.body(&burst(BurstMix::Adapters, 0)[3]);
        assert_eq!(body["lora"], json!([{ "id": 3, "scale": 1.0 }]));
    }

    #[test]
    fn tokens_and_the_final_count_are_told_apart() {
        let token = LOADED.read(&json!({"content": "a", "tokens": [5], "stop": false})).unwrap();
        assert_eq!(token, SseEvent { has_text: true, ..SseEvent::default() });
        let end = LOADED.read(&json!({"tokens": [], "stop": true, "tokens_predicted": 64})).unwrap();
        assert_eq!(end, SseEvent { generated: Some(64), ..SseEvent::default() });
    }
}

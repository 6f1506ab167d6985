//! `vllm serve` on a CPU as a server under test.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use crate::{
    holobiont_runner::{NamedAdapter, RequestModels},
    http::{DialectServer, free_port},
    process::LoggedProcess,
};

/// Time until the server is ready: its first start on a machine compiles the model.
const READY_LIMIT: Duration = Duration::from_secs(600);
const CONTEXT_TOKENS: usize = 2048;
/// Memory for the KV cache in GiB: several times what any load here needs.
const KV_CACHE_GIB: usize = 2;

/// vLLM's API is the one that ours follows, so both servers have one dialect.
pub(crate) type VllmServer = DialectServer<RequestModels>;

/// An installed vLLM, and what it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Vllm {
    /// Folder of the Python environment.
    pub(crate) environment: PathBuf,
    /// Folder of safetensors and tokenizer.
    pub(crate) checkpoint: PathBuf,
    /// Maximum number of sequences per step.
    pub(crate) streams: usize,
    /// Highest rank of an adapter.
    pub(crate) rank: usize,
}

impl Vllm {
    /// Starts vLLM with `adapters`, and waits until it is ready.
    ///
    /// # Errors
    /// Fails if vLLM does not start.
    pub(crate) fn serve(&self, adapters: &[NamedAdapter], folder: &Path) -> Result<VllmServer> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let port = free_port()?;
        let mut command = self.command(port)?;
        if !adapters.is_empty() {
            let (count, rank) = (adapters.len().to_string(), self.rank.to_string());
            command.args(["--enable-lora", "--max-loras", &count, "--max-lora-rank", &rank]);
            let named = |adapter: &NamedAdapter| format!("{}={}", adapter.name, adapter.folder.display());
            command.arg("--lora-modules").args(adapters.iter().map(named));
        }
        let process = LoggedProcess::start(&mut command, &folder.join("log"))?;
        let unnamed = RequestModels::unnamed(adapters, None);
        VllmServer::ready_within(READY_LIMIT, process, port, unnamed)?
            .with_dialect(|models| models.named_by(port))
    }

    fn command(&self, port: u16) -> Result<Command> {
        let program = self.environment.join("bin/vllm");
        ensure!(program.is_file(), "no {}; scripts/build-peer vllm installs it", program.display());
        let mut command = Command::new(program);
        command.arg("serve").arg(&self.checkpoint).args(["--host", "127.0.0.1", "--dtype", "bfloat16"]);
        for (option, value) in [
            ("--port", usize::from(port)),
            ("--max-model-len", CONTEXT_TOKENS),
            ("--max-num-seqs", self.streams),
        ] {
            command.arg(option).arg(value.to_string());
        }
        // vLLM selects its cores among those of this process, and leaves one to its scheduler.
        command
            .arg("--no-enable-prefix-caching")
            .env("VLLM_TARGET_DEVICE", "cpu")
            .env("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB.to_string())
            .env("VLLM_NO_USAGE_STATS", "1")
            .env("HF_HUB_OFFLINE", "1");
        Ok(command)
    }
}

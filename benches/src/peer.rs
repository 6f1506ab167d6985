//! The peers: llama.cpp's benchmark tools and server; vLLM's server; Python with PyTorch.

mod bench;
mod perplexity;
mod python;
mod quantize;
mod server;
mod vllm;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use model_files::gguf::GgufFile;

pub(crate) use python::Python;
pub(crate) use server::{LlamaServer, LlamaServerOptions};
pub(crate) use vllm::{Vllm, VllmServer};

use crate::config::SuiteConfig;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerWeights {
    pub(crate) file: PathBuf,
    /// Name of the format, for example `Q4_1`.
    pub(crate) format: String,
}

#[derive(Debug, Clone)]
pub(crate) struct LlamaCpp {
    folder: PathBuf,
    threads: usize,
    pub(crate) shipped: PeerWeights,
    /// Model file in the peer's fastest format, made with its own tool.
    pub(crate) q4_0: PeerWeights,
}

impl LlamaCpp {
    /// Checks that every program exists and requantizes the model unless an earlier run did.
    ///
    /// # Errors
    /// If a program is missing or fails.
    pub(crate) fn prepare(config: &SuiteConfig) -> Result<Self> {
        let folder = config.peer.as_ref().context("llama.cpp's programs are needed: --peer")?;
        for program in
            ["llama-bench", "llama-batched-bench", "llama-server", "llama-quantize", "llama-perplexity"]
        {
            let path = folder.join(program);
            ensure!(path.is_file(), "no {}; scripts/build-peer builds it", path.display());
        }
        let q4_0 = quantize::requantized(&config.model, "Q4_0", &config.requantized, folder, config.threads)?;
        Ok(Self {
            folder: folder.clone(),
            threads: config.threads,
            shipped: PeerWeights { file: config.model.clone(), format: format_of(&config.model)? },
            q4_0: PeerWeights { file: q4_0, format: "Q4_0".to_owned() },
        })
    }

    /// Returns the shipped model in another format.
    ///
    /// # Errors
    /// If llama-quantize fails.
    pub(crate) fn requantized(&self, config: &SuiteConfig, format: &str) -> Result<PeerWeights> {
        self.made(config, &config.model, format)
    }

    /// Returns `weights` as 32-bit floats.
    ///
    /// # Errors
    /// If llama-quantize fails.
    pub(crate) fn dequantized(&self, config: &SuiteConfig, weights: &PeerWeights) -> Result<PeerWeights> {
        self.made(config, &weights.file, "F32")
    }

    fn made(&self, config: &SuiteConfig, model: &Path, format: &str) -> Result<PeerWeights> {
        let file = quantize::requantized(model, format, &config.requantized, &self.folder, self.threads)?;
        Ok(PeerWeights { file, format: format.to_owned() })
    }

    fn program(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// llama.cpp's name of the most frequent tensor format of `model`.
fn format_of(model: &Path) -> Result<String> {
    let name = match GgufFile::open(model)?.u32("general.file_type")? {
        Some(0) => "F32",
        Some(1) => "F16",
        Some(2) => "Q4_0",
        Some(3) => "Q4_1",
        Some(7) => "Q8_0",
        Some(8) => "Q5_0",
        Some(9) => "Q5_1",
        Some(14 | 15) => "Q4_K",
        Some(16 | 17) => "Q5_K",
        Some(18) => "Q6_K",
        Some(32) => "BF16",
        _ => "as shipped",
    };
    Ok(name.to_owned())
}

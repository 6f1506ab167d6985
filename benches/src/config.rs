//! What a run measures and with which files: raw arguments and the environment, turned into a checked [`Config`].

use std::{num::NonZeroUsize, path::PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};

/// A benchmark, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// One stream, tokens a second.
    Decode,
    /// A prompt of 512 tokens, tokens a second.
    Prefill,
    /// 1 to 16 streams of the base model.
    Batch,
    /// 8 streams on 8 adapters, through HTTP.
    Adapters,
    /// Decode beside a busy process.
    Neighbour,
    /// Start to first token, and memory.
    Startup,
    /// Ten times as many requests as can be served.
    Overload,
    /// Every one of them.
    All,
}

impl Name {
    const EACH: [Self; 7] = [
        Self::Decode,
        Self::Prefill,
        Self::Batch,
        Self::Adapters,
        Self::Neighbour,
        Self::Startup,
        Self::Overload,
    ];
}

/// Measures Holobiont and llama.cpp side by side; prints one JSON object a line.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// What to measure.
    #[arg(required = true, value_enum)]
    names: Vec<Name>,
    /// The model both sides run (GGUF).
    #[arg(long, env = "HOLOBIONT_MODEL", value_name = "FILE")]
    model: PathBuf,
    /// Folder of llama-bench, llama-batched-bench, llama-server and llama-quantize.
    #[arg(long, env = "HOLOBIONT_LLAMA_CPP", value_name = "DIR")]
    peer: PathBuf,
    /// Folder of holobiont, gateway and base-executor (default: the folder of this program).
    #[arg(long, value_name = "DIR")]
    ours: Option<PathBuf>,
    /// Where the peer's requantized models are kept between runs (default: the system's temporary folder).
    #[arg(long, value_name = "DIR")]
    requantized: Option<PathBuf>,
    /// Compute threads of either side, and cores all processes are confined to.
    #[arg(long, default_value = "2", value_name = "N")]
    threads: NonZeroUsize,
    /// Measurements of either side, in alternation.
    #[arg(long, default_value = "5", value_name = "N")]
    runs: NonZeroUsize,
}

/// A checked [`Args`].
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Benchmarks in the order they were asked for, each once.
    pub(crate) names: Vec<Name>,
    /// An existing GGUF file.
    pub(crate) model: PathBuf,
    /// An existing folder of peer binaries.
    pub(crate) peer: PathBuf,
    /// An existing folder of our binaries.
    pub(crate) ours: PathBuf,
    /// A folder that may not exist yet.
    pub(crate) requantized: PathBuf,
    /// Compute threads of either side.
    pub(crate) threads: usize,
    /// Measurements of either side.
    pub(crate) runs: usize,
}

impl Args {
    /// Checks that the files exist and expands `all`.
    ///
    /// # Errors
    /// If a file or folder is missing.
    pub(crate) fn validate(self) -> Result<Config> {
        let ours = match self.ours {
            Some(folder) => folder,
            None => std::env::current_exe()
                .context("cannot find the folder of this program; give it with --ours")?
                .with_file_name(""),
        };
        ensure!(self.model.is_file(), "no model at {}; give a GGUF file with --model", self.model.display());
        ensure!(
            self.peer.is_dir(),
            "no peer binaries at {}; run scripts/build-peer or give a folder with --peer",
            self.peer.display()
        );
        Ok(Config {
            names: expand(&self.names),
            model: self.model,
            peer: self.peer,
            ours,
            requantized: self.requantized.unwrap_or_else(|| std::env::temp_dir().join("holobiont-bench")),
            threads: self.threads.get(),
            runs: self.runs.get(),
        })
    }
}

/// The benchmarks that `names` stands for, each once.
fn expand(names: &[Name]) -> Vec<Name> {
    if names.contains(&Name::All) {
        return Name::EACH.to_vec();
    }
    let mut each = Vec::new();
    for &name in names {
        if !each.contains(&name) {
            each.push(name);
        }
    }
    each
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stands_for_every_benchmark_once() {
        assert_eq!(expand(&[Name::Decode, Name::All]), Name::EACH);
        assert_eq!(expand(&[Name::Batch, Name::Decode, Name::Batch]), [Name::Batch, Name::Decode]);
    }

    #[test]
    fn a_missing_model_is_named_before_anything_is_measured() {
        let args =
            Args::try_parse_from(["bench", "decode", "--model", "/no/such.gguf", "--peer", "/"]).unwrap();
        let message = args.validate().unwrap_err().to_string();
        assert!(message.contains("/no/such.gguf") && message.contains("--model"), "{message}");
    }
}

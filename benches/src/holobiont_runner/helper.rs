//! `base-executor bench`: the executor's forward pass on a synthetic load.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{HolobiontRunner, SyntheticLoad, TokenRates};
use crate::process::output_of;

const LIMIT: Duration = Duration::from_secs(300);

/// Runs each load in a fresh `base-executor bench`, as the peer's tools do.
#[derive(Debug, Clone)]
pub(crate) struct BenchProgram {
    program: PathBuf,
    model: PathBuf,
    threads: usize,
    options: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct BenchOutput {
    #[serde(default)]
    prefill_tokens_per_s: Option<f64>,
    #[serde(default)]
    decode_tokens_per_s: Option<f64>,
}

impl BenchProgram {
    pub(crate) fn new(binaries: &Path, model: &Path, threads: usize) -> Self {
        Self {
            program: binaries.join("base-executor"),
            model: model.to_path_buf(),
            threads,
            options: Vec::new(),
        }
    }

    pub(crate) fn with(self, options: &[&str]) -> Self {
        Self { options: options.iter().map(|&option| option.to_owned()).collect(), ..self }
    }
}

impl HolobiontRunner for BenchProgram {
    fn rates(&self, load: SyntheticLoad) -> Result<TokenRates> {
        let mut command = Command::new(&self.program);
        command.arg("bench").arg("--json").arg("--model").arg(&self.model);
        command.args(&self.options);
        for (option, value) in [
            ("--threads", self.threads),
            ("--prompt", load.prompt_tokens),
            ("--generate", load.generated_tokens),
            ("--streams", load.streams),
        ] {
            command.arg(option).arg(value.to_string());
        }
        read(&output_of(&mut command, LIMIT)?)
    }
}

fn read(output: &str) -> Result<TokenRates> {
    let printed: BenchOutput = serde_json::from_str(output.trim())
        .with_context(|| format!("base-executor bench printed no rates but: {output}"))?;
    Ok(TokenRates {
        prefill_tokens_per_s: printed.prefill_tokens_per_s.unwrap_or(0.0),
        decode_tokens_per_s: printed.decode_tokens_per_s.unwrap_or(0.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_a_missing_one_is_zero() {
        let rates =
            read("{\"prefill_tokens_per_s\": 1500.5, \"decode_tokens_per_s\": null, \"more\": 1}\n").unwrap();
        assert_eq!(rates, TokenRates { prefill_tokens_per_s: 1500.5, decode_tokens_per_s: 0.0 });
        assert!(read("error: no such command").is_err());
    }
}

//! `llama-bench` and `llama-batched-bench`: one warmed-up measurement per call, so that calls can alternate
//! with ours.

use std::{process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{LlamaCpp, PeerWeights};
use crate::process::output_of;

/// Long timeout: beside a busy process a spin barrier can take a second per token.
const LIMIT: Duration = Duration::from_secs(300);

/// Element of the output of `llama-bench -o json`.
#[derive(Debug, Deserialize)]
struct BenchResult {
    avg_ts: f64,
}

/// Line of the output of `llama-batched-bench --output-format jsonl`.
#[derive(Debug, Deserialize)]
struct BatchedResult {
    pl: usize,
    speed_tg: f64,
}

impl LlamaCpp {
    /// Tokens per second of one stream that generates `tokens` tokens from an empty context.
    ///
    /// # Errors
    /// If llama-bench fails.
    pub(crate) fn decode(&self, weights: &PeerWeights, tokens: usize) -> Result<f64> {
        self.bench(weights, 0, tokens)
    }

    /// Tokens per second of one prompt of `tokens` tokens.
    ///
    /// # Errors
    /// If llama-bench fails.
    pub(crate) fn prefill(&self, weights: &PeerWeights, tokens: usize) -> Result<f64> {
        self.bench(weights, tokens, 0)
    }

    fn bench(&self, weights: &PeerWeights, prompt: usize, generate: usize) -> Result<f64> {
        let mut command = Command::new(self.program("llama-bench"));
        command.arg("-m").arg(&weights.file).args(["-o", "json", "-r", "1"]);
        for (option, value) in [("-t", self.threads), ("-p", prompt), ("-n", generate)] {
            command.arg(option).arg(value.to_string());
        }
        read_bench(&output_of(&mut command, LIMIT)?)
    }

    /// Decode tokens per second at each of `streams` sequences, with prompts of `prompt` tokens and
    /// `generate` tokens each.
    ///
    /// # Errors
    /// If llama-batched-bench fails or leaves a size out.
    pub(crate) fn batched(
        &self,
        weights: &PeerWeights,
        streams: &[usize],
        prompt: usize,
        generate: usize,
    ) -> Result<Vec<f64>> {
        let most = streams.iter().max().copied().unwrap_or(1);
        let list = streams.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let mut command = Command::new(self.program("llama-batched-bench"));
        command.arg("-m").arg(&weights.file).args(["--output-format", "jsonl", "-npl", &list]);
        for (option, value) in [
            ("-t", self.threads),
            ("-tb", self.threads),
            ("-npp", prompt),
            ("-ntg", generate),
            ("-c", most * (prompt + generate)),
        ] {
            command.arg(option).arg(value.to_string());
        }
        let results = read_batched(&output_of(&mut command, LIMIT)?)?;
        let measured: Vec<usize> = results.iter().map(|result| result.pl).collect();
        ensure!(
            measured == streams,
            "llama-batched-bench measured {measured:?} streams instead of {streams:?}"
        );
        Ok(results.iter().map(|result| result.speed_tg).collect())
    }
}

fn read_bench(output: &str) -> Result<f64> {
    let results: Vec<BenchResult> = serde_json::from_str(output)
        .with_context(|| format!("llama-bench printed no results but: {output}"))?;
    Ok(results.first().with_context(|| format!("llama-bench measured nothing: {output}"))?.avg_ts)
}

/// Skips the log lines between the results.
fn read_batched(output: &str) -> Result<Vec<BatchedResult>> {
    output
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("llama-batched-bench printed {line}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_read_from_what_llama_bench_prints() {
        let output =
            r#"[ { "build_commit": "x", "n_prompt": 0, "n_gen": 128, "avg_ts": 144.5, "stddev_ts": 1.0 } ]"#;
        assert_eq!(read_bench(output).unwrap(), 144.5);
        assert!(read_bench("[]").is_err());
        assert!(read_bench("error: no model").is_err());
    }

    #[test]
    fn every_batch_size_is_read_from_between_the_log_lines() {
        let output = "main: n_kv_max = 768\n{\"pp\": 128, \"pl\": 1, \"speed_tg\": 170.5}\n\n{\"pl\": 4, \"speed_tg\": 280.0}\n";
        let rates = read_batched(output).unwrap();
        assert_eq!(rates.iter().map(|r| (r.pl, r.speed_tg)).collect::<Vec<_>>(), [(1, 170.5), (4, 280.0)]);
        assert!(read_batched("{\"pl\": 1}").is_err());
    }
}

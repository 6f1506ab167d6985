//! `llama-perplexity`: divergence of the peer's distributions from those of 32-bit floats.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context, Result};

use super::{LlamaCpp, PeerWeights};
use crate::process::output_of;

const LIMIT: Duration = Duration::from_secs(600);

impl LlamaCpp {
    /// Mean KL divergence of `weights` from `exact` in nats, on the first windows of `text`; the arguments
    /// give their length in tokens and their number.
    ///
    /// # Errors
    /// If llama-perplexity fails.
    pub(crate) fn divergence(
        &self,
        weights: &PeerWeights,
        exact: &PeerWeights,
        text: &Path,
        [tokens, stretches]: [usize; 2],
    ) -> Result<f64> {
        let logits = text.with_extension("logits");
        let run = |weights: &PeerWeights| {
            let mut command = Command::new(self.program("llama-perplexity"));
            command.arg("-m").arg(&weights.file).arg("-f").arg(text);
            command.arg("--kl-divergence-base").arg(&logits);
            for (option, value) in [("-t", self.threads), ("-c", tokens), ("--chunks", stretches)] {
                command.arg(option).arg(value.to_string());
            }
            command
        };
        output_of(&mut run(exact), LIMIT)?;
        read(&output_of(run(weights).arg("--kl-divergence"), LIMIT)?)
    }
}

/// Reads the mean from the output: `Mean    KLD:   0.003049 ±   0.000049`.
fn read(output: &str) -> Result<f64> {
    let mean = output.lines().find_map(|line| line.trim().strip_prefix("Mean")?.trim().strip_prefix("KLD:"));
    let mean = mean.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    mean.with_context(|| format!("llama-perplexity printed no divergence but: {output}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_read_from_between_the_other_figures() {
        let output =
            "Mean ln(PPL(Q)/PPL(base)) : 0.006\nMean    KLD:   0.003049 ±   0.000049\nMaximum KLD: 0.07\n";
        assert_eq!(read(output).unwrap(), 0.003049);
        assert!(read("error: no model").is_err());
    }
}

//! The command `bench`: decoding speed of this client, in JSON lines.

use std::{ops::ControlFlow, time::Instant};

use model::sampling::{Sampling, SamplingParams};
use serde_json::json;

use super::{
    exit::CliError,
    generate::tokens_per_s,
    setup::{ReadyModel, SetupArguments},
    terminal::Terminal,
};
use crate::generate::GenerateRequest;

#[derive(Debug, clap::Args)]
pub(super) struct SplitBenchArguments {
    #[command(flatten)]
    setup: SetupArguments,
    /// Number of tokens to decode per run
    #[arg(long, value_name = "N", default_value_t = 64)]
    tokens: usize,
    /// Number of prompt tokens
    #[arg(long, value_name = "N", default_value_t = 32)]
    prompt_tokens: usize,
    /// Number of measured runs; one unmeasured run comes before them
    #[arg(long, value_name = "R", default_value_t = 5)]
    runs: u32,
}

pub(super) fn run(arguments: &SplitBenchArguments, terminal: Terminal) -> Result<(), CliError> {
    let mut ready = arguments.setup.ready(terminal)?;
    for index in 0..=arguments.runs {
        // Each run has another prompt, because the prefix cache would hold a repeated one.
        let line = measure(&mut ready, arguments, index)?;
        if index > 0 {
            terminal.print(line)?;
        }
    }
    Ok(())
}

fn measure(
    ready: &mut ReadyModel,
    arguments: &SplitBenchArguments,
    run: u32,
) -> Result<serde_json::Value, CliError> {
    let vocab_size = ready.model.config().vocab_size;
    let vocabulary = u32::try_from(vocab_size).unwrap_or(u32::MAX).max(1);
    let length = u32::try_from(arguments.prompt_tokens.max(1)).unwrap_or(u32::MAX);
    let prompt: Vec<u32> =
        (0..length).map(|at| at.wrapping_mul(7919).wrapping_add(run * 104_729 + 1) % vocabulary).collect();
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let sampling =
        SamplingParams::new(greedy, vocab_size).map_err(|error| CliError::Usage(error.to_string()))?;
    // Without stop tokens all runs have the same length.
    let task = GenerateRequest { prompt, sampling, max_tokens: arguments.tokens, stop_tokens: Vec::new() };
    let before = ready.model.session().usage().clone();
    ready.model.session_mut().forget_latencies();
    let begun = Instant::now();
    let generated =
        ready.model.generate(&task, ready.adapter.as_ref(), &mut |_| ControlFlow::Continue(()))?;
    let total_s = begun.elapsed().as_secs_f64();
    let usage = ready.model.session().usage();
    Ok(json!({
        "bench": "split",
        "run": run,
        "mode": ready.mode,
        "prompt_tokens": arguments.prompt_tokens,
        "tokens": generated.tokens.len(),
        "ttft_s": generated.first_token.as_secs_f64(),
        "total_s": total_s,
        "decode_tokens_per_s": tokens_per_s(&generated),
        "calls": usage.calls - before.calls,
        "call_us_median": usage.latencies.quantile_us(0.5),
        "call_us_p99": usage.latencies.quantile_us(0.99),
        "bytes_out": usage.bytes_out - before.bytes_out,
        "bytes_in": usage.bytes_in - before.bytes_in,
        "wait_us": usage.waited_us - before.waited_us,
        "calls_us": usage.calls_us - before.calls_us,
    }))
}

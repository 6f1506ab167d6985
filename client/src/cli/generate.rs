//! The command `generate`: one prompt, one answer.

use std::{
    io::{self, Read as _},
    ops::ControlFlow,
};

use serde_json::{Value, json};
use text::detokenize::TextStart;

use super::{
    drafts,
    exit::CliError,
    setup::{ReadyModel, SamplingArguments, SetupArguments},
    terminal::{OutputFormat, Terminal},
};
use crate::{
    generate::{GenerateFinish, GenerateRequest, Generated},
    session::usage::SessionUsage,
    text::{ChatRole, PromptMessage},
};

const MAX_PROMPT_BYTES: u64 = 16 << 20;

#[derive(Debug, clap::Args)]
pub(super) struct GenerateArguments {
    #[command(flatten)]
    setup: SetupArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Continues the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// System instructions before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Prompt text; else stdin
    prompt: Option<String>,
}

pub(super) fn run(arguments: &GenerateArguments, terminal: Terminal) -> Result<(), CliError> {
    let prompt = match &arguments.prompt {
        Some(prompt) => prompt.clone(),
        None => read_stdin()?,
    };
    let mut ready = arguments.setup.ready(terminal)?;
    let sampling = arguments.sampling.params(&ready)?;
    let (prompt, start) = if arguments.raw {
        (ready.text.encode_raw(&prompt)?, TextStart::Continuation)
    } else {
        let system = arguments
            .system
            .iter()
            .map(|text| PromptMessage { role: ChatRole::System, content: text.clone() });
        let messages: Vec<_> =
            system.chain([PromptMessage { role: ChatRole::User, content: prompt }]).collect();
        (ready.text.encode_chat(&messages)?, TextStart::Beginning)
    };
    let prompt_tokens = prompt.len();
    let (max_tokens, stop_tokens) = (arguments.sampling.max_tokens, arguments.sampling.stop_tokens(&ready));
    let task = GenerateRequest { prompt, sampling, max_tokens, stop_tokens };
    let before = ready.model.session().usage().clone();
    let GeneratedAnswer { text, generated } = answer(&mut ready, &task, start, terminal)?;
    if terminal.format == OutputFormat::Json {
        let tokens = TokenReport { prompt: prompt_tokens, generated: &generated };
        terminal.print(report(&ready, &text, &tokens, &before))?;
    }
    Ok(())
}

fn read_stdin() -> Result<String, CliError> {
    let mut prompt = String::new();
    io::stdin().lock().take(MAX_PROMPT_BYTES).read_to_string(&mut prompt)?;
    Ok(prompt)
}

#[derive(Debug)]
pub(super) struct GeneratedAnswer {
    pub(super) text: String,
    pub(super) generated: Generated,
}

/// Generates an answer, and streams its text if the output is for a user.
pub(super) fn answer(
    ready: &mut ReadyModel,
    task: &GenerateRequest,
    start: TextStart,
    terminal: Terminal,
) -> Result<GeneratedAnswer, CliError> {
    let mut decoder = ready.text.decoder(start);
    let (mut text, mut printed) = (String::new(), Ok(()));
    let is_streamed = terminal.format == OutputFormat::Human;
    let mut on_token = |token| {
        let piece = decoder.push(token);
        text.push_str(piece);
        if is_streamed && !piece.is_empty() {
            printed = terminal.stream(piece);
        }
        if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let (model, adapter) = (&mut ready.model, ready.adapter.as_ref());
    let generated = match &mut ready.guesses {
        Some(guesses) => model.generate_drafted(task, adapter, guesses.begin(&task.prompt), &mut on_token),
        None => model.generate(task, adapter, &mut on_token),
    }?;
    printed?;
    let rest = decoder.finish();
    text.push_str(rest);
    if is_streamed {
        terminal.stream(rest)?;
        terminal.print("")?;
    }
    Ok(GeneratedAnswer { text, generated })
}

struct TokenReport<'a> {
    prompt: usize,
    generated: &'a Generated,
}

fn report(ready: &ReadyModel, text: &str, tokens: &TokenReport<'_>, before: &SessionUsage) -> Value {
    let (generated, usage) = (tokens.generated, ready.model.session().usage());
    let completion = generated.tokens.len();
    let finish = match generated.finish {
        GenerateFinish::Stop => "stop",
        GenerateFinish::Length => "length",
        GenerateFinish::Stopped => "stopped",
    };
    json!({
        "text": text,
        "finish_reason": finish,
        "usage": {
            "prompt_tokens": tokens.prompt,
            "completion_tokens": completion,
            "cached_tokens": generated.cached_tokens,
        },
        "mode": ready.mode,
        "drafts": ready.guesses.is_some().then(|| drafts::report(&generated.drafted)),
        "timings": {
            "ttft_s": generated.first_token.as_secs_f64(),
            "total_s": generated.total.as_secs_f64(),
            "tokens_per_s": tokens_per_s(generated),
            "calls": usage.calls - before.calls,
            "bytes_out": usage.bytes_out - before.bytes_out,
            "bytes_in": usage.bytes_in - before.bytes_in,
            "wait_us": usage.waited_us - before.waited_us,
            "calls_us": usage.calls_us - before.calls_us,
            "reconnections": usage.reconnections - before.reconnections,
        },
    })
}

/// Returns the tokens per second after the first token; `None` for a single token.
pub(super) fn tokens_per_s(generated: &Generated) -> Option<f64> {
    let decoded = u32::try_from(generated.tokens.len()).unwrap_or(u32::MAX).saturating_sub(1);
    let seconds = generated.total.saturating_sub(generated.first_token).as_secs_f64();
    (decoded > 0 && seconds > 0.0).then(|| f64::from(decoded) / seconds)
}

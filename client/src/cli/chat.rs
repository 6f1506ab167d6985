//! The command `chat`: a conversation whose KV cache is kept, so that only new tokens are computed.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use text::detokenize::TextStart;

use super::{
    drafts,
    exit::CliError,
    generate::{answer, tokens_per_s},
    setup::{ReadyModel, SamplingArguments, SetupArguments},
    terminal::Terminal,
};
use crate::{
    generate::{GenerateError, GenerateRequest},
    text::{ChatRole, PromptMessage},
};

const HELP: &str =
    "/clear starts a new conversation, /stats shows figures of the last answer, /bye ends the chat";

#[derive(Debug, clap::Args)]
pub(super) struct SplitChatArguments {
    #[command(flatten)]
    setup: SetupArguments,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// System instructions before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
}

pub(super) fn run(arguments: &SplitChatArguments, terminal: Terminal) -> Result<(), CliError> {
    let mut ready = arguments.setup.ready(terminal)?;
    let opening: Vec<PromptMessage> =
        arguments.system.iter().map(|text| message(ChatRole::System, text.clone())).collect();
    let (mut messages, mut last) = (opening.clone(), None);
    let is_person = io::stdin().is_terminal();
    let mut lines = io::stdin().lock().lines();
    loop {
        if is_person {
            let _ = write!(io::stderr(), "> ").and_then(|()| io::stderr().flush());
        }
        let Some(line) = lines.next().transpose()? else { return Ok(()) };
        match line.trim() {
            "" => {}
            "/bye" | "/exit" => return Ok(()),
            "/help" | "/?" => terminal.note(HELP),
            "/clear" => messages.clone_from(&opening),
            "/stats" => match &last {
                Some(stats) => terminal.note(stats),
                None => terminal.note("no answer yet"),
            },
            said => {
                messages.push(message(ChatRole::User, said.to_owned()));
                match answer_turn(&mut ready, arguments, &messages, terminal) {
                    Ok((text, stats)) => {
                        messages.push(message(ChatRole::Assistant, text));
                        last = Some(stats);
                    }
                    // The executor may be back when the user tries again.
                    Err(error @ CliError::Generate(GenerateError::Call(_))) if is_person => {
                        messages.pop();
                        terminal.error(&error);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }
}

fn message(role: ChatRole, content: String) -> PromptMessage {
    PromptMessage { role, content }
}

/// Generates one answer; also returns its stats as a line of text.
fn answer_turn(
    ready: &mut ReadyModel,
    arguments: &SplitChatArguments,
    messages: &[PromptMessage],
    terminal: Terminal,
) -> Result<(String, String), CliError> {
    let prompt = ready.text.encode_chat(messages)?;
    let task = GenerateRequest {
        sampling: arguments.sampling.params(ready)?,
        max_tokens: arguments.sampling.max_tokens,
        stop_tokens: arguments.sampling.stop_tokens(ready),
        prompt,
    };
    let prompt_tokens = task.prompt.len();
    let answer = answer(ready, &task, TextStart::Beginning, terminal)?;
    let generated = &answer.generated;
    let guessed = drafts::summary(&generated.drafted);
    let stats = format!(
        "{prompt_tokens} tokens read, {} of them kept from before; {} written; first after {:.2} s, then {:.1} a second{guessed}; {}",
        generated.cached_tokens,
        generated.tokens.len(),
        generated.first_token.as_secs_f64(),
        tokens_per_s(generated).unwrap_or_default(),
        ready.mode
    );
    Ok((answer.text, stats))
}

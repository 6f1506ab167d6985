//! `holobiont chat`: a conversation with the base or an adapter of a running gateway, streamed as the
//! answer arrives.
//!
//! # Layout
//!
//! - [`conversation`]: messages and answers of a conversation
//! - [`input`]: the user's input as message or command; [`editor`]: the line editor
//! - [`settings`]: sampling settings that `/set` changes
//! - [`interrupt`]: handling of Ctrl-C
//! - [`target`]: choice of the served model
//! - [`screen`]: display of an answer as it arrives
//! - [`split`]: conversation as a split client

mod conversation;
mod editor;
mod input;
mod interrupt;
mod screen;
mod settings;
mod split;
mod target;

use std::io::{self, IsTerminal as _, Read as _};

use crate::{
    client::{ClientError, GatewayClient, ServedModel},
    deployment::selection::{GatewayArguments, SelectionError},
    exit::{Exit, Explain},
    home::HomeDirectory,
    terminal::Terminal,
};
use conversation::{Conversation, Drafts};
use editor::LineEditor;
use interrupt::{IdleInterrupt, Interrupt};
use settings::ChatSettings;
use target::{TargetError, choose};

#[derive(Debug, clap::Args)]
pub(crate) struct ChatArguments {
    /// Model to chat with: :ADAPTER, BASE:ADAPTER, or a name that `holobiont ls` shows; a question of several
    /// words goes to the base
    #[arg(value_name = "[BASE][:ADAPTER]", default_value = "")]
    target: String,
    /// Question to answer before the command exits; if stdin is not a terminal, the question is read from
    /// stdin
    prompt: Option<String>,
    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Sampling temperature; 0 always chooses the likeliest token
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Random seed; the same seed gives the same answer to the same question
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// System message at the start of each conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Hides draft tokens, which a terminal otherwise shows dimmed until they are verified
    #[arg(long)]
    no_provisional: bool,
    #[command(flatten)]
    split: split::SplitArguments,
}

impl ChatArguments {
    /// Moves a question without target from `target` to `prompt`: it has several words and names no served
    /// model.
    fn question_alone(mut self, served: &[ServedModel]) -> Self {
        let is_question = self.target.contains(char::is_whitespace) && !self.target.starts_with(':');
        if is_question && self.prompt.is_none() && choose(&self.target, served).is_err() {
            self.prompt = Some(std::mem::take(&mut self.target));
        }
        self
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ChatError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error(transparent)]
    Split(#[from] split::SplitError),
    #[error("cannot read the question from stdin")]
    Read(#[source] io::Error),
    #[error("stdin is empty; give a question as an argument or on stdin")]
    NoQuestion,
    /// The user pressed Ctrl-C while a one-shot question was answered.
    #[error("stopped")]
    Interrupted,
}

impl Explain for ChatError {
    fn exit(&self) -> Exit {
        match self {
            Self::Client(error) => error.exit(),
            Self::Selection(error) => error.exit(),
            Self::Target(error) => error.exit(),
            Self::Split(error) => error.exit(),
            Self::Read(_) | Self::Interrupted => Exit::Failed,
            Self::NoQuestion => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.next(),
            Self::Selection(error) => error.next(),
            Self::Target(error) => error.next(),
            Self::Split(error) => error.next(),
            Self::NoQuestion => Some("holobiont chat :ADAPTER \"a question\"".into()),
            Self::Read(_) | Self::Interrupted => None,
        }
    }
}

/// Runs a conversation until the one-shot question is answered or the user ends it.
pub(crate) fn run(
    arguments: ChatArguments,
    gateway: &GatewayArguments,
    terminal: Terminal,
) -> Result<(), ChatError> {
    split::run(&arguments, gateway)?;
    let client = GatewayClient::new(&gateway.url()?, terminal);
    let served = client.models()?;
    let arguments = arguments.question_alone(&served);
    let model = choose(&arguments.target, &served)?;
    let settings = ChatSettings::new(arguments.max_tokens, arguments.temperature, arguments.seed);
    let drafts = if terminal.draws() && !arguments.no_provisional { Drafts::Shown } else { Drafts::Hidden };
    let talk = |otherwise| {
        let interrupt = Interrupt::new(otherwise);
        Conversation::new(client, model, arguments.system, settings, interrupt, (terminal, drafts))
    };
    match arguments.prompt {
        Some(prompt) => talk(IdleInterrupt::Ends).one_shot(&prompt),
        None if io::stdin().is_terminal() => {
            let editor =
                LineEditor::new(HomeDirectory::from_environment().chat_history()).map_err(ChatError::Read)?;
            talk(IdleInterrupt::Nothing).converse(editor)
        }
        None => {
            let mut prompt = String::new();
            io::stdin().read_to_string(&mut prompt).map_err(ChatError::Read)?;
            talk(IdleInterrupt::Ends).one_shot(&prompt)
        }
    }
}

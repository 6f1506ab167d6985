//! `holobiont chat`: talks to the base or an adapter of a running gateway, word by word as it answers.
//!
//! # Layout
//!
//! - [`conversation`]: what is said, by whom, and what became of it
//! - [`input`]: what a person types, as text or as a command; [`editor`]: how they type it
//! - [`settings`]: what `/set` changes
//! - [`interrupt`]: what Ctrl-C ends
//! - [`target`]: which served model is meant
//! - [`screen`]: how an answer is shown while it comes
//! - [`split`]: the same with a process of the user's own

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

/// Arguments of `chat`.
#[derive(Debug, clap::Args)]
pub(crate) struct ChatArguments {
    /// Whom to talk to: nothing for the base, :ADAPTER, BASE:ADAPTER, or a name that `holobiont ls` shows; a question alone, in
    /// more than one word, is to the base
    #[arg(value_name = "[BASE][:ADAPTER]", default_value = "")]
    target: String,
    /// Asks this one question and exits; without it, and when stdin is no terminal, stdin is the question
    prompt: Option<String>,
    /// Most tokens of an answer
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// 0 for the likeliest answer
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// The same seed gives the same answer to the same question
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// What every conversation begins with
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Shows words only once they are certain; else, on a terminal, those that are drafted are shown dimmed before
    #[arg(long)]
    no_provisional: bool,
    #[command(flatten)]
    split: split::SplitArguments,
}

impl ChatArguments {
    /// A question alone stands where the target does: it has words, and nobody is called so.
    fn question_alone(mut self, served: &[ServedModel]) -> Self {
        let is_question = self.target.contains(char::is_whitespace) && !self.target.starts_with(':');
        if is_question && self.prompt.is_none() && choose(&self.target, served).is_err() {
            self.prompt = Some(std::mem::take(&mut self.target));
        }
        self
    }
}

/// Why a conversation ended badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChatError {
    /// The gateway did not answer as hoped.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No deployment is meant.
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// There is no such model or adapter.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A split conversation cannot be held.
    #[error(transparent)]
    Split(#[from] split::SplitError),
    /// Stdin cannot be read.
    #[error("cannot read the question from stdin")]
    Read(#[source] io::Error),
    /// Stdin is empty.
    #[error("there is no question: stdin is empty")]
    NoQuestion,
    /// Ctrl-C while answering a one-shot question.
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

/// Talks until the question is answered, or the user has had enough.
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

//! `holobiont chat`: talks to the base or an adapter of a running gateway, word by word as it answers.

mod input;
mod split;
mod target;

use std::{
    io::{self, IsTerminal as _, Read as _, Write as _},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    client::{Client, ClientError, Usage},
    exit::{Exit, Explain},
    terminal::{Format, Terminal, printable},
};
use input::{Input, read_input};
use target::{TargetError, choose};

/// Arguments of `chat`.
#[derive(Debug, clap::Args)]
pub(crate) struct ChatArguments {
    /// Whom to talk to: nothing for the base, :ADAPTER, BASE:ADAPTER, or a name that `holobiont ls` shows
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
    #[command(flatten)]
    split: split::SplitArguments,
}

/// Why a conversation ended badly.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChatError {
    /// The gateway did not answer as hoped.
    #[error(transparent)]
    Client(#[from] ClientError),
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
            Self::Target(error) => error.exit(),
            Self::Split(error) => error.exit(),
            Self::Read(_) | Self::Interrupted => Exit::Failed,
            Self::NoQuestion => Exit::Usage,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.next(),
            Self::Target(error) => error.next(),
            Self::Split(error) => error.next(),
            Self::NoQuestion => Some("holobiont chat :ADAPTER \"a question\"".into()),
            Self::Read(_) | Self::Interrupted => None,
        }
    }
}

/// Talks until the question is answered, or the user has had enough.
pub(crate) fn run(arguments: ChatArguments, url: &str, terminal: Terminal) -> Result<(), ChatError> {
    split::run(&arguments)?;
    let client = Client::new(url, terminal);
    let model = choose(&arguments.target, &client.models()?)?;
    let interrupt = Interrupt::new();
    let settings = Settings { max_tokens: arguments.max_tokens, temperature: arguments.temperature };
    let mut chat = Chat { client, model, settings, messages: Vec::new(), last: None, interrupt, terminal };
    match arguments.prompt {
        Some(prompt) => chat.one_shot(&prompt),
        None if io::stdin().is_terminal() => chat.converse(),
        None => {
            let mut prompt = String::new();
            io::stdin().read_to_string(&mut prompt).map_err(ChatError::Read)?;
            chat.one_shot(&prompt)
        }
    }
}

/// What the user said about answers.
#[derive(Debug, Clone, Copy)]
struct Settings {
    max_tokens: Option<u32>,
    temperature: Option<f64>,
}

/// A conversation.
struct Chat {
    client: Client,
    model: String,
    settings: Settings,
    messages: Vec<Value>,
    last: Option<Stats>,
    interrupt: Interrupt,
    terminal: Terminal,
}

/// Numbers of an answer.
#[derive(Debug, Clone, Copy)]
struct Stats {
    first_token: Duration,
    total: Duration,
    usage: Option<Usage>,
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Complete,
    Interrupted,
}

impl Chat {
    fn one_shot(&mut self, prompt: &str) -> Result<(), ChatError> {
        if prompt.trim().is_empty() {
            return Err(ChatError::NoQuestion);
        }
        match self.ask(prompt)? {
            Ending::Complete => Ok(()),
            Ending::Interrupted => Err(ChatError::Interrupted),
        }
    }

    fn converse(&mut self) -> Result<(), ChatError> {
        self.terminal
            .note(self.terminal.ink().dim("Ctrl-D ends, Ctrl-C stops an answer, /help lists commands"));
        loop {
            match self.read().map_err(ChatError::Read)? {
                Input::End => return Ok(()),
                Input::Nothing => {}
                Input::Say(text) => self.ask_and_go_on(&text),
                Input::Adapter(name) => self.switch(&name),
                Input::Stats => self.show_stats(),
                Input::Clear => {
                    self.messages.clear();
                    self.terminal.note("a new conversation");
                }
                Input::Help => self.terminal.note(input::HELP),
                Input::Unknown(command) => {
                    self.terminal.note(format_args!("{command} is no command; /help lists them"));
                }
            }
        }
    }

    /// Prompts go to stderr: stdout holds answers only.
    fn read(&self) -> io::Result<Input> {
        read_input(&mut io::stdin().lock(), &mut io::stderr().lock(), &self.model)
    }

    /// One failed answer does not end a conversation; the question is taken back.
    fn ask_and_go_on(&mut self, text: &str) {
        let before = self.messages.len();
        if let Err(error) = self.ask(text) {
            self.messages.truncate(before);
            self.terminal.error(&error);
        }
    }

    fn switch(&mut self, name: &str) {
        let models = match self.client.models() {
            Ok(models) => models,
            Err(error) => return self.terminal.error(&error),
        };
        if name.is_empty() {
            let names = models.iter().map(|model| model.id.as_str()).collect::<Vec<_>>();
            return self.terminal.note(names.join("  "));
        }
        match choose(name, &models) {
            Ok(model) => self.model = model,
            Err(error) => self.terminal.error(&error),
        }
    }

    fn show_stats(&self) {
        match self.last {
            Some(stats) => self.terminal.note(stats.text()),
            None => self.terminal.note("no answer yet"),
        }
    }

    /// Asks, prints the answer as it comes, and remembers both.
    fn ask(&mut self, text: &str) -> Result<Ending, ChatError> {
        self.messages.push(json!({"role": "user", "content": text}));
        let start = Instant::now();
        let _answering = self.interrupt.answering();
        let mut stats = Stats { first_token: Duration::ZERO, total: Duration::ZERO, usage: None };
        let mut answer = String::new();
        let mut ending = Ending::Complete;
        for piece in self.client.stream("/v1/chat/completions", &self.body())? {
            let piece = piece?;
            if answer.is_empty() && !piece.text.is_empty() {
                stats.first_token = start.elapsed();
            }
            self.show(&piece.text);
            answer.push_str(&piece.text);
            stats.usage = piece.usage.or(stats.usage);
            if self.interrupt.was_pressed() {
                ending = Ending::Interrupted;
                break;
            }
        }
        stats.total = start.elapsed();
        self.finish(&answer, stats);
        Ok(ending)
    }

    fn body(&self) -> Value {
        let mut body = json!({
            "model": self.model,
            "messages": self.messages,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if let Some(max_tokens) = self.settings.max_tokens {
            body["max_tokens"] = max_tokens.into();
        }
        if let Some(temperature) = self.settings.temperature {
            body["temperature"] = temperature.into();
        }
        body
    }

    fn show(&self, text: &str) {
        if self.terminal.format == Format::Human {
            let mut out = io::stdout().lock();
            let shown = if io::stdout().is_terminal() { printable(text) } else { text.to_owned() };
            let _ = out.write_all(shown.as_bytes()).and_then(|()| out.flush());
        }
    }

    fn finish(&mut self, answer: &str, stats: Stats) {
        match self.terminal.format {
            Format::Human => self.terminal.print(""),
            Format::Json => {
                let usage = stats.usage.map(|usage| {
                    json!({"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens})
                });
                self.terminal.print(json!({"model": self.model, "content": answer, "usage": usage}));
            }
        }
        self.messages.push(json!({"role": "assistant", "content": answer}));
        self.last = Some(stats);
    }
}

impl Stats {
    fn text(self) -> String {
        let first_ms = self.first_token.as_millis();
        let Some(usage) = self.usage else {
            return format!("first token after {first_ms} ms");
        };
        let decode_s = self.total.saturating_sub(self.first_token).as_secs_f64();
        let later_tokens = usage.completion_tokens.saturating_sub(1) as f64;
        let rate = if decode_s > 0.0 { later_tokens / decode_s } else { 0.0 };
        format!(
            "{} prompt tokens, {} answered; first token after {first_ms} ms, then {rate:.1} tokens/s",
            usage.prompt_tokens, usage.completion_tokens
        )
    }
}

const LISTENING: u8 = 0;
const ANSWERING: u8 = 1;
const PRESSED: u8 = 2;

/// Ctrl-C: stops an answer, and ends the program otherwise.
struct Interrupt(Arc<AtomicU8>);

impl Interrupt {
    /// Listens for Ctrl-C on a thread of its own. Where that is not possible, Ctrl-C ends the program as ever.
    fn new() -> Self {
        let state = Arc::new(AtomicU8::new(LISTENING));
        let shared = Arc::clone(&state);
        if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
            std::thread::spawn(move || {
                while runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
                    let pressed =
                        shared.compare_exchange(ANSWERING, PRESSED, Ordering::AcqRel, Ordering::Acquire);
                    if pressed.is_err() {
                        // What a shell expects of a program that SIGINT ended.
                        std::process::exit(130);
                    }
                }
            });
        }
        Self(state)
    }

    /// An answer is being printed until the returned value is dropped.
    fn answering(&self) -> Answering {
        self.0.store(ANSWERING, Ordering::Release);
        Answering(Arc::clone(&self.0))
    }

    fn was_pressed(&self) -> bool {
        self.0.load(Ordering::Acquire) == PRESSED
    }
}

struct Answering(Arc<AtomicU8>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.store(LISTENING, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_count_the_rate_after_the_first_token() {
        let stats = Stats {
            first_token: Duration::from_millis(100),
            total: Duration::from_millis(1100),
            usage: Some(Usage { prompt_tokens: 7, completion_tokens: 11 }),
        };
        assert_eq!(
            stats.text(),
            "7 prompt tokens, 11 answered; first token after 100 ms, then 10.0 tokens/s"
        );
    }

    #[test]
    fn a_press_is_seen_while_answering_only() {
        let state = Arc::new(AtomicU8::new(LISTENING));
        let interrupt = Interrupt(Arc::clone(&state));
        let answering = interrupt.answering();
        assert!(!interrupt.was_pressed());
        state.store(PRESSED, Ordering::Release);
        assert!(interrupt.was_pressed());
        drop(answering);
        assert!(!interrupt.was_pressed());
    }
}

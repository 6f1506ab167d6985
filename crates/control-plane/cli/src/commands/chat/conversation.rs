//! State of a conversation: messages, chosen model, settings, and stats of the last answer.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{
    ChatError,
    editor::{EditedLine, LineEditor},
    input::{self, ChatInput},
    interrupt::{AnswerGuard, Interrupt},
    screen::AnswerScreen,
    settings::ChatSettings,
    target::choose,
};
use crate::{
    client::{ClientError, GatewayClient, Usage},
    terminal::{PrintFormat, Terminal},
};

pub(super) struct Conversation {
    client: GatewayClient,
    model: String,
    system: Option<String>,
    settings: ChatSettings,
    messages: Vec<Value>,
    last: Option<Stats>,
    interrupt: Interrupt,
    terminal: Terminal,
    drafts: Drafts,
}

/// Whether provisional tokens are shown before verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drafts {
    Shown,
    Hidden,
}

/// Times and token counts of an answer.
#[derive(Debug, Clone, Copy)]
struct Stats {
    first_token: Duration,
    total: Duration,
    usage: Option<Usage>,
}

/// The received part of an answer.
struct ChatAnswer {
    thought: String,
    text: String,
    stats: Stats,
    ending: AnswerEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AnswerEnd {
    Complete,
    Interrupted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Continue,
    Done,
}

impl Conversation {
    pub(super) fn new(
        client: GatewayClient,
        model: String,
        system: Option<String>,
        settings: ChatSettings,
        interrupt: Interrupt,
        (terminal, drafts): (Terminal, Drafts),
    ) -> Self {
        Self {
            client,
            model,
            system,
            settings,
            messages: Vec::new(),
            last: None,
            interrupt,
            terminal,
            drafts,
        }
    }

    /// Asks one question and prints its answer.
    pub(super) fn one_shot(&mut self, prompt: &str) -> Result<(), ChatError> {
        if prompt.trim().is_empty() {
            return Err(ChatError::NoQuestion);
        }
        match self.ask(prompt)? {
            AnswerEnd::Complete => Ok(()),
            AnswerEnd::Interrupted => Err(ChatError::Interrupted),
        }
    }

    /// Answers questions until the user ends the conversation.
    pub(super) fn converse(&mut self, mut editor: LineEditor) -> Result<(), ChatError> {
        self.hint("Ctrl-D ends, Ctrl-C stops an answer, /help lists commands");
        if let Ok(models) = self.client.models() {
            editor.complete(models.into_iter().map(|model| model.id).collect());
        }
        loop {
            let flow = match editor.read(&self.model).map_err(ChatError::Read)? {
                EditedLine::Text(text) => self.obey(input::parse(&text)),
                EditedLine::GivenUp => {
                    self.hint("Ctrl-D or /bye ends");
                    Flow::Continue
                }
                EditedLine::End => Flow::Done,
            };
            if flow == Flow::Done {
                return Ok(());
            }
        }
    }

    fn obey(&mut self, input: ChatInput) -> Flow {
        match input {
            ChatInput::End => return Flow::Done,
            ChatInput::Nothing => {}
            ChatInput::Say(text) => self.ask_and_go_on(&text),
            ChatInput::Adapter(name) => self.switch(&name),
            ChatInput::System(text) => self.begin_with(text),
            ChatInput::Set(name, value) => self.set(&name, &value),
            ChatInput::Stats => self.show_stats(),
            ChatInput::Clear => {
                self.messages.clear();
                self.terminal.note("a new conversation");
            }
            ChatInput::Help => self.terminal.note(input::help()),
            ChatInput::Unknown(command) => {
                self.terminal.note(format_args!("{command} is not a command; /help lists all"));
            }
        }
        Flow::Continue
    }

    fn hint(&self, text: &str) {
        self.terminal.note(self.terminal.ink().dim(text));
    }

    /// Asks a question; on failure the conversation goes on without the question.
    fn ask_and_go_on(&mut self, text: &str) {
        match self.ask(text) {
            Ok(AnswerEnd::Complete) => {}
            Ok(AnswerEnd::Interrupted) => self.hint("stopped"),
            Err(error) => self.terminal.error(&error),
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

    fn begin_with(&mut self, text: String) {
        self.system = (!text.is_empty()).then_some(text);
        self.terminal.note(match self.system {
            Some(_) => "the system message is set",
            None => "the system message is removed",
        });
    }

    fn set(&mut self, name: &str, value: &str) {
        if !name.is_empty()
            && let Err(error) = self.settings.set(name, value)
        {
            return self.terminal.note(error);
        }
        if name.is_empty() {
            self.terminal.note(self.settings.text());
        }
    }

    fn show_stats(&self) {
        match self.last {
            Some(stats) => self.terminal.note(stats.text()),
            None => self.terminal.note("no answer yet"),
        }
    }

    /// Asks, prints the answer as it arrives, and remembers question and answer, unless the answer is
    /// empty.
    fn ask(&mut self, question: &str) -> Result<AnswerEnd, ChatError> {
        let message = json!({"role": "user", "content": question});
        let body = self.body(&message);
        let (client, line) = self.client.apart();
        let answer = self.hear(&client, &body, &self.interrupt.answering(line))?;
        Ok(self.finish(message, answer))
    }

    /// Receives an answer until it ends or is interrupted.
    fn hear(
        &self,
        client: &GatewayClient,
        body: &Value,
        answering: &AnswerGuard<'_>,
    ) -> Result<ChatAnswer, ClientError> {
        let start = Instant::now();
        let mut stats = Stats { first_token: Duration::ZERO, total: Duration::ZERO, usage: None };
        let (mut thought, mut text) = (String::new(), String::new());
        let mut screen = AnswerScreen::new(self.terminal);
        let mut listen = || {
            for piece in client.stream("/v1/chat/completions", body)? {
                let piece = piece?;
                let says = !piece.thought.is_empty() || !piece.text.is_empty();
                if says && stats.first_token.is_zero() {
                    stats.first_token = start.elapsed();
                }
                screen.show(&piece);
                thought.push_str(&piece.thought);
                text.push_str(&piece.text);
                stats.usage = piece.usage.or(stats.usage);
            }
            Ok(())
        };
        let heard = listen();
        screen.end();
        let ending = match heard {
            Ok(()) => AnswerEnd::Complete,
            // The connection failed because Ctrl-C closed it.
            Err(_) if answering.was_pressed() => AnswerEnd::Interrupted,
            Err(error) => return Err(error),
        };
        stats.total = start.elapsed();
        Ok(ChatAnswer { thought, text, stats, ending })
    }

    fn body(&self, message: &Value) -> Value {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> =
            system.chain(self.messages.iter().cloned()).chain([message.clone()]).collect();
        let mut body = json!({
            "model": self.model,
            "messages": messages,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.drafts == Drafts::Shown {
            body["stream_options"]["provisional"] = true.into();
        }
        self.settings.fill(&mut body);
        body
    }

    fn finish(&mut self, question: Value, answer: ChatAnswer) -> AnswerEnd {
        let ChatAnswer { thought, text, stats, ending } = answer;
        match self.terminal.format {
            PrintFormat::Human => self.terminal.print(""),
            PrintFormat::Json => {
                let usage = stats.usage.map(|usage| {
                    json!({"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens})
                });
                let mut message = json!({"model": self.model, "content": text, "usage": usage});
                if !thought.is_empty() {
                    message["reasoning_content"] = thought.into();
                }
                self.terminal.print(message);
            }
        }
        if ending == AnswerEnd::Complete || !text.is_empty() {
            self.messages.extend([question, json!({"role": "assistant", "content": text})]);
        }
        self.last = Some(stats);
        ending
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
}

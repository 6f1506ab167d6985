//! Ctrl-C: hangs up on the answer under way, and on nothing else.
//!
//! The stream may be silent for long: what waits for its next word is woken by closing the connection under it, which
//! is also how the gateway learns that nobody listens.

use std::sync::{Arc, Mutex, PoisonError};

use crate::client::HangUp;

/// What Ctrl-C means while nobody answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Otherwise {
    /// The end, as of any program.
    Ends,
    /// Nothing: the line editor sees the key itself, and the terminal is its.
    Nothing,
}

#[derive(Debug)]
enum State {
    Listening,
    Answering(HangUp),
    Pressed,
}

/// Listens for Ctrl-C.
#[derive(Debug)]
pub(super) struct Interrupt(Arc<Mutex<State>>);

impl Interrupt {
    /// Listens on a thread of its own. Where that is not possible, Ctrl-C ends the program as ever.
    pub(super) fn new(otherwise: Otherwise) -> Self {
        let interrupt = Self(Arc::new(Mutex::new(State::Listening)));
        let pressed = Self(Arc::clone(&interrupt.0));
        if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
            std::thread::spawn(move || {
                while runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
                    pressed.press(otherwise);
                }
            });
        }
        interrupt
    }

    fn press(&self, otherwise: Otherwise) {
        match (self.replace(State::Pressed), otherwise) {
            (State::Answering(line), _) => line.hang_up(),
            // What a shell expects of a program that SIGINT ended.
            (State::Listening, Otherwise::Ends) => std::process::exit(130),
            (State::Listening, Otherwise::Nothing) => drop(self.replace(State::Listening)),
            (State::Pressed, _) => {}
        }
    }

    /// Until the returned value is dropped, a press ends what comes over `line`.
    pub(super) fn answering(&self, line: HangUp) -> Answering<'_> {
        self.replace(State::Answering(line));
        Answering(self)
    }

    fn replace(&self, state: State) -> State {
        std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), state)
    }
}

/// An answer under way.
#[derive(Debug)]
pub(super) struct Answering<'a>(&'a Interrupt);

impl Answering<'_> {
    /// True if this answer was hung up on.
    pub(super) fn was_pressed(&self) -> bool {
        matches!(*self.0.0.lock().unwrap_or_else(PoisonError::into_inner), State::Pressed)
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.replace(State::Listening);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client::Client,
        terminal::{Format, Terminal, Volume},
    };

    #[test]
    fn a_press_is_seen_while_answering_only() {
        let client = Client::new("http://127.0.0.1:1", Terminal::new(Format::Human, Volume::Quiet));
        let interrupt = Interrupt(Arc::new(Mutex::new(State::Listening)));
        interrupt.press(Otherwise::Nothing);
        let answering = interrupt.answering(client.apart().1);
        assert!(!answering.was_pressed(), "a press before it is not its own");
        interrupt.press(Otherwise::Ends);
        assert!(answering.was_pressed());
        drop(answering);
        assert!(!interrupt.answering(client.apart().1).was_pressed());
    }
}

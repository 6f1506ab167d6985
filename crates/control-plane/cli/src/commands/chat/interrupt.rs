//! Ctrl-C handling: interrupts only the answer under way.
//!
//! A stream may be silent for long. Closing its connection wakes the reader and tells the gateway that the
//! client is gone.

use std::sync::{Arc, Mutex, PoisonError};

use crate::client::ConnectionCloser;

/// Effect of Ctrl-C while no answer is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdleInterrupt {
    /// Ctrl-C ends the program.
    Ends,
    /// Ctrl-C does nothing, because the line editor handles the key itself.
    Nothing,
}

#[derive(Debug)]
enum InterruptState {
    Listening,
    Answering(ConnectionCloser),
    Pressed,
}

/// Handler of Ctrl-C, shared with its thread.
#[derive(Debug)]
pub(super) struct Interrupt(Arc<Mutex<InterruptState>>);

impl Interrupt {
    /// Starts the handler's thread. If that fails, Ctrl-C ends the program as usual.
    pub(super) fn new(otherwise: IdleInterrupt) -> Self {
        let interrupt = Self(Arc::new(Mutex::new(InterruptState::Listening)));
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

    fn press(&self, otherwise: IdleInterrupt) {
        match (self.replace(InterruptState::Pressed), otherwise) {
            (InterruptState::Answering(line), _) => line.hang_up(),
            // Exit code of a program that SIGINT ended, as shells expect it.
            (InterruptState::Listening, IdleInterrupt::Ends) => std::process::exit(130),
            (InterruptState::Listening, IdleInterrupt::Nothing) => {
                drop(self.replace(InterruptState::Listening))
            }
            (InterruptState::Pressed, _) => {}
        }
    }

    /// Makes Ctrl-C close `line` until the returned guard is dropped.
    pub(super) fn answering(&self, line: ConnectionCloser) -> AnswerGuard<'_> {
        self.replace(InterruptState::Answering(line));
        AnswerGuard(self)
    }

    fn replace(&self, state: InterruptState) -> InterruptState {
        std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), state)
    }
}

/// Guard of an answer under way.
#[derive(Debug)]
pub(super) struct AnswerGuard<'a>(&'a Interrupt);

impl AnswerGuard<'_> {
    /// True if Ctrl-C interrupted this answer.
    pub(super) fn was_pressed(&self) -> bool {
        matches!(*self.0.0.lock().unwrap_or_else(PoisonError::into_inner), InterruptState::Pressed)
    }
}

impl Drop for AnswerGuard<'_> {
    fn drop(&mut self) {
        self.0.replace(InterruptState::Listening);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client::GatewayClient,
        terminal::{PrintFormat, Terminal, Verbosity},
    };

    #[test]
    fn a_press_is_seen_while_answering_only() {
        let client =
            GatewayClient::new("http://127.0.0.1:1", Terminal::new(PrintFormat::Human, Verbosity::Quiet));
        let interrupt = Interrupt(Arc::new(Mutex::new(InterruptState::Listening)));
        interrupt.press(IdleInterrupt::Nothing);
        let answering = interrupt.answering(client.apart().1);
        assert!(!answering.was_pressed(), "a press before it is not its own");
        interrupt.press(IdleInterrupt::Ends);
        assert!(answering.was_pressed());
        drop(answering);
        assert!(!interrupt.answering(client.apart().1).was_pressed());
    }
}

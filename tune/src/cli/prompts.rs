//! `prompts`: what data ask, for whoever lets a model answer.

use std::io;

use client::cli::exit::Exit;
use training_protocol::{Event, Message, Prompt};

use super::{
    End,
    error::TunerError,
    told::{print, tell_faults},
};
use crate::data::{self, Asked, Limits};

/// Tells the prompts of the training data on stdin, or that there are answers already.
pub(super) fn prompts() -> Result<End, TunerError> {
    let asked = data::prompts(io::stdin().lock(), &Limits::default());
    if let Err(error) = &asked {
        tell_faults(error)?;
    }
    match asked? {
        Asked::Answered => print(&Event::Answered {})?,
        Asked::Prompts(prompts) => prompts.into_iter().try_for_each(|prompt| print(&told(prompt)))?,
    }
    Ok(End::Exit(Exit::Ok))
}

fn told(prompt: data::Prompt) -> Event {
    let of =
        |(role, content): &(&str, String)| Message { role: (*role).to_owned(), content: content.clone() };
    let messages = prompt.messages().iter().map(of).collect();
    Event::Prompt(Prompt { kind: prompt.kind, messages })
}

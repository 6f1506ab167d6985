//! Parses the user's input in a conversation: a message or a command.

pub(super) struct ChatCommand {
    pub(super) name: &'static str,
    /// Argument in the help text; empty for none.
    pub(super) argument: &'static str,
    meaning: &'static str,
}

const fn command(name: &'static str, argument: &'static str, meaning: &'static str) -> ChatCommand {
    ChatCommand { name, argument, meaning }
}

/// All commands, in the order of `/help`.
pub(super) const COMMANDS: [ChatCommand; 7] = [
    command(
        "/adapter",
        "NAME",
        "continues with another model (:ADAPTER or BASE); without a name lists the models",
    ),
    command("/system", "TEXT", "sets the system message; without a text removes it"),
    command(
        "/set",
        "NAME VALUE",
        "sets temperature, max_tokens or seed; without a value resets it to the model's default",
    ),
    command("/stats", "", "shows token counts and speed of the last answer"),
    command("/clear", "", "starts a new conversation"),
    command("/help", "", "this"),
    command("/bye", "", "ends the chat, as Ctrl-D does"),
];

/// Returns the text of `/help`.
pub(super) fn help() -> String {
    let lines = COMMANDS.iter().map(|ChatCommand { name, argument, meaning }| {
        let typed = format!("{name} {argument}");
        format!("{typed:<16} {meaning}")
    });
    let keys = [
        format!("{FENCE:<16} begins and ends a message of several lines"),
        format!("{:<16} stops an answer, or clears the line", "Ctrl-C"),
        format!("{:<16} completes a command or a name; Up shows earlier input", "Tab"),
    ];
    lines.chain(keys).collect::<Vec<_>>().join("\n")
}

/// One parsed input of the user.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChatInput {
    Say(String),
    /// `/adapter` with a name or an empty text.
    Adapter(String),
    /// `/system` with a text or an empty text.
    System(String),
    /// `/set` with a name and a value, either of which may be empty.
    Set(String, String),
    Stats,
    Clear,
    Help,
    Unknown(String),
    Nothing,
    End,
}

const FENCE: &str = "\"\"\"";

/// True if a fenced text of several lines has begun and not ended.
pub(super) fn is_unfinished(typed: &str) -> bool {
    typed.trim_start().strip_prefix(FENCE).is_some_and(|rest| !rest.contains(FENCE))
}

/// Parses an input. A fenced text is always a message.
pub(super) fn parse(typed: &str) -> ChatInput {
    let typed = typed.trim();
    if let Some(rest) = typed.strip_prefix(FENCE) {
        let text = rest.split_once(FENCE).map_or(rest, |(text, _)| text);
        return ChatInput::Say(text.trim().to_owned());
    }
    if typed.contains('\n') {
        return ChatInput::Say(typed.to_owned());
    }
    let (command, argument) = split(typed);
    match command {
        "" => ChatInput::Nothing,
        "/adapter" => ChatInput::Adapter(argument.to_owned()),
        "/system" => ChatInput::System(argument.to_owned()),
        "/set" => {
            let (name, value) = split(argument);
            ChatInput::Set(name.to_owned(), value.to_owned())
        }
        "/stats" => ChatInput::Stats,
        "/clear" => ChatInput::Clear,
        "/help" | "/?" => ChatInput::Help,
        "/bye" | "/exit" => ChatInput::End,
        // A path or a fraction is a message; only `/word` alone is an unknown command.
        _ if command.starts_with('/') && command[1..].chars().all(char::is_alphabetic) => {
            ChatInput::Unknown(command.to_owned())
        }
        _ => ChatInput::Say(typed.to_owned()),
    }
}

/// Returns the first word and the trimmed rest.
fn split(text: &str) -> (&str, &str) {
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (word, rest.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_said_and_commands_are_obeyed() {
        let cases = [
            ("hello there", ChatInput::Say("hello there".into())),
            ("", ChatInput::Nothing),
            ("/adapter pirate", ChatInput::Adapter("pirate".into())),
            ("/adapter", ChatInput::Adapter(String::new())),
            ("/system Be brief.", ChatInput::System("Be brief.".into())),
            ("/set top_p 0.5", ChatInput::Set("top_p".into(), "0.5".into())),
            ("/set  stop  a b ", ChatInput::Set("stop".into(), "a b".into())),
            ("/set", ChatInput::Set(String::new(), String::new())),
            ("/stats", ChatInput::Stats),
            ("/clear", ChatInput::Clear),
            ("/bye", ChatInput::End),
            ("/frobnicate", ChatInput::Unknown("/frobnicate".into())),
            ("/usr/bin is a path", ChatInput::Say("/usr/bin is a path".into())),
            ("/set a\nand so on", ChatInput::Say("/set a\nand so on".into())),
        ];
        for (typed, input) in cases {
            assert_eq!(parse(typed), input, "{typed:?}");
        }
    }

    #[test]
    fn a_fenced_text_keeps_its_lines_and_its_slashes() {
        let text = "\"\"\"one\n\n/stats\ntwo\"\"\"";
        assert_eq!(parse(text), ChatInput::Say("one\n\n/stats\ntwo".into()));
        assert_eq!(parse("\"\"\"same line\"\"\""), ChatInput::Say("same line".into()));
        assert!(is_unfinished("\"\"\"one\n") && !is_unfinished(text) && !is_unfinished("one"));
    }

    #[test]
    fn every_command_of_the_help_exists() {
        for command in COMMANDS {
            assert!(
                !matches!(parse(command.name), ChatInput::Unknown(_) | ChatInput::Say(_)),
                "{}",
                command.name
            );
            assert!(help().contains(command.name));
        }
    }
}

//! What a person types into a conversation.

use std::io::{self, BufRead, Write};

/// The commands, as `/help` prints them.
pub(super) const HELP: &str = "\
/adapter NAME  talks to that adapter (:NAME, BASE) from now on; without a name lists what there is
/stats         numbers of the last answer
/clear         forgets the conversation
/help          this
\"\"\"            begins and ends a text of several lines
Ctrl-D         ends";

/// One thing said or asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// A message for the model.
    Say(String),
    /// `/adapter`, with a name or an empty text.
    Adapter(String),
    /// `/stats`.
    Stats,
    /// `/clear`.
    Clear,
    /// `/help`.
    Help,
    /// A command that does not exist.
    Unknown(String),
    /// An empty line.
    Nothing,
    /// End of file, `/bye` or `/exit`.
    End,
}

const FENCE: &str = "\"\"\"";

/// Shows a prompt on `prompts` and reads one input.
pub(super) fn read_input(
    reader: &mut impl BufRead,
    prompts: &mut impl Write,
    model: &str,
) -> io::Result<Input> {
    show(prompts, &format!("{model}> "))?;
    let Some(line) = read_line(reader)? else {
        show(prompts, "\n")?;
        return Ok(Input::End);
    };
    match line.trim_start().strip_prefix(FENCE) {
        Some(rest) => Ok(Input::Say(read_fenced(reader, prompts, rest)?)),
        None => Ok(parse(line.trim())),
    }
}

/// Lines up to the closing fence or the end of the input.
fn read_fenced(reader: &mut impl BufRead, prompts: &mut impl Write, first: &str) -> io::Result<String> {
    let mut text = String::new();
    let mut line = first.to_owned();
    loop {
        if let Some((last, _)) = line.split_once(FENCE) {
            text.push_str(last);
            break;
        }
        text.push_str(&line);
        text.push('\n');
        show(prompts, "... ")?;
        match read_line(reader)? {
            Some(next) => line = next,
            None => break,
        }
    }
    Ok(text.trim().to_owned())
}

fn parse(line: &str) -> Input {
    let (command, argument) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    match command {
        "" => Input::Nothing,
        "/adapter" => Input::Adapter(argument.trim().to_owned()),
        "/stats" => Input::Stats,
        "/clear" => Input::Clear,
        "/help" | "/?" => Input::Help,
        "/bye" | "/exit" => Input::End,
        // A path or a fraction is something to say; `/word` alone was meant as a command.
        _ if command.starts_with('/') && command[1..].chars().all(char::is_alphabetic) => {
            Input::Unknown(command.to_owned())
        }
        _ => Input::Say(line.to_owned()),
    }
}

fn read_line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = String::new();
    let read = reader.read_line(&mut line)?;
    Ok((read > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned()))
}

fn show(prompts: &mut impl Write, text: &str) -> io::Result<()> {
    prompts.write_all(text.as_bytes())?;
    prompts.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(mut text: &[u8]) -> Vec<Input> {
        let mut inputs = Vec::new();
        loop {
            match read_input(&mut text, &mut io::sink(), "m").unwrap() {
                Input::End => return inputs,
                input => inputs.push(input),
            }
        }
    }

    #[test]
    fn lines_are_said_and_commands_are_obeyed() {
        let text =
            b"hello there\n\n/adapter pirate\n/adapter\n/stats\n/clear\n/frobnicate\n/usr/bin is a path\n";
        let say = |text: &str| Input::Say(text.into());
        let expected = [
            say("hello there"),
            Input::Nothing,
            Input::Adapter("pirate".into()),
            Input::Adapter(String::new()),
            Input::Stats,
            Input::Clear,
            Input::Unknown("/frobnicate".into()),
            say("/usr/bin is a path"),
        ];
        assert_eq!(inputs(text), expected);
    }

    #[test]
    fn a_fenced_text_keeps_its_lines_and_its_slashes() {
        assert_eq!(
            inputs(b"\"\"\"one\n\n/stats\ntwo\"\"\"\nx\n"),
            [Input::Say("one\n\n/stats\ntwo".into()), Input::Say("x".into())]
        );
        assert_eq!(inputs(b"\"\"\"same line\"\"\"\n"), [Input::Say("same line".into())]);
        assert_eq!(inputs(b"\"\"\"\nnever closed\n"), [Input::Say("never closed".into())]);
    }
}

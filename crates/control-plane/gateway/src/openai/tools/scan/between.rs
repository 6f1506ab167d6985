//! Scans the text between an announcement and its calls, and between calls.

use text::grammar::HarmonyTags;

use super::{
    super::{
        format::ToolCallFormat,
        object::ObjectScanner,
        tagged::{OPENING, TaggedScanner},
    },
    ScanResult, Scanner, ToolScanState,
};
use crate::openai::reasoning::harmony::CALL;

/// Maximum number of bytes between an announcement or call and the next call.
const MAX_BETWEEN: usize = 256;
const MAX_NAME_BYTES: usize = 256;

impl Scanner {
    /// Processes a character where a call, or the end of a group of calls, may come.
    pub(super) fn between(&mut self, c: char, found: &mut ScanResult) {
        if self.held.len() > MAX_BETWEEN {
            return self.give_up(ToolScanState::Text, found);
        }
        self.state = ToolScanState::Between;
        let (held, announced) = (self.held.trim_start(), self.format.announcement().unwrap_or_default());
        let behind = held.strip_prefix(announced).unwrap_or(held).trim_start();
        let is_announced_again = self.calls > 0 && !self.in_list && announced.starts_with(held);
        match (self.format, c) {
            (ToolCallFormat::Harmony, _) if held.starts_with(announced) => {
                self.state = ToolScanState::Name(c.to_string());
            }
            (ToolCallFormat::Qwen3Coder, _) if OPENING.starts_with(behind) => {
                if behind == OPENING {
                    self.state = ToolScanState::Tagged(TaggedScanner::default());
                }
            }
            (_, '{') => self.in_object(ObjectScanner::default(), c, found),
            (ToolCallFormat::Mistral, _) if is_announced_again => {}
            (ToolCallFormat::Mistral | ToolCallFormat::Granite, '[')
                if held.starts_with(announced) && behind == "[" =>
            {
                self.in_list = true;
            }
            (_, ',') if self.in_list => {}
            (_, ']') if self.in_list => self.end(found),
            (ToolCallFormat::Mistral, c) if !self.in_list && (c.is_alphanumeric() || c == '_') => {
                self.state = ToolScanState::Name(c.to_string());
            }
            (ToolCallFormat::Hermes | ToolCallFormat::Qwen3Coder | ToolCallFormat::Harmony, _)
                if self.calls > 0 && self.is_closing(found) => {}
            (ToolCallFormat::Llama3, ';') => {}
            _ if c.is_whitespace() => {}
            _ => {
                self.in_list = false;
                self.in_text(found);
            }
        }
    }

    /// True if the held text is a prefix of the closing tag; the complete tag ends the call.
    fn is_closing(&mut self, found: &mut ScanResult) -> bool {
        let closing = if self.format == ToolCallFormat::Harmony { CALL } else { "</tool_call>" };
        let held = self.held.trim_start();
        if held == closing {
            self.end(found);
            return true;
        }
        closing.starts_with(held)
    }

    /// Ends a group of calls; text may follow.
    pub(super) fn end(&mut self, found: &mut ScanResult) {
        if self.calls == 0 {
            return self.give_up(ToolScanState::Text, found);
        }
        let written = std::mem::take(&mut self.held);
        self.extend_call(String::new(), written, found);
        (self.state, self.in_list) = (ToolScanState::Text, false);
    }

    pub(super) fn in_name(&mut self, mut name: String, c: char, found: &mut ScanResult) {
        const ARGUMENTS: &str = "[ARGS]";
        if self.format == ToolCallFormat::Harmony {
            return self.in_header(name, c, found);
        }
        if c == '{' {
            let name = name.trim_end().trim_end_matches(ARGUMENTS).trim_end();
            return self.in_arguments(name, c, found);
        }
        let is_name = c.is_alphanumeric() || "_-.[]".contains(c) || c.is_whitespace();
        if !is_name || name.len() > MAX_NAME_BYTES {
            return self.give_up(ToolScanState::Text, found);
        }
        name.push(c);
        self.state = ToolScanState::Name(name);
    }

    /// Scans the object of arguments that begins with `c`, of the function `name`.
    fn in_arguments(&mut self, name: &str, c: char, found: &mut ScanResult) {
        let mut scanner = ObjectScanner::default();
        // Feeds the scanner the beginning of an equivalent object with name and arguments.
        let before = format!("{{\"name\":{},\"arguments\":", serde_json::Value::from(name));
        for c in before.chars() {
            let _ = scanner.push(c);
        }
        self.is_bare = true;
        self.in_object(scanner, c, found);
    }

    /// Processes a character between the name of a function in the harmony format and its arguments.
    fn in_header(&mut self, mut header: String, c: char, found: &mut ScanResult) {
        let name = |header: &str| {
            let end = header.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(header.len());
            header[..end].to_owned()
        };
        if header.ends_with(HarmonyTags::MESSAGE) {
            return match c {
                _ if c.is_whitespace() => self.state = ToolScanState::Name(header),
                '{' => self.in_arguments(&name(&header), c, found),
                _ => self.give_up(ToolScanState::Text, found),
            };
        }
        header.push(c);
        if header.ends_with(HarmonyTags::MESSAGE) && self.takes_input(Some(&name(&header)), found) {
            self.state = ToolScanState::Input("");
        } else if header.len() > MAX_NAME_BYTES {
            self.give_up(ToolScanState::Text, found);
        } else {
            self.state = ToolScanState::Name(header);
        }
    }
}

//! One call that is written as a JSON object, `{"name": ..., "arguments": {...}}`, character by character.
//!
//! Its arguments are handed on as they are written, from the moment its name is known: nobody waits for its end.

/// Longest name and key.
const MAX_NAME_BYTES: usize = 256;

/// Keys that a call may have before its name. Any other tells that it is none.
const BESIDE: [&str; 4] = ["type", "id", "arguments", "parameters"];

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// More of it comes.
    Open,
    /// It is whole.
    Whole,
    /// It is no call.
    Broken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Begin,
    /// Where a key may come; `true` behind a comma alone.
    BeforeKey,
    Key,
    Colon,
    BeforeValue,
    Value,
    BehindValue,
}

/// See the module.
#[derive(Debug)]
pub(super) struct ObjectScanner {
    at: At,
    key: String,
    /// The value so far, where it is not handed on as it comes.
    value: String,
    depth: usize,
    in_string: bool,
    escaped: bool,
    name: Option<String>,
    /// Not handed on yet.
    arguments: String,
    has_arguments: bool,
}

impl Default for ObjectScanner {
    fn default() -> Self {
        Self {
            at: At::Begin,
            key: String::new(),
            value: String::new(),
            depth: 0,
            in_string: false,
            escaped: false,
            name: None,
            arguments: String::new(),
            has_arguments: false,
        }
    }
}

impl ObjectScanner {
    /// Its name, once that is known.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// A value has ended, and nothing has come behind it.
    pub(super) fn is_behind_a_value(&self) -> bool {
        self.at == At::BehindValue
    }

    /// What of its arguments is new.
    pub(super) fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char) -> Progress {
        match self.at {
            At::Value => return self.in_value(c),
            At::Key if c != '"' => {
                self.key.push(c);
                if self.key.len() > MAX_NAME_BYTES {
                    return Progress::Broken;
                }
            }
            At::Key => {
                let is_known =
                    self.key == "name" || self.name.is_some() || BESIDE.contains(&self.key.as_str());
                if !is_known {
                    return Progress::Broken;
                }
                self.at = At::Colon;
            }
            At::BeforeValue if !c.is_whitespace() => return self.begin_value(c),
            _ if c.is_whitespace() => {}
            At::Begin if c == '{' => self.at = At::BeforeKey,
            At::BeforeKey if c == '"' => {
                self.key.clear();
                self.at = At::Key;
            }
            At::Colon if c == ':' => self.at = At::BeforeValue,
            At::BehindValue if c == ',' => self.at = At::BeforeKey,
            At::BeforeKey | At::BehindValue if c == '}' => return self.end(),
            _ => return Progress::Broken,
        }
        Progress::Open
    }

    fn end(&mut self) -> Progress {
        if self.name.is_none() {
            return Progress::Broken;
        }
        if !self.has_arguments {
            self.arguments.push_str("{}");
        }
        Progress::Whole
    }

    /// Whether the value is that of the arguments, handed on as it comes.
    fn is_handed_on(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters") && self.value.is_empty()
    }

    fn begin_value(&mut self, c: char) -> Progress {
        self.at = At::Value;
        self.value.clear();
        (self.depth, self.in_string, self.escaped) = (0, false, false);
        let is_arguments = self.is_handed_on();
        if is_arguments && self.has_arguments {
            return Progress::Broken;
        }
        self.has_arguments |= is_arguments;
        if !is_arguments || c != '{' {
            // Arguments may be a text that holds the object.
            self.value.push(c);
        }
        self.in_value_as(c, is_arguments && c == '{')
    }

    fn in_value(&mut self, c: char) -> Progress {
        let is_handed_on = self.is_handed_on();
        let is_scalar = self.depth == 0 && !self.in_string;
        if is_scalar && (c.is_whitespace() || matches!(c, ',' | '}')) {
            // A number or a word has no end of its own.
            return match self.end_value() {
                Progress::Open => self.push(c),
                broken => broken,
            };
        }
        if !is_handed_on {
            self.value.push(c);
        }
        self.in_value_as(c, is_handed_on)
    }

    fn in_value_as(&mut self, c: char, is_handed_on: bool) -> Progress {
        if is_handed_on {
            self.arguments.push(c);
        }
        match c {
            _ if self.escaped => self.escaped = false,
            '\\' if self.in_string => self.escaped = true,
            '"' => self.in_string = !self.in_string,
            '{' | '[' if !self.in_string => self.depth += 1,
            '}' | ']' if !self.in_string => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        let ends = self.depth == 0 && !self.in_string && matches!(c, '"' | '}' | ']');
        if ends { self.end_value() } else { Progress::Open }
    }

    fn end_value(&mut self) -> Progress {
        self.at = At::BehindValue;
        let text = || serde_json::from_str::<String>(&self.value);
        match self.key.as_str() {
            "name" => match text() {
                Ok(name) if !name.is_empty() && name.len() <= MAX_NAME_BYTES => self.name = Some(name),
                _ => return Progress::Broken,
            },
            "arguments" | "parameters" if !self.value.is_empty() => match text() {
                Ok(text) => self.arguments.push_str(&text),
                Err(_) if self.value == "null" => self.arguments.push_str("{}"),
                Err(_) => return Progress::Broken,
            },
            _ => {}
        }
        self.value.clear();
        Progress::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> (Progress, Option<String>, String) {
        let (mut scanner, mut progress) = (ObjectScanner::default(), Progress::Open);
        let mut arguments = String::new();
        for c in text.chars() {
            assert_eq!(progress, Progress::Open, "{text}");
            progress = scanner.push(c);
            arguments.push_str(&scanner.take_arguments());
        }
        (progress, scanner.name().map(str::to_owned), arguments)
    }

    #[test]
    fn arguments_are_handed_on_as_they_are_written() {
        for (text, arguments) in [
            (r#"{"name": "f", "arguments": {"a": "}\"", "b": [1, {}]}}"#, r#"{"a": "}\"", "b": [1, {}]}"#),
            (r#"{"arguments": {"a": 1}, "name": "f"}"#, r#"{"a": 1}"#),
            (r#"{ "type" : "function", "name":"f","parameters":{} }"#, "{}"),
            (r#"{"name": "f"}"#, "{}"),
            (r#"{"name": "f", "arguments": null }"#, "{}"),
            (r#"{"name": "f", "arguments": "{\"a\": 1}"}"#, r#"{"a": 1}"#),
            (r#"{"name": "f", "arguments": {}, "id": 7}"#, "{}"),
        ] {
            assert_eq!(scan(text), (Progress::Whole, Some("f".to_owned()), arguments.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_no_call_is_told_as_soon_as_that_is_clear() {
        for text in [
            r#"["#,
            r#"{"answer""#,
            r#"{}"#,
            r#"{"name": 3,"#,
            r#"{"name": """#,
            r#"{"name" "#,
            r#"{"arguments": {}}"#,
        ] {
            let text = text.trim_end();
            let (mut scanner, mut progress) = (ObjectScanner::default(), Progress::Open);
            text.chars().for_each(|c| progress = scanner.push(c));
            let is_open = text == r#"{"name""#;
            assert_eq!(progress, if is_open { Progress::Open } else { Progress::Broken }, "{text}");
        }
    }
}

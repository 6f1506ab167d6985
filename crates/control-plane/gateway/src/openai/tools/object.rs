//! One call that is written as a JSON object, `{"name": ..., "arguments": {...}}`, character by character.
//!
//! Its arguments are handed on as they are written, from the moment its name is known: nobody waits for its end.

/// Longest name and key.
const MAX_NAME_BYTES: usize = 256;

/// Keys that a call may have before its name. Any other tells that it is none.
const BESIDE: [&str; 4] = ["type", "id", "arguments", "parameters"];

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallProgress {
    /// More of it comes.
    Open,
    /// It is whole.
    Whole,
    /// It is no call.
    Broken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObjectPosition {
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
    at: ObjectPosition,
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
            at: ObjectPosition::Begin,
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
        self.at == ObjectPosition::BehindValue
    }

    /// What of its arguments is new.
    pub(super) fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char) -> CallProgress {
        match self.at {
            ObjectPosition::Value => return self.in_value(c),
            ObjectPosition::Key if c != '"' => {
                self.key.push(c);
                if self.key.len() > MAX_NAME_BYTES {
                    return CallProgress::Broken;
                }
            }
            ObjectPosition::Key => {
                let is_known =
                    self.key == "name" || self.name.is_some() || BESIDE.contains(&self.key.as_str());
                if !is_known {
                    return CallProgress::Broken;
                }
                self.at = ObjectPosition::Colon;
            }
            ObjectPosition::BeforeValue if !c.is_whitespace() => return self.begin_value(c),
            _ if c.is_whitespace() => {}
            ObjectPosition::Begin if c == '{' => self.at = ObjectPosition::BeforeKey,
            ObjectPosition::BeforeKey if c == '"' => {
                self.key.clear();
                self.at = ObjectPosition::Key;
            }
            ObjectPosition::Colon if c == ':' => self.at = ObjectPosition::BeforeValue,
            ObjectPosition::BehindValue if c == ',' => self.at = ObjectPosition::BeforeKey,
            ObjectPosition::BeforeKey | ObjectPosition::BehindValue if c == '}' => return self.end(),
            _ => return CallProgress::Broken,
        }
        CallProgress::Open
    }

    fn end(&mut self) -> CallProgress {
        if self.name.is_none() {
            return CallProgress::Broken;
        }
        if !self.has_arguments {
            self.arguments.push_str("{}");
        }
        CallProgress::Whole
    }

    /// Whether the value is that of the arguments, handed on as it comes.
    fn is_handed_on(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters") && self.value.is_empty()
    }

    fn begin_value(&mut self, c: char) -> CallProgress {
        self.at = ObjectPosition::Value;
        self.value.clear();
        (self.depth, self.in_string, self.escaped) = (0, false, false);
        let is_arguments = self.is_handed_on();
        if is_arguments && self.has_arguments {
            return CallProgress::Broken;
        }
        self.has_arguments |= is_arguments;
        if !is_arguments || c != '{' {
            // Arguments may be a text that holds the object.
            self.value.push(c);
        }
        self.in_value_as(c, is_arguments && c == '{')
    }

    fn in_value(&mut self, c: char) -> CallProgress {
        let is_handed_on = self.is_handed_on();
        let is_scalar = self.depth == 0 && !self.in_string;
        if is_scalar && (c.is_whitespace() || matches!(c, ',' | '}')) {
            // A number or a word has no end of its own.
            return match self.end_value() {
                CallProgress::Open => self.push(c),
                broken => broken,
            };
        }
        if !is_handed_on {
            self.value.push(c);
        }
        self.in_value_as(c, is_handed_on)
    }

    fn in_value_as(&mut self, c: char, is_handed_on: bool) -> CallProgress {
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
        if ends { self.end_value() } else { CallProgress::Open }
    }

    fn end_value(&mut self) -> CallProgress {
        self.at = ObjectPosition::BehindValue;
        let text = || serde_json::from_str::<String>(&self.value);
        match self.key.as_str() {
            "name" => match text() {
                Ok(name) if !name.is_empty() && name.len() <= MAX_NAME_BYTES => self.name = Some(name),
                _ => return CallProgress::Broken,
            },
            "arguments" | "parameters" if !self.value.is_empty() => match text() {
                Ok(text) => self.arguments.push_str(&text),
                Err(_) if self.value == "null" => self.arguments.push_str("{}"),
                Err(_) => return CallProgress::Broken,
            },
            _ => {}
        }
        self.value.clear();
        CallProgress::Open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> (CallProgress, Option<String>, String) {
        let (mut scanner, mut progress) = (ObjectScanner::default(), CallProgress::Open);
        let mut arguments = String::new();
        for c in text.chars() {
            assert_eq!(progress, CallProgress::Open, "{text}");
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
            assert_eq!(
                scan(text),
                (CallProgress::Whole, Some("f".to_owned()), arguments.to_owned()),
                "{text}"
            );
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
            let (mut scanner, mut progress) = (ObjectScanner::default(), CallProgress::Open);
            text.chars().for_each(|c| progress = scanner.push(c));
            let is_open = text == r#"{"name""#;
            assert_eq!(progress, if is_open { CallProgress::Open } else { CallProgress::Broken }, "{text}");
        }
    }
}

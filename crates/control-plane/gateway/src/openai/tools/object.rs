//! Reads one call written as a JSON object, `{"name": ..., "arguments": {...}}`, character by character.
//!
//! Arguments are passed on as they arrive once the name is known, so the caller need not wait for the call's
//! end.

const MAX_NAME_BYTES: usize = 256;

/// Keys that may precede the name; any other key means that the object is no call.
const BESIDE: [&str; 4] = ["type", "id", "arguments", "parameters"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallProgress {
    /// The call is incomplete.
    Open,
    /// The call is complete.
    Whole,
    /// The text is no call.
    Broken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ObjectPosition {
    Begin,
    /// A key may come.
    BeforeKey,
    Key,
    Colon,
    BeforeValue,
    Value,
    BehindValue,
}

#[derive(Debug)]
pub(super) struct ObjectScanner {
    at: ObjectPosition,
    key: String,
    /// The value so far, unless its characters are passed on as they arrive.
    value: String,
    depth: usize,
    in_string: bool,
    escaped: bool,
    name: Option<String>,
    /// Arguments that are not passed on yet.
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
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// True if a value has ended and no character has followed.
    pub(super) fn is_behind_a_value(&self) -> bool {
        self.at == ObjectPosition::BehindValue
    }

    pub(super) fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

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

    /// True if the value is the arguments, which are passed on as they arrive.
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
            // Arguments may be a string that contains the JSON object.
            self.value.push(c);
        }
        self.in_value_as(c, is_arguments && c == '{')
    }

    fn in_value(&mut self, c: char) -> CallProgress {
        let is_handed_on = self.is_handed_on();
        let is_scalar = self.depth == 0 && !self.in_string;
        if is_scalar && (c.is_whitespace() || matches!(c, ',' | '}')) {
            // Numbers and words end only at the next character, which is processed again.
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

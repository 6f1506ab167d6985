//! Parses Python literals to JSON.

use serde_json::{Map, Number, Value};

const MAX_DEPTH: usize = 32;

/// Parses `text`; returns `None` if it is no literal.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut reader = PythonReader { rest: text };
    let value = reader.value(0)?;
    reader.rest.trim().is_empty().then_some(value)
}

struct PythonReader<'a> {
    rest: &'a str,
}

impl PythonReader<'_> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, c: char) -> bool {
        self.skip_space();
        let eaten = self.rest.strip_prefix(c);
        self.rest = eaten.unwrap_or(self.rest);
        eaten.is_some()
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        self.skip_space();
        match self.rest.chars().next()? {
            _ if depth > MAX_DEPTH => None,
            '"' | '\'' => self.string().map(Value::String),
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => self.dictionary(depth),
            _ => self.read_word(),
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.eat(open);
        let mut items = Vec::new();
        while !self.eat(close) {
            items.push(self.value(depth + 1)?);
            if !self.eat(',') {
                return self.eat(close).then_some(Value::Array(items));
            }
        }
        Some(Value::Array(items))
    }

    fn dictionary(&mut self, depth: usize) -> Option<Value> {
        self.eat('{');
        let mut map = Map::new();
        while !self.eat('}') {
            self.skip_space();
            let key = self.string()?;
            if !self.eat(':') {
                return None;
            }
            map.insert(key, self.value(depth + 1)?);
            if !self.eat(',') {
                return self.eat('}').then_some(Value::Object(map));
            }
        }
        Some(Value::Object(map))
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let (mut text, mut chars) = (String::new(), self.rest[1..].chars());
        loop {
            match chars.next()? {
                c if c == quote => break,
                '\\' => text.push(escaped(&mut chars)?),
                c => text.push(c),
            }
        }
        self.rest = chars.as_str();
        Some(text)
    }

    fn read_word(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| matches!(c, ',' | ']' | ')' | '}' | ':') || c.is_whitespace());
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        match word {
            "True" | "true" => Some(Value::Bool(true)),
            "False" | "false" => Some(Value::Bool(false)),
            "None" | "null" => Some(Value::Null),
            number => number.parse::<Number>().ok().map(Value::Number),
        }
    }
}

/// Returns the character of an escape sequence; `chars` starts after the backslash.
fn escaped(chars: &mut std::str::Chars<'_>) -> Option<char> {
    let digits = match chars.next()? {
        'n' => return Some('\n'),
        't' => return Some('\t'),
        'r' => return Some('\r'),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        other => return Some(other),
    };
    let code: String = chars.by_ref().take(digits).collect();
    u32::from_str_radix(&code, 16).ok().and_then(char::from_u32)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn literals_are_what_they_are_in_json() {
        for (text, value) in [
            ("1", json!(1)),
            (" -2.5 ", json!(-2.5)),
            ("True", json!(true)),
            ("None", Value::Null),
            (r#"'it\'s "x"\n\u00e9'"#, json!("it's \"x\"\né")),
            ("[1, 'a', (2,), []]", json!([1, "a", [2], []])),
            ("{'k': {\"l\": false}, }", json!({ "k": { "l": false } })),
        ] {
            assert_eq!(literal(text), Some(value), "{text}");
        }
        for text in ["", "f(1)", "[1", "'a", "{1: 2}", "1 2", "nan", &"[".repeat(100)] {
            assert_eq!(literal(text), None, "{text}");
        }
    }
}

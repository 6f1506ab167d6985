//! Sampling settings of the conversation: names and types. The gateway checks the values.

use serde_json::{Map, Value};

/// Type of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SettingKind {
    Number,
    Integer,
    Text,
}

/// Settings that requests accept, in order of importance.
const KNOWN: [(&str, SettingKind); 11] = [
    ("temperature", SettingKind::Number),
    ("max_tokens", SettingKind::Integer),
    ("seed", SettingKind::Integer),
    ("top_p", SettingKind::Number),
    ("top_k", SettingKind::Integer),
    ("min_p", SettingKind::Number),
    ("min_tokens", SettingKind::Integer),
    ("repetition_penalty", SettingKind::Number),
    ("presence_penalty", SettingKind::Number),
    ("frequency_penalty", SettingKind::Number),
    ("stop", SettingKind::Text),
];

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SettingError {
    #[error("`{name}` is not a setting; settings are {}", names().collect::<Vec<_>>().join(", "))]
    Unknown { name: String },
    #[error("`{name}` must be a {kind}, not `{text}`")]
    Value { name: &'static str, kind: &'static str, text: String },
}

/// Returns the names of all settings.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|(name, _)| *name)
}

/// Changed settings; model and gateway choose the rest.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ChatSettings(Map<String, Value>);

impl ChatSettings {
    /// Creates the settings given on the command line.
    pub(super) fn new(max_tokens: Option<u32>, temperature: Option<f64>, seed: Option<i64>) -> Self {
        let given = [
            ("max_tokens", max_tokens.map(Value::from)),
            ("temperature", temperature.map(Value::from)),
            ("seed", seed.map(Value::from)),
        ];
        Self(given.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect())
    }

    /// Sets one value; an empty text restores the default.
    pub(super) fn set(&mut self, name: &str, text: &str) -> Result<(), SettingError> {
        let known = KNOWN.iter().find(|(known, _)| *known == name);
        let &(name, kind) = known.ok_or_else(|| SettingError::Unknown { name: name.to_owned() })?;
        if text.is_empty() {
            self.0.shift_remove(name);
            return Ok(());
        }
        let value = kind.parse(text).ok_or_else(|| SettingError::Value {
            name,
            kind: kind.as_str(),
            text: text.to_owned(),
        })?;
        self.0.insert(name.to_owned(), value);
        Ok(())
    }

    /// Writes the changed settings into a request body.
    pub(super) fn fill(&self, body: &mut Value) {
        for (name, value) in &self.0 {
            body[name] = value.clone();
        }
    }

    /// Formats all settings for `/set`.
    pub(super) fn text(&self) -> String {
        let set = |name: &str| self.0.get(name).map_or_else(|| "(default)".to_owned(), Value::to_string);
        names().map(|name| format!("{name:<19} {}", set(name))).collect::<Vec<_>>().join("\n")
    }
}

impl SettingKind {
    fn parse(self, text: &str) -> Option<Value> {
        match self {
            Self::Number => text.parse::<f64>().ok().filter(|number| number.is_finite()).map(Value::from),
            Self::Integer => text.parse::<i64>().ok().map(Value::from),
            Self::Text => Some(text.into()),
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Number => "number",
            Self::Integer => "whole number",
            Self::Text => "text",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_set_stands_in_requests_until_it_is_given_back() {
        let mut settings = ChatSettings::new(Some(9), None, Some(-1));
        settings.set("temperature", "0.5").unwrap();
        settings.set("stop", "END OF").unwrap();
        settings.set("seed", "").unwrap();
        let mut body = json!({"model": "m"});
        settings.fill(&mut body);
        assert_eq!(body, json!({"model": "m", "max_tokens": 9, "temperature": 0.5, "stop": "END OF"}));
        assert!(settings.text().contains("seed                (default)"), "{}", settings.text());
    }

    #[test]
    fn what_requests_do_not_take_is_refused_by_name() {
        let mut settings = ChatSettings::default();
        let error = settings.set("temprature", "1").unwrap_err();
        assert!(error.to_string().contains("temprature") && error.to_string().contains("temperature,"));
        for (name, text) in [("temperature", "warm"), ("temperature", "NaN"), ("max_tokens", "1.5")] {
            assert!(settings.set(name, text).unwrap_err().to_string().contains(text), "{name} {text}");
        }
        assert_eq!(settings, ChatSettings::default());
    }
}

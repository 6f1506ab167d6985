//! Status of speculative decoding.

use serde::Deserialize;

use crate::terminal::printable;

/// The object `speculation` of `/v1/status`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Speculation {
    by: Option<String>,
    drafted_tokens: u64,
    accepted_tokens: u64,
    mean_accepted_tokens: f64,
    model_drafted_tokens: u64,
    model_accepted_tokens: u64,
    drafting_ms: f64,
    least_confidence: f64,
    ahead_tokens: u64,
    kept_tokens: u64,
}

impl Speculation {
    /// Formats drafter and acceptance in words.
    pub(super) fn text(&self) -> String {
        let mut words = vec![match &self.by {
            Some(by) => format!("by {}", printable(by)),
            None => "by nobody".to_owned(),
        }];
        words.push(match self.drafted_tokens {
            0 => "no tokens".to_owned(),
            drafted => format!(
                "{} of {drafted} tokens accepted, {:.1} a step",
                self.accepted_tokens, self.mean_accepted_tokens
            ),
        });
        if self.model_drafted_tokens > 0 {
            let (accepted, drafted) = (self.model_accepted_tokens, self.model_drafted_tokens);
            words.push(format!("{accepted} of {drafted} by the model in {:.1} ms", self.drafting_ms));
        }
        if self.ahead_tokens > 0 {
            let (ahead, kept) = (self.ahead_tokens, self.kept_tokens);
            words.push(format!("while weights were read {ahead}, of which {kept} were kept"));
        }
        if self.least_confidence > 0.0 {
            words.push(format!("worth it from {:.2} on", self.least_confidence));
        }
        words.join("; ")
    }
}

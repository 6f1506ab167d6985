//! Status of speculative decoding.

use control_protocol::status::SpeculationStatus;

use crate::terminal::printable;

/// Formats drafter and acceptance in words.
pub(super) fn text(speculation: &SpeculationStatus) -> String {
    let mut words = vec![match &speculation.by {
        Some(by) => format!("by {}", printable(by)),
        None => "by nobody".to_owned(),
    }];
    words.push(match speculation.drafted_tokens {
        0 => "no tokens".to_owned(),
        drafted => format!(
            "{} of {drafted} tokens accepted, {:.1} a step",
            speculation.accepted_tokens, speculation.mean_accepted_tokens
        ),
    });
    if speculation.model_drafted_tokens > 0 {
        let (accepted, drafted) = (speculation.model_accepted_tokens, speculation.model_drafted_tokens);
        words.push(format!("{accepted} of {drafted} by the model in {:.1} ms", speculation.drafting_ms));
    }
    if speculation.ahead_tokens > 0 {
        let (ahead, kept) = (speculation.ahead_tokens, speculation.kept_tokens);
        words.push(format!("while weights were read {ahead}, of which {kept} were kept"));
    }
    if speculation.least_confidence > 0.0 {
        words.push(format!("worth it from {:.2} on", speculation.least_confidence));
    }
    words.join("; ")
}

//! Loading of an adapter for `adapters add` and `adapters replace`.

use serde_json::Value;

use super::{AdaptersError, print};
use crate::{
    client::{ClientError, GatewayClient},
    terminal::{
        Terminal,
        table::{short_generation, size},
    },
};

/// Sends the load request `body` and prints the loaded adapter.
pub(super) fn run(
    name: &str,
    body: &Value,
    client: &GatewayClient,
    terminal: Terminal,
) -> Result<(), AdaptersError> {
    report(name, terminal, || client.post_text("/v1/load_lora_adapter", body))
}

/// Loads an adapter with `send`, and prints the loaded adapter.
pub(super) fn report(
    name: &str,
    terminal: Terminal,
    send: impl FnOnce() -> Result<String, ClientError>,
) -> Result<(), AdaptersError> {
    let progress = terminal.spinner(format!("loading {name}"));
    let answer = send();
    progress.finish_and_clear();
    print(&answer?, terminal, |answer| described(name, answer))
}

/// Formats the answer to a load.
fn described(name: &str, answer: &Value) -> String {
    let text = |field: &str| answer[field].as_str().unwrap_or_default();
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    let generation = short_generation(text("generation"));
    let (rank, bytes, modules) = (number("rank"), size(number("bytes")), number("modules"));
    let does = match number("draft_layers") {
        0 if answer["labels"].is_array() => "classifies".to_owned(),
        0 => "is served".to_owned(),
        layers => format!("drafts, of the first {layers} layers"),
    };
    let loaded =
        format!("{name} {does}: generation {generation}, rank {rank}, {bytes}, {modules} modules changed");
    let template =
        (answer["own_chat_template"] == true).then(|| "  its own chat template is used".to_owned());
    let warnings = answer["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let warnings = warnings.map(|warning| format!("  warning: {warning}"));
    [loaded].into_iter().chain(template).chain(warnings).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_load_says_whether_the_adapters_own_template_is_used_and_how_its_tokenizer_differs() {
        let answer = json!({ "generation": "0123456789abcdef", "rank": 8, "bytes": 1024, "modules": 4 });
        assert_eq!(described("a", &answer).lines().count(), 1);
        let mut own = answer;
        own["own_chat_template"] = true.into();
        own["warnings"] = json!(["`eos_token` is another"]);
        let said = described("a", &own);
        assert!(
            said.ends_with("\n  its own chat template is used\n  warning: `eos_token` is another"),
            "{said}"
        );
    }
}

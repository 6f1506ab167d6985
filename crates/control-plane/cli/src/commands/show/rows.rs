//! Formats the facts about a model or adapter as lines with words and units.

use serde_json::Value;

use crate::terminal::{
    printable,
    table::{percent, size},
};

/// Returns the lines about a model or an adapter, without unknown facts.
pub(super) fn of(facts: &Value) -> Vec<(String, String)> {
    let rows = match facts["parent"].is_string() {
        true => adapter(facts),
        false => model(facts),
    };
    let known = rows.into_iter().filter_map(|(name, text)| Some((name.to_owned(), printable(&text?))));
    known.collect()
}

type ShowRow = (&'static str, Option<String>);

/// Returns the lines of a model: served facts if it is served, and file facts if the files are on this
/// machine.
fn model(facts: &Value) -> Vec<ShowRow> {
    let files = if facts["files"].is_object() { &facts["files"] } else { facts };
    let number = |name: &str| files[name].as_u64();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    vec![
        ("served as", text(&facts["id"])),
        ("path", text(&files["path"]).or_else(|| text(&facts["root"]))),
        ("format", format(files)),
        ("parameters", number("parameters").map(count)),
        ("size", number("bytes").map(size)),
        ("architecture", text(&files["architecture"])),
        ("context", context(facts, files)),
        ("layers", layers(files)),
        ("heads", heads(files)),
        ("window", number("sliding_window").map(|tokens| format!("{tokens} tokens"))),
        ("vocabulary", vocabulary(files)),
        ("chat template", files["chat_template"].as_bool().map(yes_or_no)),
        ("sampling", sampling(&files["defaults"])),
        ("adapters", facts["adapters"]["registered"].as_u64().map(|adapters| format!("{adapters} served"))),
    ]
}

fn format(files: &Value) -> Option<String> {
    let format = files["format"].as_str()?;
    Some(match files["encoding"].as_str() {
        Some(encoding) => format!("{format}, {encoding}"),
        None => format.to_owned(),
    })
}

/// Formats the served context length, which may be shorter than the model's own.
fn context(facts: &Value, files: &Value) -> Option<String> {
    let (served, made_for) = (facts["max_model_len"].as_u64(), files["context_length"].as_u64());
    Some(match (served, made_for) {
        (Some(served), Some(made_for)) if served != made_for => {
            format!("{served} tokens served, of {made_for}")
        }
        (Some(tokens), _) | (None, Some(tokens)) => format!("{tokens} tokens"),
        (None, None) => return None,
    })
}

fn layers(files: &Value) -> Option<String> {
    let (layers, width) = (files["layers"].as_u64()?, files["hidden_size"].as_u64()?);
    let experts = &files["experts"];
    let feed_forward = match (experts["count"].as_u64(), experts["chosen"].as_u64()) {
        (Some(count), Some(chosen)) => format!("{chosen} of {count} experts of width {}", experts["width"]),
        _ => format!("feed-forward {}", files["intermediate_size"]),
    };
    Some(format!("{layers} of width {width}, {feed_forward}"))
}

fn heads(files: &Value) -> Option<String> {
    let (heads, keys) = (files["heads"].as_u64()?, files["kv_heads"].as_u64()?);
    Some(format!("{heads} of width {}, {keys} for keys and values", files["head_dim"]))
}

fn vocabulary(files: &Value) -> Option<String> {
    let tokens = files["vocab_size"].as_u64()?;
    let head =
        if files["tied_head"] == true { "one table for input and output" } else { "an output of its own" };
    Some(format!("{tokens} tokens, {head}"))
}

/// Formats the sampling defaults that the model's files recommend.
fn sampling(defaults: &Value) -> Option<String> {
    let names = ["temperature", "top_p", "top_k", "repetition_penalty"];
    let said = names.iter().filter(|name| defaults[**name].is_number());
    let said: Vec<_> = said.map(|name| format!("{name} {}", defaults[*name])).collect();
    (!said.is_empty()).then(|| said.join(", "))
}

fn adapter(facts: &Value) -> Vec<ShowRow> {
    let text = |name: &str| facts[name].as_str().map(str::to_owned);
    let number = |name: &str| facts[name].as_u64();
    vec![
        ("name", text("id")),
        ("base", text("parent")),
        ("generation", text("generation").or_else(|| text("adapter_generation"))),
        ("rank", number("rank").map(|rank| rank.to_string())),
        ("size", number("bytes").map(size)),
        ("labels", labels(facts)),
        ("drafts", number("draft_layers").map(|layers| format!("with the base's first {layers} layers"))),
        ("changes", number("modules").map(|modules| format!("{modules} linear layers"))),
        ("state", state(facts)),
        ("pinned", facts["pinned"].as_bool().map(yes_or_no)),
        ("tenant", text("tenant")),
        ("requests", number("requests").map(|requests| format!("{requests} now"))),
        ("context", number("max_model_len").map(|tokens| format!("{tokens} tokens"))),
    ]
}

/// Formats the labels of an adapter that classifies.
fn labels(facts: &Value) -> Option<String> {
    let labels: Vec<&str> = facts["labels"].as_array()?.iter().filter_map(Value::as_str).collect();
    Some(labels.join(", "))
}

fn state(facts: &Value) -> Option<String> {
    let mut parts = vec![facts["state"].as_str()?.to_owned()];
    parts.extend(facts["error"].as_str().map(str::to_owned));
    parts.extend(match facts["tier"].as_str() {
        Some("host") => Some("in memory".to_owned()),
        Some("disk") => Some("on disk until it is asked for".to_owned()),
        Some("memory") => Some("in the gateway's memory until it is asked for".to_owned()),
        _ => None,
    });
    if let (Some(there), Some(all @ 1..)) = (facts["device_bytes"].as_u64(), facts["bytes"].as_u64())
        && facts["rank"] != 0
    {
        #[expect(clippy::cast_precision_loss, reason = "for people to read")]
        parts.push(format!("{} on the device", percent(there as f64 / all as f64)));
    }
    Some(parts.join(", "))
}

/// Formats a count in millions or billions with three digits.
fn count(parameters: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    let parameters = parameters as f64;
    let (value, unit) =
        if parameters >= 1e9 { (parameters / 1e9, "billion") } else { (parameters / 1e6, "million") };
    let decimals = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.decimals$} {unit}")
}

fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lines(facts: &Value) -> Vec<String> {
        of(facts).into_iter().map(|(name, text)| format!("{name}: {text}")).collect()
    }

    #[test]
    fn a_model_is_shown_in_words_and_units_and_what_is_unknown_is_left_out() {
        let files = json!({
            "path": "/m.gguf", "bytes": 2048, "format": "gguf", "encoding": "Q4_1", "parameters": 134_515_008,
            "architecture": "llama", "context_length": 8192, "vocab_size": 49152, "layers": 30, "hidden_size": 576,
            "intermediate_size": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "sliding_window": null,
            "tied_head": true, "chat_template": true, "defaults": {"temperature": null, "top_k": 3},
        });
        let expected = [
            "path: /m.gguf",
            "format: gguf, Q4_1",
            "parameters: 135 million",
            "size: 2.00 KiB",
            "architecture: llama",
            "context: 8192 tokens",
            "layers: 30 of width 576, feed-forward 1536",
            "heads: 9 of width 64, 3 for keys and values",
            "vocabulary: 49152 tokens, one table for input and output",
            "chat template: yes",
            "sampling: top_k 3",
        ];
        assert_eq!(lines(&files), expected);
        let mut mixture = files.clone();
        mixture["experts"] = json!({"count": 8, "chosen": 2, "width": 768});
        assert!(lines(&mixture).contains(&"layers: 30 of width 576, 2 of 8 experts of width 768".to_owned()));
        let served = json!({"id": "smol", "parent": null, "max_model_len": 4096, "files": files});
        assert_eq!(lines(&served)[0], "served as: smol");
        assert!(lines(&served).contains(&"context: 4096 tokens served, of 8192".to_owned()));
        let elsewhere = json!({"id": "smol", "root": "m.gguf", "max_model_len": 4096});
        assert_eq!(lines(&elsewhere), ["served as: smol", "path: m.gguf", "context: 4096 tokens"]);
    }

    #[test]
    fn an_adapter_is_shown_with_where_it_is_and_one_without_matrices_is_nowhere_else() {
        let mut adapter = json!({
            "id": "a", "parent": "smol", "generation": "12ab", "rank": 4, "bytes": 2048, "modules": 90,
            "state": "ready", "tier": "host", "device_bytes": 1024, "pinned": false, "tenant": null, "requests": 2,
        });
        let expected = [
            "name: a",
            "base: smol",
            "generation: 12ab",
            "rank: 4",
            "size: 2.00 KiB",
            "changes: 90 linear layers",
            "state: ready, in memory, 50 % on the device",
            "pinned: no",
            "requests: 2 now",
        ];
        assert_eq!(lines(&adapter), expected);
        adapter["rank"] = 0.into();
        adapter["device_bytes"] = 0.into();
        assert!(lines(&adapter).contains(&"state: ready, in memory".to_owned()));
    }

    #[test]
    fn parameters_have_three_figures() {
        let counts = [361_821_120, 1_235_814_400, 13_015_864_320, 7_000_000].map(count);
        assert_eq!(counts, ["362 million", "1.24 billion", "13.0 billion", "7.00 million"]);
    }
}

//! `holobiont show`: everything known about a model or an adapter, served or on disk.

use std::path::Path;

use model::{
    gguf::GgufFile,
    open::{ModelFiles, OpenError},
    tokenizer::Tokenizer,
};
use serde_json::{Map, Value, json};

use crate::{
    client::{Client, ClientError, list_in},
    exit::{Exit, Explain},
    home::Home,
    models::{self, FindError},
    table::{pairs, size},
    terminal::{Format, Terminal, printable},
};

/// Arguments of `show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArguments {
    /// A model or adapter that is served, or a model on disk [default: the base that is served]
    #[arg(value_name = "MODEL|ADAPTER")]
    name: Option<String>,
}

/// Why nothing is known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShowError {
    /// A gateway answered, but not with what was asked.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Neither served nor on disk.
    #[error(transparent)]
    Model(#[from] FindError),
    /// It is there and cannot be read.
    #[error("the model's files cannot be read")]
    Open(#[from] OpenError),
}

impl Explain for ShowError {
    fn exit(&self) -> Exit {
        match self {
            Self::Client(error) => error.exit(),
            Self::Model(error) => error.exit(),
            Self::Open(_) => Exit::Failed,
        }
    }

    fn next(&self) -> Option<String> {
        match self {
            Self::Client(error) => error.next(),
            Self::Model(_) => Some("holobiont ls".into()),
            Self::Open(_) => None,
        }
    }
}

/// Shows all there is to know.
pub(crate) fn run(arguments: &ShowArguments, url: &str, terminal: Terminal) -> Result<(), ShowError> {
    let name = arguments.name.as_deref();
    let facts = match served(name, &Client::new(url, terminal))? {
        Some(facts) => facts,
        None => on_disk(&models::find(name, &Home::from_environment())?)?,
    };
    match terminal.format {
        Format::Json => terminal.print(facts),
        Format::Human => terminal.print(pairs(terminal.ink(), &lines(&facts))),
    }
    Ok(())
}

/// What a gateway knows; `None` if there is none, or if it does not serve that.
fn served(name: Option<&str>, client: &Client) -> Result<Option<Value>, ClientError> {
    let cards: Vec<Map<String, Value>> = match client.get("/v1/models") {
        Ok(body) => list_in(body)?,
        Err(ClientError::Unreachable { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let wanted = name.map(|name| name.rsplit(':').next().unwrap_or(name));
    let is_meant = |card: &&Map<String, Value>| match wanted {
        Some(wanted) => card.get("id").is_some_and(|id| id == wanted),
        None => card.get("parent").is_none_or(Value::is_null),
    };
    let Some(mut facts) = cards.iter().find(is_meant).cloned() else {
        return Ok(None);
    };
    let is_adapter = facts.get("parent").is_some_and(|parent| !parent.is_null());
    // What only administrators may know is left out for others.
    let more = if is_adapter { adapter(client, &facts) } else { client.get("/v1/status") };
    match more {
        Ok(Value::Object(more)) => facts.extend(more),
        Ok(_) | Err(ClientError::Refused { status: 401 | 403 | 404, .. }) => {}
        Err(error) => return Err(error),
    }
    Ok(Some(Value::Object(facts)))
}

fn adapter(client: &Client, card: &Map<String, Value>) -> Result<Value, ClientError> {
    let adapters: Vec<Value> = list_in(client.get("/v1/lora_adapters")?)?;
    let is_meant = |adapter: &Value| Some(&adapter["name"]) == card.get("id");
    Ok(adapters.into_iter().find(is_meant).unwrap_or_default())
}

/// What a model's files say.
fn on_disk(path: &Path) -> Result<Value, OpenError> {
    let files = ModelFiles::at(path)?;
    let weights = files.weights()?;
    let (config, defaults) = (weights.config(), files.generation_defaults()?);
    // A tokenizer that cannot be read is the executor's to refuse; here it means that nothing is known.
    let has_template = tokenizer(&files).map(|tokenizer| tokenizer.chat_template().is_some());
    Ok(json!({
        "path": path,
        "bytes": models::model_at(path).map(|model| model.bytes),
        "architecture": config.architecture,
        "context_length": config.context_length,
        "vocab_size": config.vocab_size,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        "tied_head": config.tied_head,
        "chat_template": has_template,
        "defaults": {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "repetition_penalty": defaults.repetition_penalty,
            "eos_token_ids": defaults.eos_token_ids,
        },
    }))
}

fn tokenizer(files: &ModelFiles) -> Option<Tokenizer> {
    match files {
        ModelFiles::Gguf(path) => Tokenizer::from_gguf(&GgufFile::open(path).ok()?).ok(),
        ModelFiles::Directory(path) => Tokenizer::from_directory(path).ok(),
    }
}

/// One line for each fact; what is not known is left out.
fn lines(facts: &Value) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    collect(&mut lines, "", facts);
    lines
}

fn collect(lines: &mut Vec<(String, String)>, name: &str, value: &Value) {
    let text = match value {
        Value::Null => return,
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
                collect(lines, &name, value);
            }
            return;
        }
        Value::String(text) => printable(text),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::Number(number) if name.rsplit('.').next().is_some_and(|last| last.ends_with("bytes")) => {
            number.as_u64().map_or_else(|| number.to_string(), size)
        }
        other => other.to_string(),
    };
    lines.push((name.to_owned(), text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_fact_is_a_line_and_unknown_ones_are_left_out() {
        let facts =
            json!({"name": "a", "bytes": 2048, "tenant": null, "pinned": true, "defaults": {"top_k": 3}});
        let lines = lines(&facts);
        let lines: Vec<_> = lines.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(lines, [("name", "a"), ("bytes", "2.00 KiB"), ("pinned", "yes"), ("defaults.top_k", "3")]);
    }
}

//! `holobiont show`: describes a model or an adapter, served or on disk; with `--json` in full.

mod rows;

use std::path::Path;

use model::{
    shape::{
        config::ModelConfig,
        layout::{block_weights, tensor_shape},
        source::TensorId,
    },
    sources::open::{self, OpenError},
};
use model_files::{gguf::GgufFile, model_files::ModelFiles};
use serde_json::{Map, Value, json};
use text::tokenizer::Tokenizer;

use crate::{
    client::{ClientError, GatewayClient, list_in},
    exit::{Exit, Explain},
    home::HomeDirectory,
    models::{self, FindError},
    terminal::{PrintFormat, Terminal, table::pairs},
};

#[derive(Debug, clap::Args)]
pub(crate) struct ShowArguments {
    /// Name of a served model or adapter, or of a model on disk [default: the served base]
    #[arg(value_name = "MODEL|ADAPTER")]
    name: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ShowError {
    /// A gateway answered with an error.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The model is neither served nor on disk.
    #[error(transparent)]
    Model(#[from] FindError),
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

pub(crate) fn run(arguments: &ShowArguments, url: &str, terminal: Terminal) -> Result<(), ShowError> {
    let name = arguments.name.as_deref();
    let facts = match served(name, &GatewayClient::new(url, terminal))? {
        Some(facts) => facts,
        None => on_disk(&models::find(name, &HomeDirectory::from_environment())?)?,
    };
    match terminal.format {
        PrintFormat::Json => terminal.print(facts),
        PrintFormat::Human => terminal.print(pairs(terminal.ink(), &rows::of(&facts))),
    }
    Ok(())
}

/// Returns the gateway's facts; `None` without a gateway or if the gateway does not serve `name`.
fn served(name: Option<&str>, client: &GatewayClient) -> Result<Option<Value>, ClientError> {
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
    // Facts that only administrators may read are left out for other keys.
    let more = if is_adapter { adapter(client, &facts) } else { client.get("/v1/status") };
    match more {
        Ok(Value::Object(more)) => facts.extend(more),
        Ok(_) | Err(ClientError::Refused { status: 401 | 403 | 404, .. }) => {}
        Err(error) => return Err(error),
    }
    // A gateway on this machine has its model's files here; a gateway elsewhere may have other files at the
    // same path.
    let here = facts.get("model_path").and_then(Value::as_str).map(Path::new);
    let files = here.filter(|path| path.exists()).and_then(|path| on_disk(path).ok());
    facts.extend(files.map(|files| ("files".to_owned(), files)));
    Ok(Some(Value::Object(facts)))
}

fn adapter(client: &GatewayClient, card: &Map<String, Value>) -> Result<Value, ClientError> {
    let adapters: Vec<Value> = list_in(client.get("/v1/lora_adapters")?)?;
    let is_meant = |adapter: &Value| Some(&adapter["name"]) == card.get("id");
    Ok(adapters.into_iter().find(is_meant).unwrap_or_default())
}

/// Returns the facts in a model's files.
fn on_disk(path: &Path) -> Result<Value, OpenError> {
    let files = ModelFiles::at(path)?;
    let weights = open::weights(&files)?;
    let (config, defaults) = (weights.config(), files.generation_defaults()?);
    // An unreadable tokenizer is reported by the executor; here the template is just unknown.
    let has_template = tokenizer(&files).map(|tokenizer| tokenizer.chat_template().is_some());
    Ok(json!({
        "path": std::path::absolute(path).unwrap_or_else(|_| path.to_owned()),
        "bytes": models::model_at(path).map(|model| model.bytes),
        "format": match files {
            ModelFiles::Gguf(_) => "gguf",
            ModelFiles::Directory(_) => "safetensors",
        },
        "encoding": block_weights(config, 0).last().and_then(|last| weights.kind(last)).map(|kind| format!("{kind:?}").to_uppercase()),
        "parameters": parameters(config),
        "architecture": config.architecture,
        "context_length": config.context_length,
        "vocab_size": config.vocab_size,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "experts": config.experts.as_ref().map(|experts| {
            json!({ "count": experts.count, "chosen": experts.chosen, "width": experts.width })
        }),
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

/// Counts the elements of all matrices, without norms and biases: less than a thousandth of all elements.
fn parameters(config: &ModelConfig) -> usize {
    let elements = |id| tensor_shape(config, id).iter().product::<usize>();
    let blocks = (0..config.layers).flat_map(|layer| block_weights(config, layer));
    let tables = if config.tied_head { 1 } else { 2 };
    tables * elements(TensorId::TokenEmbedding) + blocks.map(elements).sum::<usize>()
}

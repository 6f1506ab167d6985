//! One function for each parser, called through the public API as the processes call it.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use model::{
    adapter::{Adapter, AnyAdapter},
    shape::{
        config::{ArchFlags, ModelConfig, Rope, RopeScaling},
        layout,
        source::WeightSource,
    },
    sources::gguf::GgufSource,
};
use model_files::{generation_defaults::GenerationDefaults, gguf::GgufFile, model_files::ModelFiles};
use shmproto::{
    codec::Wire,
    fd_passing::{FromWorker, ToWorker},
    image,
    message::{ToExecutor, ToGateway},
};
use tempfile::TempDir;
use text::{
    chat_template::{ChatTemplate, GenerationPrompt, Limits, RenderTemplate as _, TemplateTokens},
    tokenizer::{AddSpecial, ParseSpecial, SkipSpecial, Tokenizer},
};

use crate::{Outcome, parts};

pub(crate) fn refused(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub(crate) fn gguf(input: &[u8]) -> Outcome {
    let path = Path::new("input.gguf");
    let file = GgufFile::from_bytes(path, input.to_vec()).map_err(refused)?;
    for (_, view) in file.tensors() {
        assert_eq!(view.kind.row_bytes(view.cols()).map(|row| row * view.rows()), Some(view.data.len()));
    }
    GenerationDefaults::from_gguf(&file).map_err(refused)?;
    touch(&GgufSource::new(file).map_err(refused)?);
    Ok(())
}

pub(crate) fn gguf_tokenizer(input: &[u8]) -> Outcome {
    let file = GgufFile::from_bytes(Path::new("input.gguf"), input.to_vec()).map_err(refused)?;
    let tokenizer = Tokenizer::from_gguf(&file).map_err(refused)?;
    both_ways(&tokenizer, "A text, 12 of them:\n\n  <|im_end|> ▁é日")
}

pub(crate) fn gguf_adapter(input: &[u8]) -> Outcome {
    let folder = folder(&[("adapter.gguf", input)]);
    Adapter::read(&folder.path().join("adapter.gguf"), &base()).map(drop).map_err(refused)
}

pub(crate) fn peft(input: &[u8]) -> Outcome {
    let [config, weights] = parts::split(input);
    let folder = folder(&[("adapter_config.json", config), ("adapter_model.safetensors", weights)]);
    AnyAdapter::read(folder.path(), &base()).map(drop).map_err(refused)
}

pub(crate) fn directory(input: &[u8]) -> Outcome {
    let [config, index, weights] = parts::split(input);
    let mut files = vec![("config.json", config), ("model.safetensors", weights)];
    if !index.is_empty() {
        files.push(("model.safetensors.index.json", index));
    }
    let folder = folder(&files);
    let files = ModelFiles::at(folder.path()).map_err(refused)?;
    files.generation_defaults().map_err(refused)?;
    touch(model::sources::open::weights(&files).map_err(refused)?.as_ref());
    Ok(())
}

pub(crate) fn tokenizer_json(input: &[u8]) -> Outcome {
    let [json, config, text] = parts::split(input);
    let mut files = vec![("tokenizer.json", json)];
    if !config.is_empty() {
        files.push(("tokenizer_config.json", config));
    }
    let tokenizer = Tokenizer::from_directory(folder(&files).path()).map_err(refused)?;
    both_ways(&tokenizer, &String::from_utf8_lossy(text))
}

pub(crate) fn template(input: &[u8]) -> Outcome {
    let [source, messages] = parts::split(input);
    let source = std::str::from_utf8(source).map_err(refused)?;
    let messages: Vec<serde_json::Value> = serde_json::from_slice(messages).map_err(refused)?;
    let tokens = TemplateTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), pad: None };
    let template = ChatTemplate::new(source, tokens, Limits::default()).map_err(refused)?;
    let extra = serde_json::Map::new();
    template.render(&messages, GenerationPrompt::Add, &extra).map(drop).map_err(refused)
}

pub(crate) fn to_executor(input: &[u8]) -> Outcome {
    message::<ToExecutor>(input)
}

pub(crate) fn to_gateway(input: &[u8]) -> Outcome {
    message::<ToGateway>(input)
}

/// Reads messages in both directions, since a peer of either side may be hostile.
pub(crate) fn worker_message(input: &[u8]) -> Outcome {
    message::<FromWorker>(input).or_else(|_| message::<ToWorker>(input))
}

/// Reads an adapter image; every matrix's values must lie within the image.
pub(crate) fn adapter_image(input: &[u8]) -> Outcome {
    for entry in image::entries(input).map_err(refused)? {
        for (offset, bytes) in [(entry.a_offset, entry.a_bytes()), (entry.b_offset, entry.b_bytes())] {
            let end = bytes.and_then(|bytes| offset.checked_add(bytes));
            assert!(end.is_some_and(|end| end <= input.len() as u64), "{entry:?} leads outside");
        }
    }
    Ok(())
}

/// Checks that each readable message has exactly one encoding.
fn message<T: Wire>(input: &[u8]) -> Outcome {
    let message = T::from_bytes(input).map_err(refused)?;
    assert_eq!(message.to_bytes(), input, "a message has one encoding");
    Ok(())
}

/// Encodes a text and decodes its tokens, which must yield text for any vocabulary.
fn both_ways(tokenizer: &Tokenizer, text: &str) -> Outcome {
    for parse in [ParseSpecial::Yes, ParseSpecial::No] {
        let ids = tokenizer.encode(text, AddSpecial::Yes, parse).map_err(refused)?;
        let _ = tokenizer.decode(&ids, SkipSpecial::No);
    }
    Ok(())
}

/// Reads every tensor that a checked model declares.
fn touch(source: &dyn WeightSource) {
    let config = source.config();
    for id in layout::required_tensors(config, &[]) {
        let tensor = source.tensor(id).unwrap_or_else(|| panic!("{id:?} was promised"));
        let row = tensor.kind.row_bytes(tensor.cols).unwrap_or_else(|| panic!("{id:?} has whole blocks"));
        assert_eq!(tensor.data.len(), row * tensor.rows, "{id:?}");
    }
}

/// Returns a base model that adapters must fit.
pub(crate) fn base() -> ModelConfig {
    ModelConfig {
        architecture: "llama".to_owned(),
        vocab_size: 32,
        hidden_size: 8,
        intermediate_size: 16,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        qk_norm: false,
        tied_head: true,
        context_length: 64,
        sliding_window: None,
        traits: ArchFlags::default(),
        experts: None,
    }
}

/// Creates a private directory with these files, in memory if the system supports it.
pub(crate) fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let create = || -> io::Result<TempDir> {
        let memory = Path::new("/dev/shm");
        let mut private = tempfile::Builder::new();
        private.permissions(Permissions::from_mode(0o700));
        let folder = if memory.is_dir() { private.tempdir_in(memory)? } else { private.tempdir()? };
        for (name, bytes) in files {
            fs::write(folder.path().join(name), bytes)?;
        }
        Ok(folder)
    };
    create().unwrap_or_else(|error| panic!("a temporary directory could not be filled: {error}"))
}

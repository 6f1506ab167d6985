//! The text files of an adapter: its chat template, and differences between its tokenizer and the base's.

use std::path::Path;

use model_files::{gguf::GgufFile, model_files::ModelFiles, whole_file};
use text::{
    adapter_text::{AdapterText, AdapterTextError, BaseTokens},
    chat_template::{ChatTemplate, Limits},
    tokenizer::Tokenizer,
};

#[derive(Debug, Default)]
pub(super) struct ComparedText {
    /// Chat template, if it differs from the base's.
    pub(super) template: Option<String>,
    /// Differences of the tokenizer.
    pub(super) warnings: Vec<String>,
}

/// Compares the text files of `adapter` with those of `model`, if the model has a readable tokenizer.
///
/// # Errors
/// If the adapter's files are broken.
pub(super) fn compare(model: &Path, adapter: &Path) -> Result<ComparedText, AdapterTextError> {
    if !adapter.is_dir() {
        return Ok(ComparedText::default());
    }
    let beside = AdapterText::read(|name, limit| whole_file::read_if_there(&adapter.join(name), limit))?;
    let (base, mut warnings) = match tokenizer(model) {
        Ok(base) => (base, Vec::new()),
        Err(error) => (None, vec![format!("cannot compare its tokenizer with the base model's: {error}")]),
    };
    let tokens = base.as_ref().map(Tokenizer::template_tokens).unwrap_or_default();
    let template = beside.own_template(base.as_ref().and_then(Tokenizer::chat_template)).map(str::to_owned);
    if let Some(source) = &template {
        let compiled = ChatTemplate::new(source, tokens.clone(), Limits::default());
        compiled.map_err(|error| beside.refused_template(&error))?;
    }
    if let Some(base) = &base {
        let bytes = |token| base.token_bytes(token).unwrap_or_default();
        let (bos, end_tokens) = (tokens.bos.as_deref(), base.stop_tokens());
        warnings.extend(beside.differences(&BaseTokens { bos, end_tokens, bytes: &bytes }));
    }
    Ok(ComparedText { template, warnings })
}

/// Returns the tokenizer of a model; `None` if it has none.
fn tokenizer(model: &Path) -> anyhow::Result<Option<Tokenizer>> {
    Ok(match ModelFiles::text_at(model)? {
        ModelFiles::Gguf(path) => Some(Tokenizer::from_gguf(&GgufFile::open(&path)?)?),
        ModelFiles::Directory(path) if !path.join("tokenizer.json").exists() => None,
        ModelFiles::Directory(path) => Some(Tokenizer::from_directory(&path)?),
    })
}

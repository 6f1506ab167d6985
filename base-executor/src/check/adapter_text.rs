//! The text files beside an adapter: its own chat template, and how its tokenizer differs from the base's.

use std::path::Path;

use model_files::{gguf::GgufFile, model_files::ModelFiles, whole_file};
use text::{
    adapter_text::{AdapterText, AdapterTextError, BaseTokens},
    chat_template::{ChatTemplate, Limits},
    tokenizer::Tokenizer,
};

/// The text of an adapter, compared with its base's.
#[derive(Debug, Default)]
pub(super) struct ComparedText {
    /// Its chat template, if that is another than the base's.
    pub(super) template: Option<String>,
    /// How its tokenizer differs.
    pub(super) warnings: Vec<String>,
}

/// Compares the text files beside `adapter` with the text of `model`. Where the model has no tokenizer that can be read, there is
/// nothing to compare with.
///
/// # Errors
/// The files beside the adapter are broken.
pub(super) fn compare(model: &Path, adapter: &Path) -> Result<ComparedText, AdapterTextError> {
    if !adapter.is_dir() {
        return Ok(ComparedText::default());
    }
    let beside = AdapterText::read(|name, limit| whole_file::read_if_there(&adapter.join(name), limit))?;
    let (base, mut warnings) = match tokenizer(model) {
        Ok(base) => (base, Vec::new()),
        Err(error) => (None, vec![format!("its tokenizer is not compared with the base model's: {error}")]),
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

/// The tokenizer of a model; `None` if it has none.
fn tokenizer(model: &Path) -> anyhow::Result<Option<Tokenizer>> {
    Ok(match ModelFiles::text_at(model)? {
        ModelFiles::Gguf(path) => Some(Tokenizer::from_gguf(&GgufFile::open(&path)?)?),
        ModelFiles::Directory(path) if !path.join("tokenizer.json").exists() => None,
        ModelFiles::Directory(path) => Some(Tokenizer::from_directory(&path)?),
    })
}

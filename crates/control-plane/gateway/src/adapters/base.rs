//! The base model that adapters are loaded for, and how the text files beside an adapter differ from its text.

use std::sync::Arc;

use text::adapter_text::{AdapterText, AdapterTextError, BaseTokens};

use super::record::Record;
use crate::text::Text;

/// The base model, as far as a load needs to know it.
#[derive(Debug, Clone, Copy)]
pub struct Base<'a> {
    /// Its name, which no adapter has.
    pub name: &'a str,
    /// Its tokenizer and chat template; `None` where nobody writes text.
    pub text: Option<&'a Arc<dyn Text>>,
}

/// The text of an adapter, compared with its base's.
#[derive(Debug, Default)]
pub(super) struct ComparedText {
    /// Its chat template, if that is another than the base's.
    pub(super) template: Option<Arc<str>>,
    /// How its tokenizer differs from the base's, which is used.
    pub(super) warnings: Vec<String>,
}

impl<'a> From<&'a str> for Base<'a> {
    fn from(name: &'a str) -> Self {
        Self { name, text: None }
    }
}

impl ComparedText {
    /// Compares the text files beside an adapter with the base's text, and compiles its chat template. May block.
    pub(super) fn of(beside: &AdapterText, base: Option<&dyn Text>) -> Result<Self, AdapterTextError> {
        let Some(base) = base else {
            return Ok(Self { template: beside.own_template(None).map(Arc::from), warnings: Vec::new() });
        };
        let facts = base.facts();
        let bytes = |token| base.token_bytes(token);
        let tokens =
            BaseTokens { bos: facts.bos_token.as_deref(), end_tokens: &facts.end_tokens, bytes: &bytes };
        let template = beside.own_template(facts.chat_template.as_deref());
        if let Some(source) = template {
            base.with_chat_template(source).map_err(|error| beside.refused_template(&error))?;
        }
        Ok(Self { template: template.map(Arc::from), warnings: beside.differences(&tokens) })
    }

    /// Whether a registered adapter has this chat template.
    pub(super) fn is_of(&self, record: &Record) -> bool {
        self.template.as_ref() == record.template.as_ref().map(|own| &own.source)
    }

    /// Bytes of the chat template.
    pub(super) fn template_bytes(&self) -> u64 {
        self.template.as_ref().map_or(0, |source| source.len() as u64)
    }
}

//! The base model of adapters, and the comparison of an adapter's text files with those of the base.

use std::sync::Arc;

use text::adapter_text::{AdapterText, AdapterTextError, BaseTokens};

use super::record::Record;
use crate::text::Text;

/// The facts about the base model that a load needs.
#[derive(Debug, Clone, Copy)]
pub struct Base<'a> {
    /// Name of the base; no adapter may have it.
    pub name: &'a str,
    /// Tokenizer and chat template; `None` if the gateway serves no text.
    pub text: Option<&'a Arc<dyn Text>>,
}

/// Result of comparing the text files of an adapter with those of its base.
#[derive(Debug, Default)]
pub(super) struct ComparedText {
    /// Chat template of the adapter, if it differs from the base's.
    pub(super) template: Option<Arc<str>>,
    /// Differences of the adapter's tokenizer from the base's; requests use the base's tokenizer.
    pub(super) warnings: Vec<String>,
}

impl<'a> From<&'a str> for Base<'a> {
    fn from(name: &'a str) -> Self {
        Self { name, text: None }
    }
}

impl ComparedText {
    /// Compares an adapter's text files with the text of the base, and compiles the adapter's chat template.
    /// May block.
    pub(super) fn of(beside: &AdapterText, base: Option<&dyn Text>) -> Result<Self, AdapterTextError> {
        let Some(base) = base else {
            return Ok(Self { template: beside.own_template(None).map(Arc::from), warnings: Vec::new() });
        };
        let info = base.info();
        let bytes = |token| base.token_bytes(token);
        let tokens =
            BaseTokens { bos: info.bos_token.as_deref(), end_tokens: &info.end_tokens, bytes: &bytes };
        let template = beside.own_template(info.chat_template.as_deref()).map(Arc::from);
        if let Some(source) = &template {
            base.check_chat_template(source).map_err(|error| beside.refused_template(&error))?;
        }
        Ok(Self { template, warnings: beside.differences(&tokens) })
    }

    /// Whether the registered adapter `record` has this chat template.
    pub(super) fn is_of(&self, record: &Record) -> bool {
        self.template.as_ref() == record.template.as_ref().map(|own| &own.source)
    }

    pub(super) fn template_bytes(&self) -> u64 {
        self.template.as_ref().map_or(0, |source| source.len() as u64)
    }
}

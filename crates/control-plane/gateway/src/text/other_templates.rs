//! Cache of texts with adapters' chat templates, so that adapters with equal templates share one.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use super::Text;
use crate::lock::lock;

/// Maximum size of cached template sources in bytes; texts also take a copy of the model's facts each.
const MAX_KEPT_BYTES: usize = 2 << 20;

/// Cached texts, most recently used last.
#[derive(Debug, Default)]
pub(super) struct OtherTemplates(Mutex<VecDeque<Arc<dyn Text>>>);

impl OtherTemplates {
    /// Returns the cached text with this chat template.
    pub(super) fn get(&self, source: &str) -> Option<Arc<dyn Text>> {
        let mut kept = lock(&self.0);
        let index = kept.iter().position(|text| template(&**text) == source)?;
        let text = kept.remove(index)?;
        kept.push_back(Arc::clone(&text));
        Some(text)
    }

    /// Caches a text and evicts the least recently used.
    pub(super) fn keep(&self, text: &Arc<dyn Text>) {
        let mut kept = lock(&self.0);
        kept.retain(|other| template(&**other) != template(&**text));
        kept.push_back(Arc::clone(text));
        let mut bytes: usize = kept.iter().map(|text| template(&**text).len()).sum();
        while bytes > MAX_KEPT_BYTES
            && let Some(oldest) = kept.pop_front()
        {
            bytes -= template(&*oldest).len();
        }
    }
}

fn template(text: &dyn Text) -> &str {
    text.info().chat_template.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};
    use text::sandbox::TemplateSandbox;

    use super::*;

    fn model() -> Arc<dyn Text> {
        let directory = tempfile::tempdir().unwrap();
        let vocab: serde_json::Map<String, Value> =
            ('!'..='~').map(|token| (token.to_string(), json!(u32::from(token) - 33))).collect();
        let tokenizer = json!({
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "vocab": vocab, "merges": [] },
        });
        fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        fs::write(directory.path().join("config.json"), "{}").unwrap();
        fs::write(directory.path().join("chat_template.jinja"), "base").unwrap();
        let sandbox = Arc::new(TemplateSandbox::new("/nonexistent".into()));
        crate::text::load(directory.path(), &sandbox).unwrap().text
    }

    #[test]
    fn adapters_of_one_template_share_a_text() {
        let base = model();
        let own = base.with_chat_template(&"own".into());
        assert!(own.is_sandboxed() && !base.is_sandboxed());
        assert!(Arc::ptr_eq(&own, &base.with_chat_template(&"own".into())));
        assert!(!Arc::ptr_eq(&own, &base.with_chat_template(&"another".into())));
    }

    #[test]
    fn the_templates_that_are_kept_are_bounded_in_bytes() {
        let (base, kept) = (model(), OtherTemplates::default());
        let long = |index: usize| format!("{{# {} #}}{index}", "x".repeat(100 << 10));
        for index in 0..30 {
            kept.keep(&base.with_chat_template(&long(index).into()));
        }
        let bytes: usize = lock(&kept.0).iter().map(|text| template(&**text).len()).sum();
        assert!(bytes <= MAX_KEPT_BYTES && bytes > MAX_KEPT_BYTES / 2, "{bytes}");
        assert!(kept.get(&long(0)).is_none() && kept.get(&long(29)).is_some());
    }
}

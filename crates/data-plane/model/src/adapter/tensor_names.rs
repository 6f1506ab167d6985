//! Translates tensor names of adapter files to one spelling, that of transformers' text models.
//!
//! PEFT, PyTorch's wrappers, vision-language models and Tinker write different names for the same layer. A
//! name is translated only if it can mean just one layer of the base. The result of an adapter, and so its
//! version, does not depend on the spelling. Patterns of a configuration do: PEFT matches them against the
//! names of the trained model, so [`TensorNameScheme`] translates back.

use std::{borrow::Cow, collections::BTreeSet};

use crate::sources::hf_names::EMBEDDING;

/// Prefixes of layer names, possibly repeated: PEFT's wrapper, data parallelism, `torch.compile`.
const WRAPPERS: [&str; 3] = ["base_model.model.", "module.", "_orig_mod."];

/// Name parts without meaning: wrappers of layers and of saved modules, and PEFT's adapter name.
const TRANSPARENT: [&str; 6] = [
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "default",
    "modules_to_save",
    "token_adapter",
];

/// Prefix of `layers.N` and `embed_tokens` in transformers' text models.
const BODY: &str = "model.";

/// Prefixes of `layers.N` in other models: vision-language models, and models without head (`AutoModel`).
const BODIES: [&str; 7] = [
    BODY,
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "text_model.",
    "",
];

const HEAD: &str = "lm_head";

/// Names of the head in other models and in Tinker's exports.
const HEADS: [&str; 4] = [HEAD, "language_model.lm_head", "model.unembed_tokens", "unembed_tokens"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorName {
    /// Name in transformers' text models.
    pub(super) key: String,
    /// Original prefix in place of [`BODY`], or name in place of [`HEAD`]; `None` if neither was found.
    place: Option<NameLocation>,
}

/// The place of a tensor, with its original spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NameLocation {
    Body(&'static str),
    Head(&'static str),
}

impl TensorName {
    pub(super) fn read(written: &str) -> Self {
        let mut name = written;
        while let Some(rest) = WRAPPERS.iter().find_map(|wrapper| name.strip_prefix(wrapper)) {
            name = rest;
        }
        let parts: Vec<&str> = name.split('.').filter(|part| !TRANSPARENT.contains(part)).collect();
        let mut name = parts.join(".");
        if name.ends_with(".lora_magnitude_vector.weight") {
            name.truncate(name.len() - ".weight".len());
        }
        for body in BODIES {
            if let Some(rest) = name.strip_prefix(body).filter(|rest| is_of_body(rest)) {
                return Self { key: format!("{BODY}{rest}"), place: Some(NameLocation::Body(body)) };
            }
        }
        for head in HEADS {
            if let Some(rest) = name.strip_prefix(head).filter(|rest| rest.starts_with('.')) {
                return Self { key: format!("{HEAD}{rest}"), place: Some(NameLocation::Head(head)) };
            }
        }
        Self { key: name, place: None }
    }

    /// Whether the name belongs to a layer of a language model.
    pub(super) fn is_known(&self) -> bool {
        self.place.is_some()
    }
}

fn is_of_body(rest: &str) -> bool {
    let is_layer = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    rest.strip_prefix("layers.").is_some_and(is_layer) || rest.starts_with("embed_tokens.")
}

/// Difference of a file's names from those of transformers' text models, and the adapted kinds of layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TensorNameScheme {
    body: Option<&'static str>,
    head: Option<String>,
    /// Names of linear layers after their block number.
    kinds: BTreeSet<String>,
}

impl TensorNameScheme {
    /// Records a tensor of the file; false if prefix or head name differ from those of an earlier tensor.
    #[must_use]
    pub(super) fn add(&mut self, name: &TensorName) -> bool {
        self.kinds.extend(kind(&name.key).map(str::to_owned));
        match name.place {
            Some(NameLocation::Body(body)) => *self.body.get_or_insert(body) == body,
            Some(NameLocation::Head(head)) => *self.head.get_or_insert(head.to_owned()) == head,
            None => true,
        }
    }

    /// Records that the head's factors carry the name of the embedding layer.
    pub(super) fn head_is_at_embedding(&mut self) {
        self.head = Some(self.written(EMBEDDING).into_owned());
        self.kinds.insert(HEAD.to_owned());
    }

    /// Translates the layer name `module` of a text model to the spelling of the trained model.
    pub(super) fn written<'a>(&self, module: &'a str) -> Cow<'a, str> {
        match (module.strip_prefix(BODY), self.body, &self.head) {
            (Some(rest), Some(body), _) if body != BODY => Cow::Owned(format!("{body}{rest}")),
            (None, _, Some(head)) if module == HEAD => Cow::Owned(head.clone()),
            _ => Cow::Borrowed(module),
        }
    }

    /// Whether the file adapts linear layers like `module`, in any block.
    pub(super) fn has_kind_of(&self, module: &str) -> bool {
        let kind = in_block(module).unwrap_or(module);
        self.kinds.contains(kind)
    }

    /// Whether the embedding layer's name stands for the head.
    pub(super) fn is_head_at_embedding(&self) -> bool {
        self.head.as_deref() == Some(&*self.written(EMBEDDING))
    }
}

/// Returns the linear layer that the tensor `key` adapts, without its block number.
fn kind(key: &str) -> Option<&str> {
    let adapts =
        |part: &str| part.starts_with("lora_A") || part == "ia3_l" || part.starts_with("vera_lambda");
    let (module, _) = key.rsplit_once('.').and_then(|(module, part)| match part {
        "weight" => module.rsplit_once('.').filter(|(_, part)| adapts(part)),
        part => Some((module, part)).filter(|(_, part)| adapts(part)),
    })?;
    if module == HEAD { Some(module) } else { in_block(module) }
}

/// Returns the part of a name after the block number.
fn in_block(module: &str) -> Option<&str> {
    module.strip_prefix(BODY)?.strip_prefix("layers.")?.split_once('.').map(|(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q3: &str = "model.layers.3.self_attn.q_proj.lora_A.weight";

    #[test]
    fn one_layer_has_one_name_however_it_is_wrapped() {
        for written in [
            Q3,
            "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight",
            "base_model.model.base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight",
            "_orig_mod.base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight",
            "base_model.model._orig_mod.model.layers.3.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.3._orig_mod.self_attn.q_proj.lora_A.weight",
            "module.base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_A.weight",
            "base_model.model.language_model.model.layers.3.self_attn.q_proj.lora_A.weight",
            "base_model.model.layers.3.self_attn.q_proj.lora_A.weight",
        ] {
            let name = TensorName::read(written);
            assert_eq!((name.key.as_str(), name.is_known()), (Q3, true), "{written}");
        }
    }

    #[test]
    fn the_head_has_one_name_and_saved_modules_have_theirs() {
        for (written, key) in [
            ("base_model.model.lm_head.lora_A.weight", "lm_head.lora_A.weight"),
            ("base_model.model.model.unembed_tokens.lora_B.weight", "lm_head.lora_B.weight"),
            ("base_model.model.language_model.lm_head.lora_B.weight", "lm_head.lora_B.weight"),
            ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
            (
                "base_model.model.model.embed_tokens.lora_embedding_A.default",
                "model.embed_tokens.lora_embedding_A",
            ),
            (
                "base_model.model.layers.0.mlp.up_proj.lora_magnitude_vector.default.weight",
                "model.layers.0.mlp.up_proj.lora_magnitude_vector",
            ),
        ] {
            assert_eq!(TensorName::read(written).key, key, "{written}");
        }
    }

    #[test]
    fn a_name_that_may_mean_something_else_stays_as_it_is() {
        for written in [
            "model.visual.blocks.0.attn.qkv.lora_A.weight",
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.lora_A.weight",
            "model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
            "transformer.h.0.attn.c_attn.lora_A.weight",
            "base_model.vera_A",
            "prompt_embeddings",
        ] {
            let name = TensorName::read(written);
            assert_eq!((name.key.as_str(), name.is_known()), (written, false));
        }
    }

    #[test]
    fn patterns_are_matched_against_the_names_of_the_model_that_was_trained() {
        let mut spelling = TensorNameScheme::default();
        assert_eq!(spelling.written("model.layers.0.mlp.up_proj"), "model.layers.0.mlp.up_proj");
        for name in [
            "model.language_model.layers.3.self_attn.q_proj.lora_A.weight",
            "model.unembed_tokens.lora_A.weight",
        ] {
            assert!(spelling.add(&TensorName::read(name)));
        }
        assert_eq!(
            spelling.written("model.layers.0.mlp.up_proj"),
            "model.language_model.layers.0.mlp.up_proj"
        );
        assert_eq!(spelling.written("lm_head"), "model.unembed_tokens");
        assert!(spelling.has_kind_of("model.layers.0.self_attn.q_proj") && spelling.has_kind_of("lm_head"));
        assert!(!spelling.has_kind_of("model.layers.3.mlp.up_proj") && !spelling.has_kind_of(EMBEDDING));
        assert!(!spelling.add(&TensorName::read("layers.3.mlp.up_proj.lora_A.weight")), "another prefix");
    }
}

//! `modules_to_save` of a LoRA: trained copies of token embedding or head, without low-rank factors.

use super::{
    error::AdapterError,
    matrix::StoredMatrix,
    options::ConfigOptions,
    patterns::is_tail,
    stored_classification::HEADS,
    vocabulary::{EMBEDDING_MODULE, HEAD_MODULE},
    weight_file::WeightFile,
};
use crate::{
    shape::{config::ModelConfig, layout::tensor_shape, source::Target, source::TensorId},
    sources::hf_names::{EMBEDDING, module_name},
};

pub(super) const SAVED: &str = "modules_to_save";

/// Option that makes embedding and head of a base with tied weights share one saved copy.
const TIED: &str = "ensure_weight_tying";

const FACTORS: [&str; 4] = ["lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SavedModules {
    pub(super) embedding: bool,
    pub(super) head: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EmbeddingTying {
    Tied,
    Apart,
}

impl SavedModules {
    pub(super) fn from_options(
        options: &mut ConfigOptions<'_>,
        tying: EmbeddingTying,
    ) -> Result<Self, AdapterError> {
        let mut saved = Self::default();
        for name in options.list(SAVED)? {
            if is_tail(EMBEDDING, &name) {
                saved.embedding = true;
            } else if is_tail(&module_name(0, Target::LmHead), &name) {
                saved.head = true;
            } else {
                let named = name.escape_debug();
                let problem = format!(
                    "has `{named}`, but only {EMBEDDING_MODULE} and {HEAD_MODULE} can be saved beside a LoRA"
                );
                return Err(options.problem(SAVED, problem));
            }
        }
        // Without saved modules `refuse_the_rest` sees the option, because PEFT ties low-rank factors.
        if saved.is_any() && options.flag(TIED)? && tying == EmbeddingTying::Tied {
            saved = Self { embedding: true, head: true };
        }
        Ok(saved)
    }

    /// Checks the saved modules of a classifier, which has its head alone.
    pub(super) fn of_classifier(options: &mut ConfigOptions<'_>) -> Result<Self, AdapterError> {
        match options.list(SAVED)?.iter().find(|name| !HEADS.contains(&name.as_str())) {
            None => Ok(Self::default()),
            Some(name) => {
                let named = name.escape_debug();
                let problem = format!("has `{named}`, but a classifier can save only its head, `score`");
                Err(options.problem(SAVED, problem))
            }
        }
    }

    pub(super) fn is_any(self) -> bool {
        self.embedding || self.head
    }

    /// Returns the saved copies of embedding and head, `[vocab, hidden]`; a missing one is an error.
    pub(super) fn read<'a>(
        self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<[Option<StoredMatrix<'a>>; 2], AdapterError> {
        let (head, shape) = (module_name(0, Target::LmHead), tensor_shape(model, TensorId::TokenEmbedding));
        // Both tensors are taken before either is refused, so that neither is reported as unrequested.
        let embedding = self.embedding.then(|| copy(weights, EMBEDDING, shape));
        let head = self.head.then(|| copy(weights, &head, shape));
        Ok([embedding.transpose()?, head.transpose()?])
    }
}

fn copy<'a>(
    weights: &mut WeightFile<'a>,
    module: &str,
    shape: [usize; 2],
) -> Result<StoredMatrix<'a>, AdapterError> {
    let named = weights.required(&format!("{module}.weight"))?;
    if let Some(tensor) = FACTORS.iter().map(|part| format!("{module}.{part}")).find(|name| weights.has(name))
    {
        return Err(AdapterError::AdaptedCopy { path: weights.path().to_path_buf(), tensor });
    }
    weights.matrix(named, shape)
}

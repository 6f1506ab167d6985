//! `modules_to_save` of a LoRA: copies of the base's token embedding or head, trained whole beside it. PEFT adapts nothing that it saves.

use super::{
    error::AdapterError,
    matrix::StoredMatrix,
    options::ConfigOptions,
    patterns::is_tail,
    vocabulary::{EMBEDDING_MODULE, HEAD_MODULE},
    weight_file::WeightFile,
};
use crate::{
    shape::{config::ModelConfig, layout::tensor_shape, source::Target, source::TensorId},
    sources::hf_names::{EMBEDDING, module_name},
};

/// The option that names them.
pub(super) const SAVED: &str = "modules_to_save";

/// The option that has embedding and head of a base that ties them be one in the adapter too.
const TIED: &str = "ensure_weight_tying";

/// What the low-rank factors of a layer are called behind its name.
const FACTORS: [&str; 4] = ["lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B"];

/// What of the base an adapter has copies of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct SavedModules {
    pub(super) embedding: bool,
    pub(super) head: bool,
}

/// Whether embedding and head of a base are one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tying {
    Tied,
    Apart,
}

impl SavedModules {
    /// Takes the options, for a base of which embedding and head are tied or not.
    pub(super) fn from_options(options: &mut ConfigOptions<'_>, tying: Tying) -> Result<Self, AdapterError> {
        let mut saved = Self::default();
        for name in options.list(SAVED)? {
            if is_tail(EMBEDDING, &name) {
                saved.embedding = true;
            } else if is_tail(&module_name(0, Target::LmHead), &name) {
                saved.head = true;
            } else {
                let named = name.escape_debug();
                let problem = format!(
                    "names `{named}`, and only {EMBEDDING_MODULE} and {HEAD_MODULE} can be saved beside a LoRA"
                );
                return Err(options.problem(SAVED, problem));
            }
        }
        // What nothing is saved for is left to whoever refuses the rest: PEFT ties low-rank factors then.
        if saved.is_any() && options.flag(TIED)? && tying == Tying::Tied {
            saved = Self { embedding: true, head: true };
        }
        Ok(saved)
    }

    /// Whether there are any.
    pub(super) fn is_any(self) -> bool {
        self.embedding || self.head
    }

    /// The copies of embedding and head, `[vocab, hidden]`, which the file has to have.
    pub(super) fn read<'a>(
        self,
        weights: &mut WeightFile<'a>,
        model: &ModelConfig,
    ) -> Result<[Option<StoredMatrix<'a>>; 2], AdapterError> {
        let (head, shape) = (module_name(0, Target::LmHead), tensor_shape(model, TensorId::TokenEmbedding));
        // Both are taken before either is refused, so that of neither it is said that nothing asks for it.
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

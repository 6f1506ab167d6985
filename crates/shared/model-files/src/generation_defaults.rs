//! What a model's files say about sampling: the defaults of a request, and the tokens that end an answer.

use std::{
    io,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::{
    bounded_json,
    gguf::{GgufError, GgufFile},
    whole_file,
};

/// Bytes of `generation_config.json` and `config.json`.
const MAX_BYTES: u64 = 1 << 20;

/// Sampling as the model's makers recommend it. `None` where they say nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationDefaults {
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Only this many most probable tokens are drawn from; 0 means all.
    pub top_k: Option<u32>,
    /// Only the most probable tokens up to this sum of probabilities are drawn from.
    pub top_p: Option<f32>,
    /// Divides the logits of tokens that are there already.
    pub repetition_penalty: Option<f32>,
    /// Tokens that end an answer, sorted.
    pub eos_token_ids: Vec<u32>,
}

/// Why the defaults could not be read.
#[derive(Debug, thiserror::Error)]
pub enum GenerationDefaultsError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; make it readable or remove it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {source}; fetch the file again or remove it", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// The GGUF file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

/// One id or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum EosTokenIds {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Debug, Default, Deserialize)]
struct RawGenerationDefaults {
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    repetition_penalty: Option<f32>,
    eos_token_id: Option<EosTokenIds>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json` in a model directory; ids it lacks are taken from `config.json`.
    ///
    /// # Errors
    /// If one of the two is there but cannot be read. A directory with neither has no defaults.
    pub fn from_directory(directory: &Path) -> Result<Self, GenerationDefaultsError> {
        let generation = read(&directory.join("generation_config.json"))?;
        let eos = match generation.eos_token_id {
            Some(ids) => Some(ids),
            None => read(&directory.join("config.json"))?.eos_token_id,
        };
        Ok(Self {
            temperature: generation.temperature,
            top_k: generation.top_k,
            top_p: generation.top_p,
            repetition_penalty: generation.repetition_penalty,
            eos_token_ids: eos.map_or_else(Vec::new, |ids| match ids {
                EosTokenIds::One(id) => vec![id],
                EosTokenIds::Many(ids) => sorted(ids),
            }),
        })
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// # Errors
    /// If a value has another type than its key calls for.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, GenerationDefaultsError> {
        // End of text, of a turn, and of a message that calls a tool.
        let mut ids = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            ids.extend(file.u32(&format!("tokenizer.ggml.{key}"))?);
        }
        Ok(Self {
            temperature: file.f32("general.sampling.temp")?,
            top_k: file.u32("general.sampling.top_k")?,
            top_p: file.f32("general.sampling.top_p")?,
            repetition_penalty: file.f32("general.sampling.penalty_repeat")?,
            eos_token_ids: sorted(ids),
        })
    }
}

fn sorted(mut ids: Vec<u32>) -> Vec<u32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

fn read(path: &Path) -> Result<RawGenerationDefaults, GenerationDefaultsError> {
    let json = whole_file::read_if_there(path, MAX_BYTES)
        .map_err(|source| GenerationDefaultsError::Read { path: path.to_path_buf(), source })?;
    json.map_or_else(
        || Ok(RawGenerationDefaults::default()),
        |json| {
            bounded_json::parse(&json)
                .map_err(|source| GenerationDefaultsError::Json { path: path.to_path_buf(), source })
        },
    )
}

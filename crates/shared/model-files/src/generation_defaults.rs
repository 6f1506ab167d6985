//! Reads sampling defaults and end-of-sequence tokens from a model's files.

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

/// Maximum bytes of `generation_config.json` and `config.json`.
const MAX_BYTES: u64 = 1 << 20;

/// Sampling defaults of the model's makers; `None` where the files set none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationDefaults {
    /// Divisor of all logits.
    pub temperature: Option<f32>,
    /// Number of most probable tokens that sampling considers; 0 means all.
    pub top_k: Option<u32>,
    /// Sum of probabilities up to which sampling considers the most probable tokens.
    pub top_p: Option<f32>,
    /// Repetition penalty on the logits of tokens that already occur.
    pub repetition_penalty: Option<f32>,
    /// Tokens that end an answer, sorted.
    pub eos_token_ids: Vec<u32>,
}

/// Error while reading the sampling defaults.
#[derive(Debug, thiserror::Error)]
pub enum GenerationDefaultsError {
    /// A file could not be read.
    #[error("cannot read {}: {source}; make it readable or remove it", path.display())]
    Read {
        /// Path of the file concerned.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is not valid JSON of the expected form.
    #[error("{}: {source}; fetch the file again or remove it", path.display())]
    Json {
        /// Path of the file concerned.
        path: PathBuf,
        /// Defect that was found in the file.
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

//! Targets of the gateway: request bodies, and the key file.

use std::{fs, path::Path};

use gateway::{
    anthropic::request::MessagesBody,
    keys::Keys,
    limits::RequestsPerMinute,
    ollama::{
        embeddings::texts,
        request::{ChatBody, GenerateBody},
    },
    openai::{
        adapters::{PinRequest, UnloadRequest},
        chat, classify,
        completions::{self, PromptField},
        embeddings,
        errors::ApiError,
        load_request::read_load,
        params::ParamLimits,
        receipts::read_receipt,
        responses::request,
        scoring::body::ScoringInput,
        tokens::{DetokenizeBody, TokenizeBody},
    },
    training::records::JobSpec,
};
use model_files::generation_defaults::GenerationDefaults;

use crate::Outcome;

const VOCAB_SIZE: u32 = 32_000;

/// Reads a body with the limits of a small model.
fn read<T>(read: impl Fn(&ParamLimits<'_>) -> Result<T, ApiError>) -> Outcome {
    let defaults = GenerationDefaults::default();
    let limits = ParamLimits { vocab_size: VOCAB_SIZE, default_seed: 1, defaults: &defaults };
    outcome(read(&limits))
}

fn outcome<T>(read: Result<T, ApiError>) -> Outcome {
    read.map(drop).map_err(|error| format!("{error:?}"))
}

pub(crate) fn completion(input: &[u8]) -> Outcome {
    read(|limits| completions::CompletionBody::read(input, limits))
}

pub(crate) fn chat(input: &[u8]) -> Outcome {
    read(|limits| chat::ChatCompletionBody::read(input, limits))
}

pub(crate) fn response(input: &[u8]) -> Outcome {
    read(|limits| request::ResponsesBody::read(input, limits))
}

pub(crate) fn message(input: &[u8]) -> Outcome {
    read(|limits| MessagesBody::read(input, limits))
}

pub(crate) fn ollama_chat(input: &[u8]) -> Outcome {
    read(|limits| ChatBody::read(input, limits))
}

pub(crate) fn ollama_generate(input: &[u8]) -> Outcome {
    read(|limits| GenerateBody::read(input, limits))
}

pub(crate) fn embedding(input: &[u8]) -> Outcome {
    outcome(embeddings::EmbeddingsBody::read(input))
}

pub(crate) fn score(input: &[u8]) -> Outcome {
    outcome(ScoringInput::read_score(input))
}

pub(crate) fn rerank(input: &[u8]) -> Outcome {
    outcome(ScoringInput::read_rerank(input))
}

pub(crate) fn classify(input: &[u8]) -> Outcome {
    outcome(classify::ClassifyBody::read(input))
}

pub(crate) fn ollama_embed(input: &[u8]) -> Outcome {
    outcome(texts(input, PromptField { field: "input", most: 8 }))
}

pub(crate) fn load_adapter(input: &[u8]) -> Outcome {
    outcome(read_load(input, "base"))
}

pub(crate) fn unload_adapter(input: &[u8]) -> Outcome {
    outcome(UnloadRequest::read(input))
}

pub(crate) fn pin_adapter(input: &[u8]) -> Outcome {
    outcome(PinRequest::read(input))
}

pub(crate) fn fine_tuning_job(input: &[u8]) -> Outcome {
    outcome(JobSpec::read(input))
}

pub(crate) fn tokenize(input: &[u8]) -> Outcome {
    outcome(TokenizeBody::read(input))
}

pub(crate) fn detokenize(input: &[u8]) -> Outcome {
    outcome(DetokenizeBody::read(input, VOCAB_SIZE))
}

pub(crate) fn receipt(input: &[u8]) -> Outcome {
    outcome(read_receipt(input))
}

pub(crate) fn key_file(input: &[u8]) -> Outcome {
    let folder = crate::targets::folder(&[("keys", input)]);
    let path: &Path = &folder.path().join("keys");
    debug_assert!(fs::exists(path).unwrap_or(false));
    Keys::read(path, RequestsPerMinute::default()).map(drop).map_err(|error| error.to_string())
}

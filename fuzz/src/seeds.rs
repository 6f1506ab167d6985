//! Inputs with the shapes of published attacks, and valid files from which mutations start.

mod adapter;
mod api_bodies;
mod command;
mod fleet;
mod forms;
mod gguf;
mod http;
mod layers;
mod model;
mod receipt;
mod store;
mod structure;
mod template;
mod tokenizer;
mod training;
mod wire;
mod worker;

/// Expected outcome of a seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// The seed is a valid input.
    Accepted,
    /// A typed error whose message contains this text.
    Refused(&'static str),
    /// Any outcome within the bounds of time and memory.
    Bounded,
}

/// An input with its expected outcome.
#[derive(Debug, Clone)]
pub struct Seed {
    /// Name of the target that reads the seed.
    pub target: &'static str,
    /// Short description of the seed.
    pub name: &'static str,
    /// Attack class or CVE record: a row of the table of published attacks, or the source of the finding.
    pub class: &'static str,
    /// Bytes of the input.
    pub bytes: Vec<u8>,
    /// Expected outcome of the target.
    pub expected: Expected,
}

impl Seed {
    /// True for short seeds whose mutations are known to be bounded too.
    #[must_use]
    pub fn may_be_mutated(&self) -> bool {
        self.bytes.len() < 1 << 14 && self.class != template::REPETITION
    }
}

struct Maker {
    target: &'static str,
    seeds: Vec<Seed>,
}

impl Maker {
    fn new(target: &'static str) -> Self {
        Self { target, seeds: Vec::new() }
    }

    fn valid(&mut self, name: &'static str, bytes: Vec<u8>) {
        self.add(name, "valid", bytes, Expected::Accepted);
    }

    fn refused(&mut self, name: &'static str, class: &'static str, bytes: Vec<u8>, why: &'static str) {
        self.add(name, class, bytes, Expected::Refused(why));
    }

    fn bounded(&mut self, name: &'static str, class: &'static str, bytes: Vec<u8>) {
        self.add(name, class, bytes, Expected::Bounded);
    }

    fn add(&mut self, name: &'static str, class: &'static str, bytes: Vec<u8>, expected: Expected) {
        self.seeds.push(Seed { target: self.target, name, class, bytes, expected });
    }
}

/// Builds a GGUF file with a byte-level vocabulary: `tokens`, their `merges`, and the pre-tokenizer.
#[must_use]
pub fn byte_level(tokens: &[String], merges: &[String], pre: &str) -> Vec<u8> {
    gguf::byte_level(tokens, merges, pre)
}

/// Builds a GGUF file with a vocabulary of bytes and the special tokens of ChatML.
#[must_use]
pub(crate) fn chat_vocabulary() -> Vec<u8> {
    gguf::chat_vocabulary()
}

/// Returns the seeds of `target`. Seeds are generated, not stored, because some have megabytes.
#[must_use]
pub fn of(target: &str) -> Vec<Seed> {
    match target {
        "gguf" => gguf::files(),
        "gguf_tokenizer" => gguf::tokenizers(),
        "gguf_adapter" => gguf::adapters(),
        "peft" => adapter::peft(),
        "directory" => model::directories(),
        "tokenizer_json" => tokenizer::jsons(),
        "template" => template::templates(),
        "to_executor" => wire::to_executor(),
        "to_gateway" => wire::to_gateway(),
        "worker_message" => worker::messages(),
        "adapter_image" => worker::images(),
        "completion" => http::completions(),
        "chat" => http::chats(),
        "response" => api_bodies::responses(),
        "message" => api_bodies::messages(),
        "ollama_chat" => api_bodies::ollama_chats(),
        "embedding" => api_bodies::embeddings(),
        "score" => api_bodies::scores(),
        "rerank" => api_bodies::rerankings(),
        "classify" => api_bodies::classifications(),
        "ollama_embed" => api_bodies::ollama_embeds(),
        "ollama_generate" => api_bodies::ollama_prompts(),
        "grammar" => forms::grammars(),
        "grammar_structure" => structure::seeds(),
        "tool_calls" => forms::tool_calls(),
        "load_adapter" => http::loads(),
        "unload_adapter" => http::unloads(),
        "pin_adapter" => http::pins(),
        "fine_tuning_job" => http::jobs(),
        "tokenize" => http::tokenizations(),
        "detokenize" => http::detokenizations(),
        "receipt" => receipt::bodies(),
        "deployment_file" => command::deployment_files(),
        "events" => command::events(),
        "key_file" => http::key_files(),
        "layer_call" => layers::calls(),
        "layer_reply" => layers::replies(),
        "to_layers" => layers::to_layers(),
        "from_layers" => layers::from_layers(),
        "zmtp" => layers::zmtp(),
        "channel" => layers::channels(),
        "training_data" => training::files(),
        "picker_body" => fleet::bodies(),
        "picker_messages" => fleet::messages(),
        "host_report" => fleet::reports(),
        "kv_store" => store::files(),
        _ => Vec::new(),
    }
}

/// Returns every seed, target by target.
pub fn all() -> impl Iterator<Item = Seed> {
    crate::TARGETS.iter().flat_map(|target| of(target.name))
}

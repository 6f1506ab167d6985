//! Hostile input for every parser of untrusted data.
//!
//! A *target* is a function from bytes to an [`Outcome`]: accepted, or refused with a typed error's message.
//! For any bytes it must not panic, take no longer than a second, and never hold more memory than its
//! [`Target::budget`]. A *seed* is an input with the shape of a published attack (or a valid file from which
//! mutations start), made by readable code, together with the expected outcome.
//!
//! # Layout
//! - `targets`, `http`, `command`, `layers`, `training`, `store`, `fleet`, `forms`: one function for each
//!   parser
//! - `structure`: schemas and grammars that are changed part by part, judged by `validator`
//! - [`seeds`]: the published shapes, by target
//! - [`mutate`]: deterministic mutations, so that CI explores too
//! - [`parts`]: several files in one input
//! - [`guide`]: the table in `docs/guides/bad-input.md`
//!
//! [`for_each_target`] lists the targets. `coverage/` is the program for cargo-fuzz (`scripts/fuzz`), one for
//! all targets; its findings go to `corpus/TARGET/`.
#![forbid(unsafe_code)]

mod command;
mod fleet;
mod forms;
pub mod guide;
mod http;
mod layers;
pub mod mutate;
pub mod parts;
pub mod seeds;
mod store;
mod structure;
mod targets;
mod training;
mod validator;

/// Result of a target; `Err` is the message of the typed error that refused the input.
pub type Outcome = Result<(), String>;

/// A parser under test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target, also in `corpus/` and for cargo-fuzz.
    pub name: &'static str,
    /// Description of the input.
    pub reads: &'static str,
    /// Function that parses the input.
    pub run: fn(&[u8]) -> Outcome,
    /// Allowed memory in bytes per byte of input, in addition to [`FIXED_BYTES`].
    pub bytes_per_byte: usize,
}

/// Memory in bytes that every target may hold for input of any length.
pub const FIXED_BYTES: usize = 16 << 20;

/// Replaces [`FIXED_BYTES`] for tokenizers: memory of a backtracking expression until it is stopped.
const STEPS_BYTES: usize = 128 << 20;

/// Bytes per byte of input for parsers that keep the input unchanged.
const PLAIN: usize = 8;
/// Bytes per byte of input for tokenizers, which keep each token in several tables; the `tokenizers` crate
/// takes maps of strings. Tokenizers are read once, at start, from a file of the operator.
const TABLES: usize = 64;
/// Bytes per byte of input for request bodies, which become a tree of JSON values; `[0,0,...]` grows the
/// most. The gateway bounds their number.
const BODY: usize = 64;

/// Bytes per byte of input for training data. A line is tokenized before its length is checked, and the
/// `tokenizers` crate keeps each token's text and offsets.
const SPLIT: usize = 256;

/// Bytes per byte of input for grammars, whose compilation is bounded in steps; [`COMPILED_BYTES`] covers
/// these.
const COMPILED: usize = 128;

const COMPILED_BYTES: usize = 64 << 20;

/// Bytes per byte of input for grammars that only the compiler process has the memory for; see
/// [`LIMITED_BYTES`].
const LIMITED: usize = 512;

/// Replaces [`FIXED_BYTES`] for those grammars.
const LIMITED_BYTES: usize = text::sandbox::MEMORY_BYTES as usize;

impl Target {
    /// Returns the maximum bytes that this target may hold at any time for `input`, without the input.
    #[must_use]
    pub fn budget(&self, input: &[u8]) -> usize {
        let fixed = match self.bytes_per_byte {
            TABLES => STEPS_BYTES,
            COMPILED => COMPILED_BYTES,
            LIMITED => LIMITED_BYTES,
            _ => FIXED_BYTES,
        };
        input.len().saturating_mul(self.bytes_per_byte).saturating_add(fixed)
    }
}

/// Passes the list of all targets to the macro `$each`: name, description, function, and allowed bytes per
/// byte of input. There is no other list.
#[macro_export]
macro_rules! for_each_target {
    ($each:ident) => {
        $each! {
            gguf: "GGUF header and tensors", targets::gguf, PLAIN;
            gguf_tokenizer: "the tokenizer in a GGUF file", targets::gguf_tokenizer, TABLES;
            gguf_adapter: "an adapter in a GGUF file", targets::gguf_adapter, PLAIN;
            peft: "adapter_config.json and its safetensors", targets::peft, PLAIN;
            directory: "config.json, the index and safetensors of a model", targets::directory, PLAIN;
            tokenizer_json: "tokenizer.json, its configuration, and a text", targets::tokenizer_json, TABLES;
            template: "a chat template and messages", targets::template, PLAIN;
            to_executor: "a message to the executor", targets::to_executor, PLAIN;
            to_gateway: "a message to the gateway", targets::to_gateway, PLAIN;
            worker_message: "a message between executor and worker", targets::worker_message, PLAIN;
            adapter_image: "an adapter in shared memory", targets::adapter_image, PLAIN;
            completion: "the body of a completion", http::completion, BODY;
            chat: "the body of a chat", http::chat, BODY;
            response: "the body of a response", http::response, BODY;
            message: "the body of /v1/messages", http::message, BODY;
            ollama_chat: "the body of /api/chat", http::ollama_chat, BODY;
            embedding: "the body of /v1/embeddings", http::embedding, BODY;
            score: "the body of /v1/score", http::score, BODY;
            rerank: "the body of /v1/rerank", http::rerank, BODY;
            classify: "the body of /v1/classify", http::classify, BODY;
            ollama_embed: "the body of /api/embed", http::ollama_embed, BODY;
            ollama_generate: "the body of /api/generate", http::ollama_generate, BODY;
            grammar: "what an answer has to look like: a schema, an expression, a grammar", forms::grammar, COMPILED;
            grammar_structure: "a schema, an expression or a grammar that is changed part by part, and answers of it", structure::structure, LIMITED;
            tool_calls: "an answer, in which thoughts and calls of tools are looked for", forms::tool_calls, PLAIN;
            load_adapter: "the body of /v1/load_lora_adapter", http::load_adapter, BODY;
            unload_adapter: "the body of /v1/unload_lora_adapter", http::unload_adapter, BODY;
            pin_adapter: "the body of /v1/pin_lora_adapter", http::pin_adapter, BODY;
            fine_tuning_job: "the body of /v1/fine_tuning/jobs", http::fine_tuning_job, BODY;
            tokenize: "the body of /tokenize", http::tokenize, BODY;
            detokenize: "the body of /detokenize", http::detokenize, BODY;
            receipt: "the body of /v1/receipts/verify", http::receipt, BODY;
            deployment_file: "the deployment file", command::deployment_file, BODY;
            events: "an answer's events, as the command reads them", command::events, PLAIN;
            key_file: "the gateway's file of API keys", http::key_file, PLAIN;
            layer_call: "the header of a layer call", layers::call, PLAIN;
            layer_reply: "the header of its reply", layers::reply, PLAIN;
            to_layers: "a control message of a split client", layers::to_layers, PLAIN;
            from_layers: "a control message to a split client, or a catalog", layers::from_layers, PLAIN;
            zmtp: "ZeroMQ's wire protocol, as a client sends it", layers::zmtp, PLAIN;
            channel: "the region that a split client may write", layers::channel, PLAIN;
            training_data: "a file of training data", training::data, SPLIT;
            picker_body: "a request's body, as the endpoint picker reads it", fleet::body, PLAIN;
            picker_messages: "what Envoy says to the endpoint picker", fleet::messages, BODY;
            host_report: "what a gateway says of itself to the endpoint picker", fleet::report, BODY;
            kv_store: "a file of KV blocks", store::file, PLAIN;
        }
    };
}

macro_rules! table {
    ($($name:ident: $reads:literal, $run:path, $bytes_per_byte:expr;)*) => {
        /// All targets in order.
        pub const TARGETS: &[Target] = &[$(Target {
            name: stringify!($name),
            reads: $reads,
            run: $run,
            bytes_per_byte: $bytes_per_byte,
        }),*];
    };
}
for_each_target!(table);

/// Returns the target called `name`.
///
/// # Panics
/// If there is no such target, since names are constants in code.
#[must_use]
pub fn named(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("no target is called {name}"))
}

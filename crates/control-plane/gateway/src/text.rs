//! Conversion between text and token ids.
//!
//! [`Text`] is the interface to a model's tokenizer and chat template; [`ModelText`] implements it from a
//! model's files. Tests use a smaller implementation.

mod other_templates;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use model_files::{
    generation_defaults::{GenerationDefaults, GenerationDefaultsError},
    gguf::{GgufError, GgufFile},
    model_files::{FindError, ModelFiles},
    model_summary::ModelSummary,
    text_hash::{TextHash, TextHashError},
};
use serde_json::{Map, Value, json};
use text::{
    chat::{Chat, ChatError},
    chat_template::{ChatTemplate, GenerationPrompt, Limits, RenderTemplate, TemplateError},
    detokenize::{Detokenizer, TextStart},
    grammar::Tokens,
    history::{self, SystemMessages},
    pair_template::{PairTemplate, QueryAndDocument},
    sandbox::{SandboxedTemplate, TemplateSandbox},
    tokenizer::{AddSpecial, EncodeError, ParseSpecial, SkipSpecial, Tokenizer, TokenizerError},
};

use self::other_templates::OtherTemplates;
use crate::thread::ThreadError;

/// Maximum number of attempts to read a model's text while its files change.
const MAX_READS: usize = 3;

#[derive(Debug, Clone, Default)]
pub struct TextInfo {
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub pad_token: Option<String>,
    /// Source of the chat template.
    pub chat_template: Option<String>,
    /// Sampling defaults of the model.
    pub defaults: GenerationDefaults,
    pub description: ModelSummary,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: &'static str,
    pub content: String,
    /// Reasoning content of an assistant message; the template decides whether the model sees it.
    pub reasoning: Option<String>,
    /// Tool calls of an assistant message, in the form that templates take.
    pub calls: Vec<Value>,
    /// Call that a tool message answers.
    pub answers: Option<AnsweredCall>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnsweredCall {
    pub id: String,
    /// Name of the called function, if known.
    pub name: Option<String>,
}

impl ChatMessage {
    /// True if the message has reasoning content and nothing else.
    #[must_use]
    pub(crate) fn only_thinks(&self) -> bool {
        self.reasoning.is_some() && self.content.is_empty() && self.calls.is_empty()
    }

    /// Returns the message in the form that templates take, without absent fields.
    fn value(&self) -> Value {
        let mut value = json!({ "role": self.role, "content": self.content });
        if !self.calls.is_empty() {
            value["tool_calls"] = self.calls.clone().into();
        }
        if let Some(reasoning) = &self.reasoning {
            value["reasoning_content"] = reasoning.as_str().into();
        }
        if let Some(AnsweredCall { id, name }) = &self.answers {
            value["tool_call_id"] = id.as_str().into();
            if let Some(name) = name {
                value["name"] = name.as_str().into();
            }
        }
        value
    }
}

#[derive(Debug, Clone)]
pub struct TemplateOptions {
    /// Definitions of the tools that the model may call.
    pub tools: Vec<Value>,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// Where the prompt ends.
    pub prompt: GenerationPrompt,
}

impl Default for TemplateOptions {
    /// Returns options that end the prompt where the assistant's turn begins.
    fn default() -> Self {
        Self { tools: Vec::new(), variables: Map::new(), prompt: GenerationPrompt::Add }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("this model has no chat template; use /v1/completions with a prompt of your own")]
    NoTemplate,
    /// The template cannot render the conversation.
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// Why a model's tokenizer and template cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The model's files are missing.
    #[error(transparent)]
    Open(#[from] FindError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A directory without tokenizer, which suffices only for an executor that generates weights from a seed.
    #[error("there is no tokenizer.json in {}; add the tokenizer.json and tokenizer_config.json of the \
             model", path.display())]
    NoTokenizer { path: PathBuf },
    /// The tokenizer is missing or unusable.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Defaults(#[from] GenerationDefaultsError),
    /// The files cannot be hashed.
    #[error(transparent)]
    Text(#[from] TextHashError),
    /// The files changed during each attempt to read them.
    #[error("the files of {} changed while its tokenizer was read; start again when they are \
             complete", path.display())]
    Changing { path: PathBuf },
    #[error("reading the model's tokenizer failed: {0}; see the log")]
    Stopped(String),
}

impl From<ThreadError> for LoadError {
    fn from(error: ThreadError) -> Self {
        Self::Stopped(error.to_string())
    }
}

/// Converts the tokens of one sequence to text as they arrive; never splits a character.
pub trait Decoder: Send {
    /// Returns the text that `token` completes; may be empty.
    fn push(&mut self, token: u32) -> &str;
    /// Returns the rest after the last token.
    fn finish(&mut self) -> &str;
    /// Returns a copy whose later tokens do not affect this decoder.
    fn fork(&self) -> Box<dyn Decoder>;
}

/// A model's tokenizer and chat template.
pub trait Text: fmt::Debug + Send + Sync {
    /// Converts text to token ids; names of special tokens become those tokens.
    fn encode(&self, text: &str, add: AddSpecial) -> Result<Vec<u32>, TextError>;
    /// Converts token ids to text, with the names of special tokens.
    fn decode(&self, tokens: &[u32]) -> String;
    /// Returns a token's bytes: the name of a special token, nothing for an unknown token.
    fn token_bytes(&self, token: u32) -> &[u8];
    /// Returns a decoder for one sequence; of special tokens, only those in `shown` become text.
    fn decoder(&self, start: TextStart, shown: &[&str]) -> Box<dyn Decoder>;
    fn special_token(&self, name: &str) -> Option<u32>;
    /// Renders a conversation with the chat template and encodes it.
    fn encode_chat(&self, messages: &[ChatMessage], showing: &TemplateOptions)
    -> Result<Vec<u32>, TextError>;
    /// Fills a reranker's prompt and encodes it; names of special tokens in `values` stay text.
    fn encode_pair(
        &self,
        template: &PairTemplate,
        values: &QueryAndDocument<'_>,
    ) -> Result<Vec<u32>, TextError>;
    /// Returns the vocabulary for compiling grammars.
    fn tokens(&self) -> Tokens;
    fn info(&self) -> &TextInfo;
    /// Returns the tokenizer with another chat template, which a helper process compiles and renders.
    fn with_chat_template(&self, source: &Arc<str>) -> Arc<dyn Text>;
    /// Compiles another chat template in a helper process. Blocks.
    ///
    /// # Errors
    /// The template cannot be compiled.
    fn check_chat_template(&self, source: &Arc<str>) -> Result<(), TemplateError>;
    /// Whether a helper process renders the chat template, so that [`Text::encode_chat`] blocks.
    fn is_sandboxed(&self) -> bool;
}

/// Tokenizer and chat template from a model's files.
#[derive(Debug)]
pub(crate) struct ModelText {
    tokenizer: Arc<Tokenizer>,
    template: Option<ModelTemplate>,
    /// Renders adapters' chat templates.
    sandbox: Arc<TemplateSandbox>,
    /// The texts with adapters' chat templates.
    others: OtherTemplates,
    info: TextInfo,
}

#[derive(Debug)]
struct ModelTemplate {
    template: Box<dyn RenderTemplate>,
    is_sandboxed: bool,
    /// How the template treats system messages, which its first use finds out.
    systems: OnceLock<SystemMessages>,
}

impl ModelTemplate {
    /// Wraps the model's own template, which comes from the operator.
    fn own(template: ChatTemplate) -> Self {
        Self { template: Box::new(template), is_sandboxed: false, systems: OnceLock::new() }
    }

    /// Wraps an adapter's template.
    fn of_adapter(template: SandboxedTemplate) -> Self {
        Self { template: Box::new(template), is_sandboxed: true, systems: OnceLock::new() }
    }

    fn systems(&self) -> Result<SystemMessages, TemplateError> {
        if let Some(known) = self.systems.get() {
            return Ok(*known);
        }
        let found = SystemMessages::of(&*self.template)?;
        Ok(*self.systems.get_or_init(|| found))
    }
}

#[derive(Debug, Clone)]
pub struct LoadedText {
    pub text: Arc<dyn Text>,
    /// Hash of the text files; executors compute the same hash.
    pub hash: TextHash,
}

/// Loads the tokenizer and chat template of the model at `path`; `sandbox` renders other templates.
pub fn load(path: &Path, sandbox: &Arc<TemplateSandbox>) -> Result<LoadedText, LoadError> {
    for _ in 0..MAX_READS {
        let files = ModelFiles::text_at(path)?;
        let hash = TextHash::of(&files)?;
        let text = load_once(files, sandbox)?;
        // The files may have been replaced during the read.
        if TextHash::of(&ModelFiles::text_at(path)?)? == hash {
            return Ok(LoadedText { text, hash });
        }
    }
    Err(LoadError::Changing { path: path.to_owned() })
}

fn load_once(files: ModelFiles, sandbox: &Arc<TemplateSandbox>) -> Result<Arc<dyn Text>, LoadError> {
    let (tokenizer, defaults, description) = read(files)?;
    let tokens = tokenizer.template_tokens();
    let info = TextInfo {
        end_tokens: tokenizer.stop_tokens().to_vec(),
        bos_token: tokens.bos.clone(),
        eos_token: tokens.eos.clone(),
        pad_token: tokens.pad.clone(),
        chat_template: tokenizer.chat_template().map(str::to_owned),
        defaults,
        description,
    };
    let template = info.chat_template.as_deref();
    let template = template.map(|source| ChatTemplate::new(source, tokens, Limits::default())).transpose();
    let template = template.unwrap_or_else(|error| {
        // Completions need no template, so a bad template disables only chat.
        tracing::error!(%error, "the chat template is not usable; the model is served without chat");
        None
    });
    let (tokenizer, sandbox) = (Arc::new(tokenizer), Arc::clone(sandbox));
    let template = template.map(ModelTemplate::own);
    Ok(Arc::new(ModelText { tokenizer, template, sandbox, others: OtherTemplates::default(), info }))
}

fn read(files: ModelFiles) -> Result<(Tokenizer, GenerationDefaults, ModelSummary), LoadError> {
    Ok(match files {
        ModelFiles::Gguf(path) => {
            let file = GgufFile::open(&path)?;
            let defaults = GenerationDefaults::from_gguf(&file)?;
            (Tokenizer::from_gguf(&file)?, defaults, ModelSummary::from_gguf(&file))
        }
        ModelFiles::Directory(path) if !path.join("tokenizer.json").exists() => {
            return Err(LoadError::NoTokenizer { path });
        }
        ModelFiles::Directory(path) => {
            let defaults = GenerationDefaults::from_directory(&path)?;
            (Tokenizer::from_directory(&path)?, defaults, ModelSummary::from_directory(&path))
        }
    })
}

impl Text for ModelText {
    fn encode(&self, text: &str, add: AddSpecial) -> Result<Vec<u32>, TextError> {
        Ok(self.tokenizer.encode(text, add, ParseSpecial::Yes)?)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens, SkipSpecial::No)
    }

    fn token_bytes(&self, token: u32) -> &[u8] {
        self.tokenizer.token_bytes(token).unwrap_or_default()
    }

    fn decoder(&self, start: TextStart, shown: &[&str]) -> Box<dyn Decoder> {
        let decoder = Detokenizer::new(Arc::clone(&self.tokenizer), SkipSpecial::Yes, start);
        Box::new(decoder.showing(shown))
    }

    fn special_token(&self, name: &str) -> Option<u32> {
        self.tokenizer.token_id(name).filter(|token| self.tokenizer.is_special(*token))
    }

    fn encode_chat(
        &self,
        messages: &[ChatMessage],
        showing: &TemplateOptions,
    ) -> Result<Vec<u32>, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let chat = Chat::new(&self.tokenizer, &*template.template, SystemTime::now());
        let messages = messages.iter().map(ChatMessage::value).collect();
        let mut messages = template.systems().map_err(ChatError::from)?.prepared(messages)?;
        let source = self.info.chat_template.as_deref().unwrap_or_default();
        history::name_reasoning(source, &mut messages);
        let mut variables = showing.variables.clone();
        if !showing.tools.is_empty() {
            variables.insert("tools".to_owned(), showing.tools.clone().into());
        }
        let encode = |messages: &[Value]| chat.encode_values(messages, &variables, showing.prompt);
        Ok(history::shown(&mut messages, encode)?)
    }

    fn encode_pair(
        &self,
        template: &PairTemplate,
        values: &QueryAndDocument<'_>,
    ) -> Result<Vec<u32>, TextError> {
        Ok(template.encode(values, &self.tokenizer)?)
    }

    fn tokens(&self) -> Tokens {
        Tokens::of(&self.tokenizer)
    }

    fn info(&self) -> &TextInfo {
        &self.info
    }

    fn with_chat_template(&self, source: &Arc<str>) -> Arc<dyn Text> {
        if let Some(kept) = self.others.get(source) {
            return kept;
        }
        let text: Arc<dyn Text> = Arc::new(Self {
            tokenizer: Arc::clone(&self.tokenizer),
            template: Some(ModelTemplate::of_adapter(self.sandboxed(source))),
            sandbox: Arc::clone(&self.sandbox),
            others: OtherTemplates::default(),
            info: TextInfo { chat_template: Some(source.to_string()), ..self.info.clone() },
        });
        self.others.keep(&text);
        text
    }

    fn check_chat_template(&self, source: &Arc<str>) -> Result<(), TemplateError> {
        self.sandboxed(source).check()
    }

    fn is_sandboxed(&self) -> bool {
        self.template.as_ref().is_some_and(|template| template.is_sandboxed)
    }
}

impl ModelText {
    fn sandboxed(&self, source: &Arc<str>) -> SandboxedTemplate {
        let (sandbox, source) = (Arc::clone(&self.sandbox), Arc::clone(source));
        SandboxedTemplate::new(sandbox, source, self.tokenizer.template_tokens())
    }
}

impl Decoder for Detokenizer {
    fn push(&mut self, token: u32) -> &str {
        Self::push(self, token)
    }

    fn finish(&mut self) -> &str {
        Self::finish(self)
    }

    fn fork(&self) -> Box<dyn Decoder> {
        Box::new(self.clone())
    }
}

//! Text on one side, token ids on the other.
//!
//! [`Text`] is what the gateway asks of a model's tokenizer and chat template; [`ModelText`] is the one that a
//! model's files describe. Tests bring a smaller one.

mod history;
mod other_templates;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
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
    chat_template::{ChatTemplate, GenerationPrompt, Limits, TemplateError},
    detokenize::{Detokenizer, TextStart},
    grammar::Tokens,
    tokenizer::{AddSpecial, EncodeError, ParseSpecial, SkipSpecial, Tokenizer, TokenizerError},
};

use self::{history::SystemMessages, other_templates::OtherTemplates};
use crate::thread::ThreadError;

/// How often a model's text is read if its files change meanwhile.
const MAX_READS: usize = 3;

/// What a model's files say about its text.
#[derive(Debug, Clone, Default)]
pub struct TextFacts {
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
    /// Beginning-of-sequence token as text.
    pub bos_token: Option<String>,
    /// End-of-sequence token as text.
    pub eos_token: Option<String>,
    /// Padding token as text.
    pub pad_token: Option<String>,
    /// The chat template's source.
    pub chat_template: Option<String>,
    /// The model's own sampling options.
    pub defaults: GenerationDefaults,
    /// What its files call it.
    pub description: ModelSummary,
}

/// One message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: &'static str,
    /// Its text.
    pub content: String,
    /// What an assistant thought before it, if that is known: templates say whether the model is shown it.
    pub reasoning: Option<String>,
    /// Tools that an assistant has called, as templates take them.
    pub calls: Vec<Value>,
    /// What a tool's message answers.
    pub answers: Option<AnsweredCall>,
}

/// The call that a tool's message answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnsweredCall {
    /// Its number.
    pub id: String,
    /// The function that was called, if that is known.
    pub name: Option<String>,
}

impl ChatMessage {
    /// Whether it is a thought, and nothing was said yet.
    #[must_use]
    pub fn only_thinks(&self) -> bool {
        self.reasoning.is_some() && self.content.is_empty() && self.calls.is_empty()
    }

    /// As templates take it: what there is not is no field.
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

/// How a conversation is shown, beside its messages.
#[derive(Debug, Clone)]
pub struct TemplateOptions {
    /// Tools that may be called.
    pub tools: Vec<Value>,
    /// Further variables of the template's, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// Where it ends.
    pub prompt: GenerationPrompt,
}

impl Default for TemplateOptions {
    /// Ready for the assistant's turn.
    fn default() -> Self {
        Self { tools: Vec::new(), variables: Map::new(), prompt: GenerationPrompt::Add }
    }
}

/// Why text could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer refused.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The model has no chat template.
    #[error("this model has no chat template; use /v1/completions with a prompt of your own")]
    NoTemplate,
    /// A chat template cannot be compiled.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The conversation is none that the model can be shown.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A system message that the template would leave out.
    #[error(
        "this model's chat template leaves out system messages that do not stand at the beginning; put their text into the first \
         system message, or into a user's"
    )]
    LaterSystem,
}

/// Why the text side of a model's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There is no model.
    #[error(transparent)]
    Open(#[from] FindError),
    /// Its file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A directory without a tokenizer: enough for the executor, if it makes the weights of a number.
    #[error("there is no tokenizer.json in {}; add the tokenizer.json and tokenizer_config.json of the model, without which the executor serves benchmarks alone", path.display())]
    NoTokenizer {
        /// The directory.
        path: PathBuf,
    },
    /// It has no tokenizer that can be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// What it says about sampling is broken.
    #[error(transparent)]
    Defaults(#[from] GenerationDefaultsError),
    /// What it is made of cannot be read.
    #[error(transparent)]
    Text(#[from] TextHashError),
    /// Each time it was read, its files had changed at the end.
    #[error("the files of {} change while its tokenizer is read; start again once they are whole", path.display())]
    Changing {
        /// The file or directory of the model.
        path: PathBuf,
    },
    /// The thread that read it is gone.
    #[error("reading the model's tokenizer stopped: {0}; the log says why")]
    Stopped(String),
}

impl From<ThreadError> for LoadError {
    fn from(error: ThreadError) -> Self {
        Self::Stopped(error.to_string())
    }
}

/// Turns the tokens of one sequence into text as they come; never splits a character.
pub trait Decoder: Send {
    /// The text that `token` completes; may be empty.
    fn push(&mut self, token: u32) -> &str;
    /// What is left when no more tokens come.
    fn finish(&mut self) -> &str;
    /// Another that is as far: what it takes this one does not know of.
    fn fork(&self) -> Box<dyn Decoder>;
}

/// A model's tokenizer and chat template.
pub trait Text: fmt::Debug + Send + Sync {
    /// Text to token ids; the names of special tokens in it mean those tokens.
    fn encode(&self, text: &str, add: AddSpecial) -> Result<Vec<u32>, TextError>;
    /// Token ids to text, all at once and with the names of special tokens.
    fn decode(&self, tokens: &[u32]) -> String;
    /// The bytes a token stands for; for a special token those of its name, for an unknown one none.
    fn token_bytes(&self, token: u32) -> &[u8];
    /// A decoder for one sequence; of special tokens it shows those of these names alone.
    fn decoder(&self, start: TextStart, shown: &[&str]) -> Box<dyn Decoder>;
    /// The special token of this name.
    fn special_token(&self, name: &str) -> Option<u32>;
    /// A conversation as the model was trained to see it.
    fn encode_chat(&self, messages: &[ChatMessage], showing: &TemplateOptions)
    -> Result<Vec<u32>, TextError>;
    /// What grammars are tried on.
    fn tokens(&self) -> Tokens;
    /// What the model's files say.
    fn facts(&self) -> &TextFacts;
    /// The same tokenizer with this chat template in the place of the model's own. May block.
    ///
    /// # Errors
    /// The template cannot be compiled.
    fn with_chat_template(&self, source: &str) -> Result<Arc<dyn Text>, TemplateError>;
}

/// The text side of a model's files.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    template: Option<(ChatTemplate, SystemMessages)>,
    /// Texts with chat templates of adapters.
    others: OtherTemplates,
    facts: TextFacts,
}

/// The text side of a model, and what it was made of.
#[derive(Debug, Clone)]
pub struct LoadedText {
    /// Tokenizer and chat template.
    pub text: Arc<dyn Text>,
    /// Tells it from that of another model, as the executor does.
    pub hash: TextHash,
}

/// Reads the text side of the model at `path`.
pub fn load(path: &Path) -> Result<LoadedText, LoadError> {
    for _ in 0..MAX_READS {
        let files = ModelFiles::text_at(path)?;
        let hash = TextHash::of(&files)?;
        let text = load_once(files)?;
        // Other files may have taken their place in between.
        if TextHash::of(&ModelFiles::text_at(path)?)? == hash {
            return Ok(LoadedText { text, hash });
        }
    }
    Err(LoadError::Changing { path: path.to_owned() })
}

fn load_once(files: ModelFiles) -> Result<Arc<dyn Text>, LoadError> {
    let (tokenizer, defaults, description) = read(files)?;
    let tokens = tokenizer.template_tokens();
    let facts = TextFacts {
        end_tokens: tokenizer.stop_tokens().to_vec(),
        bos_token: tokens.bos.clone(),
        eos_token: tokens.eos.clone(),
        pad_token: tokens.pad.clone(),
        chat_template: tokenizer.chat_template().map(str::to_owned),
        defaults,
        description,
    };
    let template = facts.chat_template.as_deref();
    let template = template.map(|source| ChatTemplate::new(source, tokens, Limits::default())).transpose();
    let template = template.unwrap_or_else(|error| {
        // Completions need no template, so a bad one takes only the chat away.
        tracing::error!(%error, "the model is served without chat");
        None
    });
    let template = template.map(|template| {
        let systems = SystemMessages::of(&template);
        (template, systems)
    });
    let (tokenizer, others) = (Arc::new(tokenizer), OtherTemplates::default());
    Ok(Arc::new(ModelText { tokenizer, template, others, facts }))
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
        let (template, systems) = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let chat = Chat::new(&self.tokenizer, template, SystemTime::now());
        let messages = systems.prepared(messages)?;
        let mut messages: Vec<Value> = messages.iter().map(ChatMessage::value).collect();
        let mut variables = showing.variables.clone();
        if !showing.tools.is_empty() {
            variables.insert("tools".to_owned(), showing.tools.clone().into());
        }
        let encode = |messages: &[Value]| chat.encode_values(messages, &variables, showing.prompt);
        Ok(history::shown(&mut messages, encode)?)
    }

    fn tokens(&self) -> Tokens {
        Tokens::of(&self.tokenizer)
    }

    fn facts(&self) -> &TextFacts {
        &self.facts
    }

    fn with_chat_template(&self, source: &str) -> Result<Arc<dyn Text>, TemplateError> {
        if let Some(kept) = self.others.get(source) {
            return Ok(kept);
        }
        let template = ChatTemplate::new(source, self.tokenizer.template_tokens(), Limits::default())?;
        let systems = SystemMessages::of(&template);
        let text: Arc<dyn Text> = Arc::new(Self {
            tokenizer: Arc::clone(&self.tokenizer),
            template: Some((template, systems)),
            others: OtherTemplates::default(),
            facts: TextFacts { chat_template: Some(source.to_owned()), ..self.facts.clone() },
        });
        self.others.keep(&text);
        Ok(text)
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

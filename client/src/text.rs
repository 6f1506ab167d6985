//! The base's tokenizer and chat template at the client.

use std::{sync::Arc, time::SystemTime};

use model_files::{
    gguf::{GgufError, GgufFile},
    model_files::ModelFiles,
};
use text::{
    chat::{self, Chat, ChatError},
    chat_template::{ChatTemplate, GenerationPrompt, Limits},
    detokenize::{Detokenizer, TextStart},
    tokenizer::{AddSpecial, EncodeError, ParseSpecial, SkipSpecial, Tokenizer, TokenizerError},
};

/// Reason why the tokenizer of a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextFilesError {
    /// The GGUF file is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model has no usable tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Reason why text cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer refused the text.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The model has no chat template.
    #[error("this model has no chat template: use --raw")]
    NoTemplate,
    /// The chat template refused the conversation.
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// Role of a message's author.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatRole {
    /// System instructions for the model.
    System,
    /// The user of the model.
    User,
    /// The model that answers.
    Assistant,
}

impl ChatRole {
    fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptMessage {
    /// Role of the author.
    pub role: ChatRole,
    /// Text of the message, before the template.
    pub content: String,
}

/// A model's tokenizer and chat template.
#[derive(Debug)]
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl Text {
    /// Reads both from a model, whole or a sparse copy.
    ///
    /// # Errors
    /// Fails if the model has no usable tokenizer.
    pub fn load(files: &ModelFiles) -> Result<Self, TextFilesError> {
        let tokenizer = match files {
            ModelFiles::Gguf(path) => Tokenizer::from_gguf(&GgufFile::open(path)?)?,
            ModelFiles::Directory(path) => Tokenizer::from_directory(path)?,
        };
        let compile = |source| ChatTemplate::new(source, tokenizer.template_tokens(), Limits::default());
        // Raw prompts need no template, so an invalid one only disables conversations.
        let template = tokenizer.chat_template().and_then(|source| compile(source).ok());
        Ok(Self { tokenizer: Arc::new(tokenizer), template })
    }

    /// Returns the tokenizer of the base.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the chat template, if the base has a valid one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Encodes a prompt as it is; names of special tokens in it become those tokens.
    ///
    /// # Errors
    /// Fails if the tokenizer refuses the text.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TextError> {
        Ok(self.tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::Yes)?)
    }

    /// Encodes a conversation with the chat template, ready for the assistant's turn. Message text that looks
    /// like a special token stays plain text.
    ///
    /// # Errors
    /// Fails if the model has no template, or template or tokenizer refuse.
    pub fn encode_chat(&self, messages: &[PromptMessage]) -> Result<Vec<u32>, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let messages: Vec<chat::Message<'_>> = messages
            .iter()
            .map(|message| chat::Message { role: message.role.as_str(), content: &message.content })
            .collect();
        Ok(Chat::new(&self.tokenizer, template, SystemTime::now())
            .encode(&messages, GenerationPrompt::Add)?)
    }

    /// Returns the tokens that end an answer.
    #[must_use]
    pub fn stop_tokens(&self) -> &[u32] {
        self.tokenizer.stop_tokens()
    }

    /// Returns a decoder for an answer, which leaves out special tokens.
    #[must_use]
    pub fn decoder(&self, start: TextStart) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.tokenizer), SkipSpecial::Yes, start)
    }
}

//! Text on one side, token ids on the other: the base's tokenizer and chat template, at the client.

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

/// Why the text side of a model's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextFilesError {
    /// Its file is broken.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// It has no tokenizer that can be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Why text could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer refused.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The model has no chat template.
    #[error("this model has no chat template: use --raw with a prompt of your own")]
    NoTemplate,
    /// The conversation is none that the model can be shown.
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// Who said something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatRole {
    /// Instructions.
    System,
    /// The person.
    User,
    /// The model.
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
    /// Who said it.
    pub role: ChatRole,
    /// The text, before the template.
    pub content: String,
}

/// A model's tokenizer and chat template.
#[derive(Debug)]
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl Text {
    /// Reads those of a model, whole or a sparse copy.
    ///
    /// # Errors
    /// It has no tokenizer that can be used.
    pub fn load(files: &ModelFiles) -> Result<Self, TextFilesError> {
        let tokenizer = match files {
            ModelFiles::Gguf(path) => Tokenizer::from_gguf(&GgufFile::open(path)?)?,
            ModelFiles::Directory(path) => Tokenizer::from_directory(path)?,
        };
        let compile = |source| ChatTemplate::new(source, tokenizer.template_tokens(), Limits::default());
        // Raw prompts need no template, so a bad one takes only the chat away.
        let template = tokenizer.chat_template().and_then(|source| compile(source).ok());
        Ok(Self { tokenizer: Arc::new(tokenizer), template })
    }

    /// The tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chat template, if there is one.
    #[must_use]
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// A prompt as it is written; the names of special tokens in it mean those tokens.
    ///
    /// # Errors
    /// The tokenizer refuses it.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TextError> {
        Ok(self.tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::Yes)?)
    }

    /// A conversation as the model was trained to see it, ready for the assistant's turn. What somebody wrote that looks
    /// like a special token is none.
    ///
    /// # Errors
    /// The model has no template, or the template or the tokenizer refuses.
    pub fn encode_chat(&self, messages: &[PromptMessage]) -> Result<Vec<u32>, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        let messages: Vec<chat::Message<'_>> = messages
            .iter()
            .map(|message| chat::Message { role: message.role.as_str(), content: &message.content })
            .collect();
        Ok(Chat::new(&self.tokenizer, template, SystemTime::now())
            .encode(&messages, GenerationPrompt::Add)?)
    }

    /// Tokens that end an answer.
    #[must_use]
    pub fn stop_tokens(&self) -> &[u32] {
        self.tokenizer.stop_tokens()
    }

    /// A decoder for an answer; special tokens are left out of it.
    #[must_use]
    pub fn decoder(&self, start: TextStart) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.tokenizer), SkipSpecial::Yes, start)
    }
}

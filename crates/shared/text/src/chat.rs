//! Turns a conversation into tokens: the chat template renders the messages, in which special tokens are
//! quoted.
//!
//! Message text that looks like a special token must not become one, since it could end a turn and begin
//! another. So the text is quoted before the template renders it (`tokenizer::escape_special_tokens`).

use std::time::SystemTime;

use serde_json::{Map, Value, json};

pub use crate::chat_error::ChatError;
use crate::{
    chat_template::{GenerationPrompt, RenderTemplate, TemplateError},
    history,
    tokenizer::{AddSpecial, EncodeError, ParseSpecial, Tokenizer},
};

/// One message of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// Role: `system`, `user`, `assistant`, or another role that the template knows.
    pub role: &'a str,
    /// Text of the message before rendering.
    pub content: &'a str,
}

/// Why the tokens of an answer could not be separated from those of its prompt.
#[derive(Debug, thiserror::Error)]
pub enum SplitPromptError {
    /// The conversation cannot be rendered or encoded.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The template's generation prompt differs from the text that it puts before a given answer, for
    /// instance because the prompt begins reasoning content.
    #[error(
        "the chat template's generation prompt differs from how it writes answers; use 'prompt' and \
         'completion' with the exact text"
    )]
    NoPrompt,
    /// The tokenizer joins the answer's first characters with the end of the prompt.
    #[error(
        "the answer's first characters merge with the end of the prompt into one token; begin the answer \
         with other characters"
    )]
    Merged,
}

/// Tokens of a prompt and of the answer to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// The prompt's tokens as in a request, followed by the answer's up to its end token.
    pub tokens: Vec<u32>,
    /// Number of tokens that belong to the prompt.
    pub prompt_len: usize,
}

/// A model's tokenizer and chat template at one time, since templates may show the date.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a dyn RenderTemplate,
    now: SystemTime,
}

impl<'a> Chat<'a> {
    /// Combines a tokenizer and a template at time `now`.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, template: &'a dyn RenderTemplate, now: SystemTime) -> Self {
        Self { tokenizer, template, now }
    }

    /// Returns the tokens of a conversation.
    ///
    /// # Errors
    /// Fails if the template or the tokenizer refuses the conversation.
    pub fn encode(&self, messages: &[Message<'_>], prompt: GenerationPrompt) -> Result<Vec<u32>, ChatError> {
        self.encode_values(&values(messages), &Map::new(), prompt)
    }

    /// Returns the tokens of a conversation whose messages are JSON objects, with further template
    /// variables such as `tools`. All their texts are treated as user input and quoted.
    ///
    /// # Errors
    /// Fails if the template or the tokenizer refuses the conversation.
    pub fn encode_values(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
        prompt: GenerationPrompt,
    ) -> Result<Vec<u32>, ChatError> {
        let mark = self.mark_for(messages, variables)?;
        let rendered = self.render(messages, variables, prompt, mark)?;
        Ok(self.encode_rendered(&rendered, mark)?)
    }

    /// Returns the tokens of the prompt for the last message, followed by the tokens of that message. Text
    /// that the template puts after the answer's end token is left out, since no model generates it.
    ///
    /// # Errors
    /// If the template or the tokenizer refuses the conversation, or if the beginning of the answer cannot
    /// be determined.
    ///
    /// # Panics
    /// If `messages` is empty.
    pub fn answered(
        &self,
        mut messages: Vec<Value>,
        variables: &Map<String, Value>,
    ) -> Result<Answered, SplitPromptError> {
        let encode = |messages: &[Value]| self.encode_values(messages, variables, GenerationPrompt::Omit);
        let mut tokens = history::shown(&mut messages, encode)?;
        let (_, asked) = messages.split_last().expect("a message that answers");
        let mut prompt = self.encode_values(asked, variables, GenerationPrompt::Add)?;
        let prompt_len = prompt.len();
        if !tokens.starts_with(&prompt) {
            prompt.extend(self.answer_apart(&messages, variables)?);
            tokens = prompt;
        }
        let ends = |token: &u32| self.tokenizer.stop_tokens().binary_search(token).is_ok();
        if let Some(end) = tokens[prompt_len..].iter().position(ends) {
            tokens.truncate(prompt_len + end + 1);
        }
        Ok(Answered { tokens, prompt_len })
    }

    /// Encodes the last message alone, for tokenizers that would join its first characters with the
    /// prompt's last. A model that receives the prompt can only continue with a separate token.
    fn answer_apart(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
    ) -> Result<Vec<u32>, SplitPromptError> {
        let mark = self.mark_for(messages, variables)?;
        let render =
            |messages, prompt| self.render(messages, variables, prompt, mark).map_err(ChatError::from);
        let asked = render(&messages[..messages.len() - 1], GenerationPrompt::Add)?;
        let whole = render(messages, GenerationPrompt::Omit)?;
        let answer = whole.strip_prefix(&asked).ok_or(SplitPromptError::NoPrompt)?;
        if self.tokenizer.adds_leading_space() {
            return Err(SplitPromptError::Merged);
        }
        Ok(self.encode_rendered(answer, mark).map_err(ChatError::from)?)
    }

    /// Chooses the character that quotes special tokens in all texts of a conversation.
    fn mark_for(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
    ) -> Result<Option<char>, ChatError> {
        let mut texts = Vec::new();
        messages.iter().chain(variables.values()).for_each(|value| texts_of(value, &mut texts));
        self.mark(&texts)
    }

    /// Chooses the character that quotes special tokens in these texts; `None` if no text needs quoting.
    fn mark(&self, texts: &[&str]) -> Result<Option<char>, ChatError> {
        if !texts.iter().any(|text| self.tokenizer.names_control_token(text)) {
            return Ok(None);
        }
        self.tokenizer.mark_absent_from(texts).map(Some).ok_or(ChatError::NoMark)
    }

    fn render(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
        prompt: GenerationPrompt,
        mark: Option<char>,
    ) -> Result<String, TemplateError> {
        let Some(mark) = mark else {
            return self.template.render_at(messages, prompt, variables, self.now);
        };
        let messages: Vec<Value> = messages.iter().map(|message| self.quoted(message, mark)).collect();
        let variables =
            variables.iter().map(|(name, value)| (name.clone(), self.quoted(value, mark))).collect();
        self.template.render_at(&messages, prompt, &variables, self.now)
    }

    fn quoted(&self, value: &Value, mark: char) -> Value {
        match value {
            Value::String(text) => Value::String(self.tokenizer.quote(text, mark)),
            Value::Array(items) => items.iter().map(|item| self.quoted(item, mark)).collect(),
            Value::Object(map) => {
                let fields = map.iter();
                Value::Object(
                    fields
                        .map(|(name, value)| (self.tokenizer.quote(name, mark), self.quoted(value, mark)))
                        .collect(),
                )
            }
            other => other.clone(),
        }
    }

    fn encode_rendered(&self, text: &str, mark: Option<char>) -> Result<Vec<u32>, EncodeError> {
        match mark {
            Some(mark) => self.tokenizer.encode_quoted(text, mark),
            // The template has already inserted the model's special tokens.
            None => self.tokenizer.encode(text, AddSpecial::No, ParseSpecial::Yes),
        }
    }
}

fn values(messages: &[Message<'_>]) -> Vec<Value> {
    let value = |&Message { role, content }: &Message<'_>| json!({ "role": role, "content": content });
    messages.iter().map(value).collect()
}

/// Collects all texts in `value`, field names included.
fn texts_of<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(items) => items.iter().for_each(|item| texts_of(item, texts)),
        Value::Object(map) => map.iter().for_each(|(name, value)| {
            texts.push(name);
            texts_of(value, texts);
        }),
        _ => {}
    }
}

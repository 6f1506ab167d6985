//! A conversation in tokens: rendered by the model's chat template, with what people wrote quoted.
//!
//! What somebody wrote that looks like a special token must not become one: it could end their turn and begin another's.
//! So it is quoted before it goes into the template (`tokenizer::escape_special_tokens`).

use std::time::SystemTime;

use serde_json::{Map, Value, json};

use crate::{
    chat_template::{ChatTemplate, GenerationPrompt, TemplateError},
    tokenizer::{AddSpecial, EncodeError, ParseSpecial, Tokenizer},
};

/// One message of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: &'a str,
    /// Its text, before the template.
    pub content: &'a str,
}

/// Why a conversation could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The tokenizer refused.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// Nothing is left to tell quoted names of special tokens by.
    #[error(
        "the messages use every character U+F0000 to U+F00FF and names of special tokens; leave out either"
    )]
    NoMark,
    /// The template refused the conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// Why an answer could not be told from its prompt.
#[derive(Debug, thiserror::Error)]
pub enum AnsweredError {
    /// The conversation is none that the model can be shown.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A template that asks for an answer with other text than it puts before an answer that was given, for instance with
    /// the beginning of a thought.
    #[error(
        "the model's chat template asks for an answer in another way than it shows one, so what the model would say after \
         the prompt is not known; use 'prompt' and 'completion' with the text as the model is to see it"
    )]
    NoPrompt,
    /// The tokenizer gives the answer's beginning another form at the beginning of a text.
    #[error(
        "the answer's first characters become one token with the end of the prompt; begin it with other characters"
    )]
    Merged,
}

/// A prompt and what was said after it, in one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// The prompt's tokens, as for a request, and behind them those of the answer, up to the one that ends it.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt's.
    pub prompt_len: usize,
}

/// A model's tokenizer and chat template, at one moment: templates may show the date.
#[derive(Debug, Clone, Copy)]
pub struct Chat<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    now: SystemTime,
}

impl<'a> Chat<'a> {
    /// Of these two, at `now`.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, template: &'a ChatTemplate, now: SystemTime) -> Self {
        Self { tokenizer, template, now }
    }

    /// The tokens of a conversation.
    ///
    /// # Errors
    /// If the template or the tokenizer refuses it.
    pub fn encode(&self, messages: &[Message<'_>], prompt: GenerationPrompt) -> Result<Vec<u32>, ChatError> {
        self.encode_values(&values(messages), &Map::new(), prompt)
    }

    /// The tokens of a conversation whose messages say more than a role and a text, beside variables of the template as `tools`.
    /// All of their texts are what people wrote.
    ///
    /// # Errors
    /// If the template or the tokenizer refuses it.
    pub fn encode_values(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
        prompt: GenerationPrompt,
    ) -> Result<Vec<u32>, ChatError> {
        let mut texts = Vec::new();
        messages.iter().chain(variables.values()).for_each(|value| texts_of(value, &mut texts));
        let mark = self.mark(&texts)?;
        let rendered = self.render(messages, variables, prompt, mark)?;
        Ok(self.encode_rendered(&rendered, mark)?)
    }

    /// The tokens of a conversation's last message, behind those of the prompt that asks for it: what a model is sent, and
    /// what it would have to answer. What a template puts behind the token that ends an answer is left out; no model says
    /// it.
    ///
    /// # Errors
    /// If the template or the tokenizer refuses the conversation, or one cannot say where the answer begins.
    ///
    /// # Panics
    /// If there is no message.
    pub fn answered(&self, messages: &[Message<'_>]) -> Result<Answered, AnsweredError> {
        let (_, asked) = messages.split_last().expect("a message that answers");
        let mut prompt = self.encode(asked, GenerationPrompt::Add)?;
        let prompt_len = prompt.len();
        let mut tokens = self.encode(messages, GenerationPrompt::Omit)?;
        if !tokens.starts_with(&prompt) {
            prompt.extend(self.answer_apart(messages)?);
            tokens = prompt;
        }
        let ends = |token: &u32| self.tokenizer.stop_tokens().binary_search(token).is_ok();
        if let Some(end) = tokens[prompt_len..].iter().position(ends) {
            tokens.truncate(prompt_len + end + 1);
        }
        Ok(Answered { tokens, prompt_len })
    }

    /// The last message's tokens where the tokenizer would join its first characters with the prompt's last: a model that is
    /// sent the prompt can only go on with a token of its own.
    fn answer_apart(&self, messages: &[Message<'_>]) -> Result<Vec<u32>, AnsweredError> {
        let contents: Vec<&str> = messages.iter().map(|message| message.content).collect();
        let mark = self.mark(&contents)?;
        let render = |messages, prompt| {
            self.render(&values(messages), &Map::new(), prompt, mark).map_err(ChatError::from)
        };
        let asked = render(&messages[..messages.len() - 1], GenerationPrompt::Add)?;
        let whole = render(messages, GenerationPrompt::Omit)?;
        let answer = whole.strip_prefix(&asked).ok_or(AnsweredError::NoPrompt)?;
        if self.tokenizer.adds_leading_space() {
            return Err(AnsweredError::Merged);
        }
        Ok(self.encode_rendered(answer, mark).map_err(ChatError::from)?)
    }

    /// What to quote these texts by; `None` if there is nothing to quote.
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

    /// `value` with all of its texts quoted.
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
            // The template has put the model's special tokens where they belong.
            None => self.tokenizer.encode(text, AddSpecial::No, ParseSpecial::Yes),
        }
    }
}

fn values(messages: &[Message<'_>]) -> Vec<Value> {
    let value = |&Message { role, content }: &Message<'_>| json!({ "role": role, "content": content });
    messages.iter().map(value).collect()
}

/// Adds all texts in `value`, the names of its fields among them.
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

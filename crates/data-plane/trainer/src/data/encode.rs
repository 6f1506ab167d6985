//! Samples as tokens, with the weight of each prediction.

use std::{ops::Range, time::SystemTime};

use serde_json::{Map, Value};
use text::{
    chat::{Answered, Chat, SplitPromptError},
    chat_template::{ChatTemplate, GenerationPrompt},
    history::{self, SystemMessages},
    tokenizer::{AddSpecial, ParseSpecial, Tokenizer},
};

use super::{
    DistillationSample, Example, PreferencePair, RatedAnswer,
    distillation_data::DistillationSamples,
    fault::LineFault,
    message::SampleMessage,
    rollout_data::RolloutPromptText,
    sample::{Conversation, TrainingSample},
};

/// Tokenizer of samples, which encodes them as the gateway encodes requests.
#[derive(Debug, Clone, Copy)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    /// How the template treats several system messages.
    systems: Option<SystemMessages>,
    now: SystemTime,
}

pub(super) enum Encoded {
    Examples(Vec<Example>),
    Pair(PreferencePair),
    Rated(RatedAnswer),
    Said(Vec<DistillationSample>),
}

impl Encoded {
    pub(super) fn tokens(&self) -> usize {
        match self {
            Self::Examples(examples) => examples.iter().map(|example| example.tokens.len()).sum(),
            Self::Pair(PreferencePair { chosen, rejected }) => chosen.tokens.len() + rejected.tokens.len(),
            Self::Rated(rated) => rated.example.tokens.len(),
            Self::Said(said) => said.iter().map(|said| said.example.tokens.len()).sum(),
        }
    }

    /// Multiplies the weights of examples by the weight of their line; a line of weight 0 teaches nothing.
    pub(super) fn weighted(self, weight: f32) -> Self {
        match self {
            Self::Examples(_) if weight == 0.0 => Self::Examples(Vec::new()),
            Self::Examples(mut examples) => {
                let weights = examples.iter_mut().flat_map(|example| &mut example.weights);
                weights.for_each(|of_token| *of_token *= weight);
                Self::Examples(examples)
            }
            other => other,
        }
    }
}

impl<'a> Encoder<'a> {
    /// Makes an encoder with a model's tokenizer and chat template. Templates may show the date `now`; a
    /// fixed `now` makes a resumed job see the same tokens.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, template: Option<&'a ChatTemplate>, now: SystemTime) -> Self {
        // The rendering in this process is always available, which is the only error.
        let systems = template.and_then(|template| SystemMessages::of(template).ok());
        Self { tokenizer, template, systems, now }
    }

    /// Encodes `sample`, which comes from line `line`.
    pub(super) fn encode(
        &self,
        line: usize,
        sample: &TrainingSample,
        max_tokens: usize,
    ) -> Result<Encoded, LineFault> {
        let encoding = Encoding { encoder: *self, line, max_tokens };
        Ok(match sample {
            TrainingSample::Conversation(conversation) => {
                encoding.check_tools(conversation)?;
                Encoded::Examples(encoding.conversation(conversation)?)
            }
            TrainingSample::Continuation { prompt, completion } => {
                let answered = encoding.continued(prompt, completion)?;
                Encoded::Examples(vec![encoding.example(answered)?])
            }
            TrainingSample::Text(text) => {
                let answered = encoding.continued("", text)?;
                Encoded::Examples(vec![encoding.example(Answered { prompt_len: 0, ..answered })?])
            }
            TrainingSample::Comparison { asked, chosen, rejected } => {
                encoding.check_tools(asked)?;
                let Conversation { messages, variables } = asked;
                encoding
                    .pair([chosen, rejected].map(|answer| encoding.answered(messages, variables, answer)))?
            }
            TrainingSample::TextComparison { prompt, chosen, rejected } => {
                encoding.pair([chosen, rejected].map(|text| encoding.continued(prompt, text)))?
            }
            TrainingSample::Rated { asked, answer, is_desirable } => {
                encoding.check_tools(asked)?;
                let answered = encoding.answered(&asked.messages, &asked.variables, answer)?;
                encoding.rated(answered, *is_desirable)?
            }
            TrainingSample::RatedText { prompt, completion, is_desirable } => {
                encoding.rated(encoding.continued(prompt, completion)?, *is_desirable)?
            }
            TrainingSample::Answered { asked, answers } => Encoded::Said(encoding.said(asked, answers)?),
        })
    }
}

impl Encoder<'_> {
    /// Encodes a prompt from line `line` as the gateway encodes that of a request.
    pub(super) fn rollout_prompt(
        &self,
        line: usize,
        prompt: &RolloutPromptText,
        max_tokens: usize,
    ) -> Result<Vec<u32>, LineFault> {
        let encoding = Encoding { encoder: *self, line, max_tokens };
        let tokens = match prompt {
            RolloutPromptText::Text(text) => {
                self.tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::Yes)?
            }
            RolloutPromptText::Conversation(conversation) => {
                encoding.check_tools(conversation)?;
                encoding.prompt(&conversation.messages, &conversation.variables)?
            }
        };
        encoding.check_length(&tokens)?;
        if tokens.is_empty() { Err(LineFault::NoPrompt) } else { Ok(tokens) }
    }
}

/// Context for encoding one line.
struct Encoding<'a> {
    encoder: Encoder<'a>,
    line: usize,
    max_tokens: usize,
}

impl Encoding<'_> {
    /// Returns the fewest examples that show every answer as the model would generate it. Goes from the last
    /// answer to the first: an answer whose tokens begin a later example is learned there.
    fn conversation(
        &self,
        Conversation { messages, variables }: &Conversation,
    ) -> Result<Vec<Example>, LineFault> {
        let mut examples: Vec<Example> = Vec::new();
        let learned = messages.iter().enumerate().filter(|(_, message)| message.is_learned);
        for (at, message) in learned.rev() {
            let answered = self.answered(&messages[..at], variables, message)?;
            match examples.last_mut() {
                Some(later) if later.tokens.starts_with(&answered.tokens) => {
                    learn(later, answered.prompt_len..answered.tokens.len());
                }
                _ => examples.push(self.example(answered)?),
            }
        }
        examples.reverse();
        Ok(examples)
    }

    /// Encodes the assistant's answer to a conversation, all of whose fields the template must show.
    fn answered(
        &self,
        asked: &[SampleMessage],
        variables: &Map<String, Value>,
        answer: &SampleMessage,
    ) -> Result<Answered, LineFault> {
        let chat = self.chat()?;
        let asked: Vec<Value> = asked.iter().map(SampleMessage::value).collect();
        let with = |answer: Value| self.prepared([&asked[..], &[answer]].concat());
        let answered = chat.answered(with(answer.value())?, variables)?;
        let without = |name: &str| {
            let mut value = answer.value();
            value.as_object_mut().and_then(|fields| fields.remove(name));
            Ok::<_, LineFault>(chat.answered(with(value)?, variables))
        };
        for (&name, path) in &answer.paths {
            // A template that cannot render the message without the field does show it.
            if without(name)?.is_ok_and(|other| other == answered) {
                return Err(LineFault::NotShown { field: path.clone() });
            }
        }
        self.check_length(&answered.tokens)?;
        Ok(answered)
    }

    /// Fails if the template ignores the tools of a conversation.
    fn check_tools(&self, conversation: &Conversation) -> Result<(), LineFault> {
        let Conversation { messages, variables } = conversation;
        if !variables.contains_key("tools") {
            return Ok(());
        }
        let mut without = variables.clone();
        without.remove("tools");
        let shown = |variables| self.prompt(messages, variables);
        match (shown(variables)?, shown(&without)) {
            (with, Ok(without)) if with == without => Err(LineFault::NotShown { field: "tools".to_owned() }),
            _ => Ok(()),
        }
    }

    /// Encodes recorded answers after their prompt.
    fn said(
        &self,
        asked: &Conversation,
        answers: &DistillationSamples,
    ) -> Result<Vec<DistillationSample>, LineFault> {
        let prompt = self.prompt(&asked.messages, &asked.variables)?;
        let said = answers.encode(self.line, &prompt, self.encoder.tokenizer.vocab_size())?;
        said.iter().try_for_each(|said| self.check_length(&said.example.tokens))?;
        Ok(said)
    }

    /// Encodes messages that the model would answer.
    fn prompt(&self, asked: &[SampleMessage], variables: &Map<String, Value>) -> Result<Vec<u32>, LineFault> {
        let asked = self.prepared(asked.iter().map(SampleMessage::value).collect())?;
        let prompt = self.chat()?.encode_values(&asked, variables, GenerationPrompt::Add);
        Ok(prompt.map_err(SplitPromptError::from)?)
    }

    fn chat(&self) -> Result<Chat<'_>, LineFault> {
        let Encoder { tokenizer, template, now, .. } = self.encoder;
        Ok(Chat::new(tokenizer, template.ok_or(LineFault::NoTemplate)?, now))
    }

    /// Joins system messages and names reasoning content as the gateway does, if the template needs that.
    fn prepared(&self, messages: Vec<Value>) -> Result<Vec<Value>, LineFault> {
        let systems = self.encoder.systems.ok_or(LineFault::NoTemplate)?;
        let mut prepared = systems.prepared(messages).map_err(SplitPromptError::from)?;
        let source = self.encoder.tokenizer.chat_template().unwrap_or_default();
        history::name_reasoning(source, &mut prepared);
        Ok(prepared)
    }

    /// Encodes text that continues a prompt, as for a completion, with an end token.
    fn continued(&self, prompt: &str, completion: &str) -> Result<Answered, LineFault> {
        let tokenizer = self.encoder.tokenizer;
        let whole = tokenizer.encode(&[prompt, completion].concat(), AddSpecial::Yes, ParseSpecial::Yes)?;
        let mut tokens = tokenizer.encode(prompt, AddSpecial::Yes, ParseSpecial::Yes)?;
        let prompt_len = tokens.len();
        if whole.starts_with(&tokens) {
            tokens = whole;
        } else if tokenizer.adds_leading_space() {
            return Err(SplitPromptError::Merged.into());
        } else {
            tokens.extend(tokenizer.encode(completion, AddSpecial::No, ParseSpecial::Yes)?);
        }
        let ends = |token: &u32| tokenizer.stop_tokens().binary_search(token).is_ok();
        if !tokens[prompt_len..].last().is_some_and(ends) {
            tokens.extend(tokenizer.eos_token());
        }
        self.check_length(&tokens)?;
        Ok(Answered { tokens, prompt_len })
    }

    /// Makes an example that learns the answer but not the prompt.
    fn example(&self, Answered { tokens, prompt_len }: Answered) -> Result<Example, LineFault> {
        let answer = prompt_len..tokens.len();
        let weights = vec![0.0; tokens.len().saturating_sub(1)];
        let mut example = Example { line: self.line, tokens, weights };
        learn(&mut example, answer);
        if example.weights.contains(&1.0) { Ok(example) } else { Err(LineFault::TooShort) }
    }

    fn pair(&self, [chosen, rejected]: [Result<Answered, LineFault>; 2]) -> Result<Encoded, LineFault> {
        let (chosen, rejected) = (chosen?, rejected?);
        // The template may have trimmed the difference.
        if chosen == rejected {
            return Err(LineFault::SameAnswers);
        }
        Ok(Encoded::Pair(PreferencePair { chosen: self.example(chosen)?, rejected: self.example(rejected)? }))
    }

    fn rated(&self, answered: Answered, is_desirable: bool) -> Result<Encoded, LineFault> {
        Ok(Encoded::Rated(RatedAnswer { example: self.example(answered)?, is_desirable }))
    }

    fn check_length(&self, tokens: &[u32]) -> Result<(), LineFault> {
        if tokens.len() <= self.max_tokens {
            return Ok(());
        }
        Err(LineFault::TooManyTokens { tokens: tokens.len(), limit: self.max_tokens })
    }
}

/// Sets the weight of the predictions of `tokens` to 1; the first token has no prediction.
fn learn(example: &mut Example, tokens: Range<usize>) {
    let weights = &mut example.weights;
    let end = tokens.end.min(weights.len() + 1);
    for token in tokens.start.max(1)..end {
        weights[token - 1] = 1.0;
    }
}

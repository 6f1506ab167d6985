//! Samples as tokens, with the weight of each prediction.

use std::{ops::Range, time::SystemTime};

use text::{
    chat::{self, Answered, Chat, SplitPromptError},
    chat_template::{ChatTemplate, GenerationPrompt},
    tokenizer::{AddSpecial, ParseSpecial, Tokenizer},
};

use super::{
    DistillationSample, Example, PreferencePair,
    distillation_data::DistillationSamples,
    fault::LineFault,
    sample::{SampleMessage, TrainingSample},
};

/// Tokenizer of samples, which encodes them as the gateway encodes requests.
#[derive(Debug, Clone, Copy)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a ChatTemplate>,
    now: SystemTime,
}

pub(super) enum Encoded {
    Examples(Vec<Example>),
    Pair(PreferencePair),
    Said(Vec<DistillationSample>),
}

impl Encoded {
    pub(super) fn tokens(&self) -> usize {
        match self {
            Self::Examples(examples) => examples.iter().map(|example| example.tokens.len()).sum(),
            Self::Pair(PreferencePair { chosen, rejected }) => chosen.tokens.len() + rejected.tokens.len(),
            Self::Said(said) => said.iter().map(|said| said.example.tokens.len()).sum(),
        }
    }
}

impl<'a> Encoder<'a> {
    /// Makes an encoder with a model's tokenizer and chat template. Templates may show the date `now`; a
    /// fixed `now` makes a resumed job see the same tokens.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, template: Option<&'a ChatTemplate>, now: SystemTime) -> Self {
        Self { tokenizer, template, now }
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
            TrainingSample::Conversation(messages) => Encoded::Examples(encoding.conversation(messages)?),
            TrainingSample::Continuation { prompt, completion } => {
                let answered = encoding.continued(prompt, completion)?;
                Encoded::Examples(vec![encoding.example(answered)?])
            }
            TrainingSample::Text(text) => {
                let answered = encoding.continued("", text)?;
                Encoded::Examples(vec![encoding.example(Answered { prompt_len: 0, ..answered })?])
            }
            TrainingSample::Comparison { asked, chosen, rejected } => {
                encoding.pair([chosen, rejected].map(|answer| encoding.answered(asked, answer)))?
            }
            TrainingSample::TextComparison { prompt, chosen, rejected } => {
                encoding.pair([chosen, rejected].map(|text| encoding.continued(prompt, text)))?
            }
            TrainingSample::Answered { asked, answers } => Encoded::Said(encoding.said(asked, answers)?),
        })
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
    fn conversation(&self, messages: &[SampleMessage]) -> Result<Vec<Example>, LineFault> {
        let mut examples: Vec<Example> = Vec::new();
        let learned = messages.iter().enumerate().filter(|(_, message)| message.is_learned);
        for (at, message) in learned.rev() {
            let answered = self.answered(&messages[..at], &message.content)?;
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

    /// Encodes the assistant's answer to a conversation.
    fn answered(&self, asked: &[SampleMessage], answer: &str) -> Result<Answered, LineFault> {
        let Encoder { tokenizer, template, now } = self.encoder;
        let template = template.ok_or(LineFault::NoTemplate)?;
        let borrowed = asked
            .iter()
            .map(|SampleMessage { role, content, .. }| chat::Message { role: role.as_str(), content });
        let answer = chat::Message { role: "assistant", content: answer };
        let messages: Vec<chat::Message<'_>> = borrowed.chain([answer]).collect();
        let answered = Chat::new(tokenizer, template, now).answered(&messages)?;
        self.check_length(&answered.tokens)?;
        Ok(answered)
    }

    /// Encodes recorded answers after their prompt.
    fn said(
        &self,
        asked: &[SampleMessage],
        answers: &DistillationSamples,
    ) -> Result<Vec<DistillationSample>, LineFault> {
        let Encoder { tokenizer, template, now } = self.encoder;
        let template = template.ok_or(LineFault::NoTemplate)?;
        let asked: Vec<_> = asked
            .iter()
            .map(|SampleMessage { role, content, .. }| chat::Message { role: role.as_str(), content })
            .collect();
        let prompt = Chat::new(tokenizer, template, now).encode(&asked, GenerationPrompt::Add);
        let prompt = prompt.map_err(SplitPromptError::from)?;
        let said = answers.encode(self.line, &prompt, tokenizer.vocab_size())?;
        said.iter().try_for_each(|said| self.check_length(&said.example.tokens))?;
        Ok(said)
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

//! The hash chain over the parts of a record.
//!
//! A link is the BLAKE3 hash of the link before it, the name of its part, and the part's fields. Numbers are
//! little-endian, and lists and texts begin with their length, so no two records have the same bytes.

use crate::{
    hex::Hash,
    record::{
        AnswerEnd, AnswerLimits, AnswerRecord, Constraint, DecodingStart, NumericSettings, Sampler,
        TextDecoding,
    },
};

/// Context of the hash function, which separates links from all other hashes.
const CONTEXT: &str = "holobiont 2026 receipt link v1";

/// A part of a record, in the order of the chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordPart {
    /// Format, program and requested model.
    Header,
    /// Content hash of the base.
    Base,
    /// Numeric settings of executor and request.
    Settings,
    /// Content hash of the adapter.
    Adapter,
    /// Parameters of sampling and seed.
    Sampler,
    /// Conditions of the end.
    Limits,
    /// Grammar of structured output.
    Constraint,
    /// Tokens of the prompt.
    Prompt,
    /// Tokens of the answer, and why they ended.
    Answer,
}

impl RecordPart {
    /// All parts, in the order of their links.
    pub const ALL: [Self; 9] = [
        Self::Header,
        Self::Base,
        Self::Settings,
        Self::Adapter,
        Self::Sampler,
        Self::Limits,
        Self::Constraint,
        Self::Prompt,
        Self::Answer,
    ];

    /// Returns the name of the part in errors, and in its link.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Base => "base",
            Self::Settings => "settings",
            Self::Adapter => "adapter",
            Self::Sampler => "sampler",
            Self::Limits => "limits",
            Self::Constraint => "constraint",
            Self::Prompt => "prompt",
            Self::Answer => "answer",
        }
    }
}

/// Returns the links of a record, one for each part.
pub(crate) fn links(record: &AnswerRecord) -> Vec<Hash> {
    let mut previous = Hash([0; 32]);
    let mut link = |part: RecordPart| {
        let mut hasher = LinkHasher::after(previous, part);
        hasher.part(record, part);
        previous = hasher.finish();
        previous
    };
    RecordPart::ALL.into_iter().map(&mut link).collect()
}

struct LinkHasher(blake3::Hasher);

impl LinkHasher {
    fn after(previous: Hash, part: RecordPart) -> Self {
        let mut hasher = Self(blake3::Hasher::new_derive_key(CONTEXT));
        hasher.hash(previous).text(part.name());
        hasher
    }

    fn finish(self) -> Hash {
        Hash(*self.0.finalize().as_bytes())
    }

    /// Adds the fields of a part.
    fn part(&mut self, record: &AnswerRecord, part: RecordPart) {
        let AnswerRecord {
            format,
            program,
            model,
            base,
            settings,
            adapter,
            sampler,
            limits,
            constraint,
            prompt,
            answer,
            ended,
        } = record;
        match part {
            RecordPart::Header => _ = self.number(*format).text(program).text(model),
            RecordPart::Base => _ = self.hash(*base),
            RecordPart::Settings => self.settings(settings),
            RecordPart::Adapter => self.option(adapter.as_ref(), |hasher, adapter| _ = hasher.hash(*adapter)),
            RecordPart::Sampler => self.sampler(sampler),
            RecordPart::Limits => self.limits(limits),
            RecordPart::Constraint => self.option(constraint.as_ref(), Self::constraint),
            RecordPart::Prompt => _ = self.tokens(prompt),
            RecordPart::Answer => _ = self.tokens(answer).number(end_tag(*ended)),
        }
    }

    fn settings(&mut self, settings: &NumericSettings) {
        let NumericSettings { device, numbers, precision } = settings;
        self.text(device).text(numbers).text(precision);
    }

    fn sampler(&mut self, sampler: &Sampler) {
        let Sampler {
            temperature,
            top_k,
            top_p,
            min_p,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            logit_bias,
            seed,
        } = sampler;
        self.float(*temperature).number(*top_k).float(*top_p).float(*min_p);
        self.float(*presence_penalty).float(*frequency_penalty).float(*repetition_penalty);
        self.length(logit_bias.len());
        for (token, bias) in logit_bias {
            self.number(*token).float(*bias);
        }
        self.0.update(&seed.to_le_bytes());
    }

    fn limits(&mut self, limits: &AnswerLimits) {
        let AnswerLimits { max_tokens, min_tokens, stop_tokens, stop, text } = limits;
        let TextDecoding { start, shown } = text;
        self.number(*max_tokens).number(*min_tokens).tokens(stop_tokens).texts(stop);
        let start = match start {
            DecodingStart::Beginning => 0,
            DecodingStart::Continuation => 1,
        };
        self.number(start).texts(shown);
    }

    fn constraint(&mut self, constraint: &Constraint) {
        let Constraint { hash, source } = constraint;
        self.hash(*hash).text(source);
    }

    fn option<T>(&mut self, value: Option<&T>, add: impl FnOnce(&mut Self, &T)) {
        self.number(u32::from(value.is_some()));
        if let Some(value) = value {
            add(self, value);
        }
    }

    fn hash(&mut self, hash: Hash) -> &mut Self {
        self.0.update(&hash.0);
        self
    }

    fn number(&mut self, number: u32) -> &mut Self {
        self.0.update(&number.to_le_bytes());
        self
    }

    fn float(&mut self, number: f32) -> &mut Self {
        self.number(number.to_bits())
    }

    fn length(&mut self, length: usize) -> &mut Self {
        self.0.update(&(length as u64).to_le_bytes());
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.length(text.len()).0.update(text.as_bytes());
        self
    }

    fn texts(&mut self, texts: &[String]) -> &mut Self {
        self.length(texts.len());
        for text in texts {
            self.text(text);
        }
        self
    }

    fn tokens(&mut self, tokens: &[u32]) -> &mut Self {
        self.length(tokens.len());
        for &token in tokens {
            self.number(token);
        }
        self
    }
}

fn end_tag(ended: AnswerEnd) -> u32 {
    match ended {
        AnswerEnd::StopToken => 0,
        AnswerEnd::StopString => 1,
        AnswerEnd::Length => 2,
    }
}

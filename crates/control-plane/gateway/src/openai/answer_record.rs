//! The record of an answer, for its receipt: tokens are recorded while the answer is generated.

use receipts::{
    AnswerEnd, AnswerLimits, AnswerRecord, Constraint, DecodingStart, Hash, NumericSettings, RECEIPT_FORMAT,
    Sampler, TextDecoding,
};
use shmproto::message::{Finish, Generate, Output, Precision, Sampling, Welcome};
use text::{detokenize::TextStart, stop::StopStrings};

use super::{choice::ChoiceDelta, generation_request::GenerationRequest};
use crate::placement_stats;

/// Tokens of a choice, and why they ended.
#[derive(Debug, Default)]
pub(crate) struct RecordedAnswer {
    tokens: Vec<u32>,
    ended: Option<AnswerEnd>,
}

/// Tokens of one output of an executor.
#[derive(Debug)]
pub(crate) struct OutputTokens {
    tokens: Vec<u32>,
    finish: Option<Finish>,
}

impl OutputTokens {
    #[must_use]
    pub(crate) fn of(output: &Output) -> Self {
        Self { tokens: output.tokens.iter().map(|token| token.token).collect(), finish: output.finish }
    }

    /// Returns why a choice ended that took `taken` of the tokens, and whose text a stop string may have cut.
    fn end(&self, taken: usize, piece: &ChoiceDelta) -> Option<AnswerEnd> {
        piece.finish?;
        let is_whole = taken == self.tokens.len();
        Some(match self.finish {
            Some(Finish::Stop) if is_whole => AnswerEnd::StopToken,
            _ if piece.stop_string.is_some() => AnswerEnd::StopString,
            _ => AnswerEnd::Length,
        })
    }
}

impl RecordedAnswer {
    /// Adds the first `taken` tokens of an output, from which `piece` was made.
    pub(crate) fn add(&mut self, sampled: OutputTokens, taken: usize, piece: &ChoiceDelta) {
        self.ended = self.ended.or(sampled.end(taken, piece));
        self.tokens.extend(sampled.tokens.into_iter().take(taken));
    }
}

/// Returns the record of an answer to `job`, once the answer has ended.
#[must_use]
pub(crate) fn of(job: &GenerationRequest, answer: &RecordedAnswer) -> Option<AnswerRecord> {
    let ended = answer.ended?;
    let Generate { prompt, sampling, max_tokens, min_tokens, stop_tokens, precision, grammar, .. } =
        job.sequences().pop()?;
    let length = u32::try_from(answer.tokens.len()).unwrap_or(u32::MAX);
    let limits = AnswerLimits {
        // An answer that ends at its context's length ends there whatever longer maximum was requested.
        max_tokens: if ended == AnswerEnd::Length { length } else { max_tokens },
        min_tokens,
        stop_tokens,
        stop: stop_strings(job.params.stop.as_ref()),
        text: TextDecoding {
            start: match job.text_start() {
                TextStart::Beginning => DecodingStart::Beginning,
                TextStart::Continuation => DecodingStart::Continuation,
            },
            shown: job.shown_words().into_iter().map(str::to_owned).collect(),
        },
    };
    let welcome = &job.serving.welcome;
    Some(AnswerRecord {
        format: RECEIPT_FORMAT,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        model: job.target.name.clone(),
        base: Hash(welcome.base_hash),
        settings: settings(welcome, precision),
        adapter: job.target.lease.as_ref().map(|lease| Hash(lease.generation.0)),
        sampler: sampler(sampling),
        limits,
        constraint: grammar.as_deref().map(Constraint::of),
        prompt,
        answer: answer.tokens.clone(),
        ended,
    })
}

/// Returns the numeric settings of an executor that computes a request in `precision`.
#[must_use]
pub(crate) fn settings(executor: &Welcome, precision: Precision) -> NumericSettings {
    // The words of the request's field.
    let precision = match precision {
        Precision::Serving => "serving",
        Precision::Exact => "exact",
    };
    NumericSettings {
        device: placement_stats::kind(executor.device.kind).to_owned(),
        numbers: executor.numbers.clone(),
        precision: precision.to_owned(),
    }
}

fn stop_strings(stop: Option<&StopStrings>) -> Vec<String> {
    let strings = |stop: &StopStrings| (0..).map_while(|index| stop.get(index).map(str::to_owned)).collect();
    stop.map_or_else(Vec::new, strings)
}

/// Converts between the parameters of a request and those of a record; a field that one lacks is an error.
macro_rules! converted {
    ($source:expr, $From:ident => $To:ident { $($field:ident),* }) => {{
        let $From { $($field),* } = $source;
        $To { $($field),* }
    }};
    ($source:expr, $From:ident => $To:ident) => {
        converted!($source, $From => $To {
            temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty,
            logit_bias, seed
        })
    };
}

fn sampler(sampling: Sampling) -> Sampler {
    converted!(sampling, Sampling => Sampler)
}

/// Returns the sampling parameters of a recorded sampler.
#[must_use]
pub(crate) fn sampling(sampler: Sampler) -> Sampling {
    converted!(sampler, Sampler => Sampling)
}

//! Replays the answer of a receipt.
//!
//! The replay is the original request again, with the recorded tokens as expected ones. The executor computes
//! prompt and answer like a prompt, and samples at each position of the answer with the request's own seed.
//! The keyed generator, the penalties and the grammar are those of the original, so an honest record gives
//! the recorded tokens, for any executor, batch, draft and cache that the original had.

use std::sync::Arc;

use receipts::{AnswerEnd, AnswerRecord, DecodingStart, Hash, Receipt};
use shmproto::message::{Finish, Output, Precision, TokenOutput};
use text::{
    detokenize::TextStart,
    stop::{StopScanner, StopStrings},
};

use super::{Verdict, mismatch::ReceiptMismatch};
use crate::{
    app::App,
    caller::Caller,
    errors::ApiError,
    lifecycle::ServingState,
    openai::{
        answer_record::{sampling, settings},
        choice::{Choice, Scores},
        generation_request::{Echo, GenerationKind, GenerationRequest, PromptInput},
        generation_response::GenerationResponse,
        namespace::namespace,
        params::{EndTokens, Params},
        structured::GrammarSource,
        target::{AdapterRef, ModelRef, ModelTarget},
    },
    text::Text,
    usage::FinishReason,
};

/// A checked record, and the request that replays it.
#[derive(Debug)]
pub(super) struct Replay {
    answer: Vec<u32>,
    ended: AnswerEnd,
    job: GenerationRequest,
}

impl Replay {
    /// Checks everything about a receipt that needs no computation by the model.
    ///
    /// # Errors
    /// The replay is too long for the context. A receipt that does not hold is no error.
    pub(super) fn prepare(
        receipt: Receipt,
        app: &App,
        caller: &Caller,
        serving: Arc<ServingState>,
    ) -> Result<Result<Self, ReceiptMismatch>, ApiError> {
        let checked = receipt
            .check(Some(app.receipt_key.public_key()))
            .map_err(ReceiptMismatch::from)
            .and_then(|()| check_served(&receipt.record, &serving));
        let record = receipt.record;
        let found = checked.and_then(|precision| Ok((precision, target(&record, app, &serving, caller)?)));
        match found {
            Ok((precision, target)) => {
                Self::of(record, caller, serving, ReplayedModel { target, precision }).map(Ok)
            }
            Err(mismatch) => Ok(Err(mismatch)),
        }
    }

    fn of(
        record: AnswerRecord,
        caller: &Caller,
        serving: Arc<ServingState>,
        model: ReplayedModel,
    ) -> Result<Self, ApiError> {
        let AnswerRecord { sampler, limits, constraint, prompt, answer, ended, .. } = record;
        let (tokens, context) = (prompt.len().saturating_add(answer.len()), serving.context_tokens);
        if tokens > context {
            return Err(ApiError::context_length(tokens, context).of(super::FIELD));
        }
        let ReplayedModel { target, precision } = model;
        let params = Params {
            sampling: sampling(sampler),
            max_tokens: u32::try_from(answer.len()).ok(),
            min_tokens: limits.min_tokens,
            stop_tokens: limits.stop_tokens,
            // The record's stop tokens include the model's end tokens, if those ended the answer.
            end_tokens: EndTokens::Ignore,
            precision,
            expected: answer.clone(),
            ..Params::plain(0)
        };
        let namespace = namespace(caller, &target, &serving);
        let grammar = constraint.map(|constraint| GrammarSource::new(constraint.source, super::FIELD));
        let job = GenerationRequest {
            kind: GenerationKind::Tokens,
            prompt_field: super::FIELD,
            serving,
            target,
            tenant: Arc::clone(&caller.tenant),
            priority: caller.priority,
            namespace,
            prompts: vec![PromptInput { tokens: prompt, text: None }],
            params,
            switches: Arc::default(),
            logprobs: None,
            echo: Echo::Nothing,
            grammar,
            answering: None,
            reasoning: None,
        };
        Ok(Self { answer, ended, job: job.check()? })
    }

    /// Replays the answer, after other requests in the admission queue.
    ///
    /// # Errors
    /// The executor cannot compute the replay now.
    pub(super) async fn run(self, app: &App) -> Result<Verdict, ApiError> {
        let Self { answer, ended, job } = self;
        let (mut response, first) = GenerationResponse::begin(app, job).await?;
        let (mut drawn, mut finish) = (Vec::with_capacity(answer.len()), None);
        response
            .each(first, |_, step| {
                drawn.extend(step.piece.scored.iter().map(|scored| scored.token.token));
                finish = finish.or(step.piece.finish);
            })
            .await?;
        Ok(compare(&answer, ended, &drawn, finish))
    }
}

/// Model of a replay, and its precision.
struct ReplayedModel {
    target: ModelTarget,
    precision: Precision,
}

/// Checks that base and settings of a record are those that are served; returns the request's precision.
fn check_served(record: &AnswerRecord, serving: &ServingState) -> Result<Precision, ReceiptMismatch> {
    let served = Hash(serving.welcome.base_hash);
    if record.base != served {
        return Err(ReceiptMismatch::Base { recorded: record.base, served });
    }
    let precision = match record.settings.precision.as_str() {
        "exact" => Precision::Exact,
        _ => Precision::Serving,
    };
    let served = settings(&serving.welcome, precision);
    if record.settings != served {
        let words = |settings: &receipts::NumericSettings| {
            format!("{} {}, {}", settings.device, settings.precision, settings.numbers)
        };
        return Err(ReceiptMismatch::Settings { recorded: words(&record.settings), served: words(&served) });
    }
    check_tokens(record, serving)?;
    match ends_as_recorded(record, &*serving.text) {
        true => Ok(precision),
        false => Err(ReceiptMismatch::End(record.ended)),
    }
}

/// Checks that a record has tokens, and only tokens of the vocabulary.
fn check_tokens(record: &AnswerRecord, serving: &ServingState) -> Result<(), ReceiptMismatch> {
    if record.prompt.is_empty() || record.answer.is_empty() {
        return Err(ReceiptMismatch::Request("prompt and answer need at least one token each".to_owned()));
    }
    let vocab_size = serving.welcome.vocab_size;
    let mut tokens = record.prompt.iter().chain(&record.answer).chain(&record.limits.stop_tokens);
    match tokens.find(|token| **token >= vocab_size) {
        Some(token) => Err(ReceiptMismatch::Request(format!("the vocabulary has no token {token}"))),
        None => Ok(()),
    }
}

/// Whether the text of a record's tokens ends as the record says, by a stop string or by none.
fn ends_as_recorded(record: &AnswerRecord, text: &dyn Text) -> bool {
    let Ok(stops) = StopStrings::new(&record.limits.stop) else { return false };
    let start = match record.limits.text.start {
        DecodingStart::Beginning => TextStart::Beginning,
        DecodingStart::Continuation => TextStart::Continuation,
    };
    let shown: Vec<&str> = record.limits.text.shown.iter().map(String::as_str).collect();
    let (decoder, scanner) = (text.decoder(start, &shown), StopScanner::new(stops));
    let mut choice = Choice::new(decoder, Some(scanner), record.limits.min_tokens, Scores::Drop);
    let token = |&token: &u32| TokenOutput { token, logprob: 0.0, top: Vec::new() };
    let tokens = record.answer.iter().map(token).collect();
    let finish = match record.ended {
        AnswerEnd::StopToken => Some(Finish::Stop),
        AnswerEnd::StopString => None,
        AnswerEnd::Length => Some(Finish::Length),
    };
    let mut piece = choice.push(Output { tokens, finish, ..Output::default() });
    if piece.finish.is_none() {
        // The last token may complete a stop string only with the end of its last character.
        piece = choice.push(Output { finish: Some(Finish::Length), ..Output::default() });
    }
    let ends_there = choice.tokens() == record.answer.len();
    let length_fits = usize::try_from(record.limits.max_tokens) == Ok(record.answer.len());
    ends_there
        && match record.ended {
            AnswerEnd::StopToken => true,
            AnswerEnd::StopString => piece.stop_string.is_some(),
            AnswerEnd::Length => piece.stop_string.is_none() && length_fits,
        }
}

/// Leases the adapter version of a record, under the recorded name or any other.
fn target(
    record: &AnswerRecord,
    app: &App,
    serving: &ServingState,
    caller: &Caller,
) -> Result<ModelTarget, ReceiptMismatch> {
    let gone = |error: ApiError| ReceiptMismatch::Adapter(error.to_string());
    let Some(version) = record.adapter else {
        let base = ModelRef { model: serving.base_name.clone(), adapter: None };
        return base.find(app, serving, caller).map_err(gone);
    };
    let version = |model: &str| ModelRef {
        model: model.to_owned(),
        adapter: Some(AdapterRef::AdapterVersion(version.to_string())),
    };
    let named = version(&record.model).find(app, serving, caller);
    named.or_else(|error| {
        let any = version(&serving.base_name).find(app, serving, caller);
        any.map_err(|_| gone(error))
    })
}

/// Compares the tokens of a replay and its end with the recorded ones.
fn compare(recorded: &[u32], ended: AnswerEnd, drawn: &[u32], finish: Option<FinishReason>) -> Verdict {
    let differs = |(position, token): (usize, &u32)| drawn.get(position) != Some(token);
    if let Some((position, &token)) = recorded.iter().enumerate().find(|&one| differs(one)) {
        let drawn = drawn.get(position).copied();
        return Err(ReceiptMismatch::Token { position, recorded: token, drawn });
    }
    // The replay has as many tokens as the answer, so it ends by length unless the last is a stop token.
    let is_stopped = finish == Some(FinishReason::Stop);
    match is_stopped == (ended == AnswerEnd::StopToken) {
        true => Ok(recorded.len()),
        false => Err(ReceiptMismatch::End(ended)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_that_differs_is_named() {
        let compared =
            |drawn: &[u32]| compare(&[5, 6, 7], AnswerEnd::Length, drawn, Some(FinishReason::Length));
        assert_eq!(compared(&[5, 6, 7]), Ok(3));
        let token = |position, recorded, drawn| Err(ReceiptMismatch::Token { position, recorded, drawn });
        assert_eq!(compared(&[5, 9]), token(1, 6, Some(9)));
        assert_eq!(compared(&[5, 6]), token(2, 7, None));
        assert_eq!(compared(&[]), token(0, 5, None));
    }

    #[test]
    fn an_end_that_the_replay_does_not_have_is_found() {
        let (stop, length) = (Some(FinishReason::Stop), Some(FinishReason::Length));
        assert_eq!(compare(&[5], AnswerEnd::StopToken, &[5], stop), Ok(1));
        assert_eq!(compare(&[5], AnswerEnd::StopString, &[5], length), Ok(1));
        for (ended, finish) in
            [(AnswerEnd::StopToken, length), (AnswerEnd::Length, stop), (AnswerEnd::StopString, stop)]
        {
            assert_eq!(compare(&[5], ended, &[5], finish), Err(ReceiptMismatch::End(ended)));
        }
    }
}

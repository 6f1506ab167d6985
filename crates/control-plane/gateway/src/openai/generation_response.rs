//! A running request: assigns each output to its choice, and tracks completion and usage.

use std::{sync::Arc, time::Duration};

use receipts::{Receipt, SigningKey};
use shmproto::message::{Output, TokenOutput};
use text::stop::StopScanner;

use super::{
    adapter_stages::{AdapterStage, StageCounts},
    answer_record::{self, OutputTokens, RecordedAnswer},
    choice::{Choice, ChoiceDelta, Scores},
    echo::{EchoedPrompt, echo},
    generation_request::{Echo, GenerationKind, GenerationRequest},
    reasoning::{Reasoning, ReasoningScanner},
    sequence_group::{SequenceGroup, StageOutput},
    structured,
    tools::{self, ToolCallReader, scan::Scanner},
    types::{EndReport, GenerationEnvelope},
};
use crate::{
    adapters::Lease,
    app::App,
    clock::seconds_since_1970,
    errors::ApiError,
    metrics::meter::{AdmissionWaits, Meter},
    random::random_u64,
    telemetry::{self, Generated},
    usage::{CompletionTokensDetails, FinishReason, PromptTokensDetails, Usage},
};

#[derive(Debug)]
pub(crate) struct ChoiceUpdate {
    pub index: usize,
    pub piece: ChoiceDelta,
    /// The echoed prompt, in the first update of a choice if requested.
    pub echoed: Option<EchoedPrompt>,
    /// Scores of the prompt from its second token on, in the first update of a choice, if requested
    /// ([`Params::prompt_logprobs`](super::params::Params::prompt_logprobs)).
    pub prompt: Vec<TokenOutput>,
    /// The prompt's vector, in the last update of a pooling request.
    pub pooled: Vec<f32>,
}

struct ChoiceParser {
    choice: Choice,
    /// Separates reasoning content from the answer.
    thoughts: Option<ReasoningScanner>,
    /// Number of tokens up to the end of the reasoning content.
    thought_tokens: usize,
    /// Separates tool calls from text.
    scanner: Option<Scanner>,
    stages: StageCounts,
    /// Tokens for the receipt, if the request asks for one.
    recorded: Option<RecordedAnswer>,
    finish: Option<FinishReason>,
}

/// A running request; dropping the response cancels its unfinished sequences.
pub(crate) struct GenerationResponse {
    pub job: GenerationRequest,
    id: String,
    created: u64,
    generation: Option<String>,
    session: SequenceGroup,
    slots: Vec<ChoiceParser>,
    /// Number of choices that have not ended.
    open: usize,
    meter: Meter,
    receipt_key: Arc<SigningKey>,
    failed: bool,
}

impl std::fmt::Debug for GenerationResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("id", &self.id).field("open", &self.open).finish_non_exhaustive()
    }
}

impl GenerationResponse {
    /// Starts `job` and waits for its first update, so that earlier errors get an HTTP status of their own.
    pub(crate) async fn begin(app: &App, job: GenerationRequest) -> Result<(Self, ChoiceUpdate), ApiError> {
        for target in job.targets() {
            if let Some(lease) = &target.lease {
                app.adapter_limits.check(&lease.id.0, &target.name)?;
            }
        }
        failpoint::pass("gateway.before_start");
        let mut answer = Self::start(app, job).await?;
        let first =
            answer.next().await.unwrap_or_else(|| Err(ApiError::internal("nothing was generated")))?;
        failpoint::pass("gateway.first_step");
        Ok((answer, first))
    }

    /// Starts `job` on the executor that routing chooses, after its grammar is checked.
    pub(crate) async fn start(app: &App, job: GenerationRequest) -> Result<Self, ApiError> {
        app.admission.check_size(job.choices())?;
        check_grammar(app, &job).await?;
        let slots: Vec<ChoiceParser> = (0..job.choices()).map(|_| ChoiceParser::new(&job)).collect();
        let session = SequenceGroup::start(app, &job).await?;
        let prefix = match job.kind {
            GenerationKind::Chat(_) => "chatcmpl",
            GenerationKind::Text | GenerationKind::Tokens => "cmpl",
            GenerationKind::Pooled(_) => "pool",
        };
        Ok(Self {
            id: format!("{prefix}-{:016x}{:016x}", random_u64(), random_u64()),
            created: seconds_since_1970(),
            generation: job.target.lease.as_ref().map(|lease| lease.generation.to_string()),
            open: slots.len(),
            meter: Meter::start(
                &app.metrics,
                job.target.lease.as_ref().map(Lease::name),
                (Arc::clone(&app.classes), job.principal(&app.classes).class),
                telemetry::started(),
                slots.len(),
            ),
            receipt_key: Arc::clone(&app.receipt_key),
            failed: false,
            job,
            session,
            slots,
        })
    }

    /// Returns the next update; `None` when every choice has ended.
    pub(crate) async fn next(&mut self) -> Option<Result<ChoiceUpdate, ApiError>> {
        let output = self.session.next().await?;
        Some(self.accept_output(output))
    }

    /// Passes `first` and all later updates to `take` until every choice has ended.
    ///
    /// # Errors
    /// The generation fails, or its outputs end before every choice has ended.
    pub(crate) async fn each(
        &mut self,
        first: ChoiceUpdate,
        mut take: impl FnMut(&Self, ChoiceUpdate) + Send,
    ) -> Result<(), ApiError> {
        take(self, first);
        while !self.is_over() {
            let next = self.next().await;
            let next = next.ok_or_else(|| ApiError::internal("the answer ended before its choices did"))?;
            take(self, next?);
        }
        Ok(())
    }

    /// Returns an update that is available without waiting.
    pub(crate) fn ready(&mut self) -> Option<Result<ChoiceUpdate, ApiError>> {
        let output = self.session.ready()?;
        Some(self.accept_output(output))
    }

    /// True if every choice has ended.
    #[must_use]
    pub(crate) fn is_over(&self) -> bool {
        self.open == 0
    }

    /// Returns the fields that every answer body begins with.
    #[must_use]
    pub(crate) fn envelope(&self, object: &'static str) -> GenerationEnvelope<'_> {
        GenerationEnvelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.job.target.name,
            adapter_generation: self.generation.as_deref(),
        }
    }

    #[must_use]
    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    /// Returns the adapter version as a hexadecimal hash; `None` for the base model.
    #[must_use]
    pub(crate) fn generation(&self) -> Option<&str> {
        self.generation.as_deref()
    }

    /// Returns the time to first token, and the part of that time spent waiting for the adapter.
    #[must_use]
    pub(crate) fn first_token(&self) -> (Duration, Duration) {
        let adapter = self.meter.waits().map(|waits| waits.adapter);
        (self.meter.first_token().unwrap_or_default(), adapter.unwrap_or_default())
    }

    #[must_use]
    pub(crate) fn usage(&self) -> Usage {
        let appended = |slot: &ChoiceParser| slot.stages.appended_tokens(&self.job.switches);
        let prompt_tokens = self.job.prompt_tokens() + self.slots.iter().map(appended).sum::<usize>();
        let completion_tokens = self.slots.iter().map(|slot| slot.choice.tokens()).sum();
        let reasoning_tokens = self.slots.iter().map(|slot| slot.thought_tokens).sum();
        // A prompt counts once, even if several choices continue it.
        let first_choices = self.slots.iter().step_by(self.job.params.choices as usize);
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: first_choices.map(|slot| slot.stages.cached_tokens()).sum(),
            },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens },
        }
    }

    /// Ends all provisional text; returns each affected choice with the number of characters to retract.
    pub(crate) fn retract(&mut self) -> Vec<(usize, usize)> {
        let retracted = self.slots.iter_mut().map(|slot| slot.choice.retract("")).enumerate();
        retracted.filter(|(_, characters)| *characters > 0).collect()
    }

    /// Returns the stages of choice `index`, if the request switches adapters.
    #[must_use]
    pub(crate) fn stages(&self, index: usize) -> Option<Vec<AdapterStage<'_>>> {
        let switches = !self.job.switches.is_empty();
        switches.then(|| self.slots[index].stages.report(self.job.targets()))
    }

    /// Returns what follows the last choice: the warnings, and the receipt of an answer that has ended.
    #[must_use]
    pub(crate) fn end_report(&self) -> EndReport<'_> {
        EndReport { warnings: self.job.warnings(), receipt: self.receipt() }
    }

    fn receipt(&self) -> Option<Receipt> {
        // Only requests for one choice may ask for a receipt.
        let recorded = self.slots.first()?.recorded.as_ref()?;
        Some(Receipt::sign(answer_record::of(&self.job, recorded)?, &self.receipt_key))
    }

    fn accept_output(&mut self, output: Result<StageOutput, ApiError>) -> Result<ChoiceUpdate, ApiError> {
        let StageOutput { index, stage, mut output } = output.inspect_err(|_| self.fail())?;
        telemetry::began();
        self.meter.tokens(index, output.tokens.len());
        let slot = &mut self.slots[index];
        let (mut echoed, mut prompt) = (None, Vec::new());
        if slot.stages.reach(stage, output.cached_tokens) {
            self.meter.admitted(AdmissionWaits::of(&output));
            let scores = std::mem::take(&mut output.prompt);
            if self.job.echo == Echo::Prompt {
                let scores = self.job.echoed_logprobs().map(|most| likeliest(&scores, most));
                let names = self.job.params.token_names;
                echoed = Some(echo(self.job.text(), self.job.prompt_of(index), names, scores));
            }
            prompt = self.job.params.prompt_logprobs.map_or_else(Vec::new, |most| likeliest(&scores, most));
        }
        let pooled = std::mem::take(&mut output.pooled);
        let ended_by_itself = output.finish.is_some();
        let before = slot.choice.tokens();
        let sampled = slot.recorded.is_some().then(|| OutputTokens::of(&output));
        let mut piece = slot.push(output);
        if let (Some(scanner), Some(answering)) = (&mut slot.scanner, &self.job.answering) {
            scan(&mut piece, scanner, answering);
        }
        let fresh = slot.choice.tokens() - before;
        slot.stages.add(fresh);
        if let (Some(recorded), Some(sampled)) = (&mut slot.recorded, sampled) {
            recorded.add(sampled, fresh, &piece);
        }
        if let (Some(reason), None) = (piece.finish, slot.finish) {
            slot.finish = Some(reason);
            self.open -= 1;
            self.meter.finished(index, reason);
            if !ended_by_itself {
                // The gateway found a stop string, so the executor does not know that the choice ended.
                self.session.cancel(index);
            }
        }
        if let Some(lease) = &self.job.target_of(stage).lease {
            lease.count_tokens(fresh);
        }
        // The metrics count exactly what the usage reports, at every moment.
        let usage = self.usage();
        self.meter.usage(&usage);
        Ok(ChoiceUpdate { index, piece, echoed, prompt, pooled })
    }

    fn fail(&mut self) {
        self.failed = true;
        self.meter.failed();
    }

    /// Returns the distinct finish reasons of the choices, comma-separated.
    fn endings(&self) -> String {
        let mut endings: Vec<&str> = Vec::new();
        for slot in &self.slots {
            let ending = match slot.finish {
                Some(FinishReason::Stop) => "stop",
                Some(FinishReason::Length) => "length",
                Some(FinishReason::ToolCalls) => "tool_calls",
                None if self.failed => "error",
                None => "cancelled",
            };
            if !endings.contains(&ending) {
                endings.push(ending);
            }
        }
        endings.join(",")
    }
}

impl Drop for GenerationResponse {
    fn drop(&mut self) {
        telemetry::generated(Generated {
            model: self.job.target.name.clone(),
            generation: self.generation.take(),
            usage: self.usage(),
            first_token: self.meter.first_token(),
            waits: self.meter.waits(),
            finish: self.endings(),
            redone: self.session.redone(),
        });
    }
}

impl ChoiceParser {
    fn new(job: &GenerationRequest) -> Self {
        let scores = match job.kind {
            GenerationKind::Tokens => Scores::KeepAll,
            _ if job.params.returns_token_ids => Scores::KeepAll,
            _ if job.logprobs.is_some() => Scores::Keep,
            _ => Scores::Drop,
        };
        let thoughts = job.reasoning.map(Reasoning::scanner);
        let stop = job.params.stop.clone().map(StopScanner::new);
        let decoder = job.text().decoder(job.text_start(), &job.shown_words());
        let choice = Choice::new(decoder, stop, job.params.min_tokens, scores);
        let recorded = job.params.with_receipt.then(RecordedAnswer::default);
        let scanner = job.answering.as_ref().map(ToolCallReader::scanner);
        let stages = StageCounts::default();
        Self { choice, thoughts, thought_tokens: 0, scanner, stages, recorded, finish: None }
    }

    /// Processes the output of one step.
    fn push(&mut self, mut output: Output) -> ChoiceDelta {
        let mut all = ChoiceDelta::default();
        if self.thoughts.as_ref().is_some_and(|scanner| !scanner.is_over()) {
            // Tokens go one by one, so that the reasoning token count does not depend on batching.
            let last = output.tokens.len().saturating_sub(1);
            for token in output.tokens.drain(..last).collect::<Vec<_>>() {
                all.append(self.think(Output { tokens: vec![token], ..Output::default() }));
                if all.finish.is_some() {
                    return all;
                }
            }
        }
        all.append(self.think(output));
        all
    }

    /// Separates reasoning content from the text of a delta.
    fn think(&mut self, output: Output) -> ChoiceDelta {
        let mut piece = self.choice.push(output);
        let Some(scanner) = self.thoughts.as_mut().filter(|scanner| !scanner.is_over()) else { return piece };
        let was_within = scanner.is_within();
        let mut split = scanner.push(&piece.text);
        if was_within || scanner.is_within() {
            self.thought_tokens = self.choice.tokens();
        }
        piece.thinks = scanner.thinks();
        if piece.finish.is_some() {
            split.append(&scanner.finish());
        }
        (piece.text, piece.thought) = (split.answer, split.thought);
        // Draft tokens may be reasoning content or a tag, so the choice shows none of them.
        self.choice.retract("");
        piece.provisional.clear();
        piece
    }
}

/// Moves tool calls out of the delta's text.
fn scan(piece: &mut ChoiceDelta, scanner: &mut Scanner, answering: &ToolCallReader) {
    let text = std::mem::take(&mut piece.text);
    tools::append(scanner.push(&text), answering, &mut piece.text, &mut piece.calls);
    if let Some(finish) = &mut piece.finish {
        tools::append(scanner.finish(), answering, &mut piece.text, &mut piece.calls);
        if *finish == FinishReason::Stop && scanner.calls() > 0 {
            *finish = FinishReason::ToolCalls;
        }
    }
}

/// Returns `scores` with at most `most` alternatives each.
fn likeliest(scores: &[TokenOutput], most: u32) -> Vec<TokenOutput> {
    let cut = |score: &TokenOutput| {
        let top = score.top.iter().copied().take(most as usize).collect();
        TokenOutput { top, ..*score }
    };
    scores.iter().map(cut).collect()
}

/// Checks that the grammar of `job` compiles, if there is one.
async fn check_grammar(app: &App, job: &GenerationRequest) -> Result<(), ApiError> {
    let Some(grammar) = &job.grammar else { return Ok(()) };
    for grammar in grammar.parts.iter().chain([grammar]) {
        let whose = (job.namespace.owner, &job.tenant);
        let verdict = app.grammars.check(&job.serving.text, whose, &grammar.source).await?;
        verdict.map_err(|why| structured::refused(&grammar.field, &why).of(&grammar.param))?;
    }
    Ok(())
}

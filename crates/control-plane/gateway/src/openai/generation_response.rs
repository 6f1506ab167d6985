//! A running job: which choice each step adds to, when it is over, and what it used.

use std::{sync::Arc, time::Duration};

use shmproto::message::{Output, TokenOutput};
use text::{detokenize::TextStart, stop::StopScanner};

use super::{
    choice::{Choice, ChoiceDelta, Scores},
    echo::{EchoedPrompt, echo},
    generation_request::{Echo, GenerationKind, GenerationRequest},
    reasoning::{Reasoning, scan::Scanner as ThoughtScanner},
    sequence_group::SequenceGroup,
    structured,
    tools::{self, ToolCallReader, scan::Scanner},
    types::GenerationEnvelope,
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

/// What one output adds to one choice.
#[derive(Debug)]
pub struct ChoiceUpdate {
    /// Which choice.
    pub index: usize,
    /// What is new.
    pub piece: ChoiceDelta,
    /// The prompt, in the first step of a choice that repeats it.
    pub echoed: Option<EchoedPrompt>,
    /// What tokens of the prompt scored, from the second on, in the first step of a choice, if that was asked for
    /// ([`Params::prompt_logprobs`](super::params::Params::prompt_logprobs)).
    pub prompt: Vec<TokenOutput>,
    /// The prompt's embedding, in the last step of a choice that asks for it.
    pub embedding: Vec<f32>,
}

struct ChoiceParser {
    choice: Choice,
    /// Tells thoughts from text, if there may be any.
    thoughts: Option<ThoughtScanner>,
    /// Tokens up to the end of the thought.
    thought_tokens: usize,
    /// Tells calls of tools from text, if there may be any.
    scanner: Option<Scanner>,
    begun: bool,
    finish: Option<FinishReason>,
    cached_tokens: usize,
}

/// See the module's description. Dropping it cancels what is still running.
pub struct GenerationResponse {
    /// What was asked.
    pub job: GenerationRequest,
    id: String,
    created: u64,
    generation: Option<String>,
    session: SequenceGroup,
    slots: Vec<ChoiceParser>,
    /// Choices that have not ended.
    open: usize,
    meter: Meter,
    failed: bool,
}

impl std::fmt::Debug for GenerationResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").field("id", &self.id).field("open", &self.open).finish_non_exhaustive()
    }
}

impl GenerationResponse {
    /// Starts `job` and waits for its first step: what fails before has a status of its own.
    pub async fn begin(app: &App, job: GenerationRequest) -> Result<(Self, ChoiceUpdate), ApiError> {
        if let Some(lease) = &job.target.lease {
            app.adapter_limits.check(&lease.id.0, &job.target.name)?;
        }
        failpoint::pass("gateway.before_start");
        let mut answer = Self::start(app, job).await?;
        let first =
            answer.next().await.unwrap_or_else(|| Err(ApiError::internal("nothing was generated")))?;
        failpoint::pass("gateway.first_step");
        Ok((answer, first))
    }

    /// Starts `job`, on the executor that is chosen for it, once its grammar is known to be good and its adapter is there.
    pub async fn start(app: &App, job: GenerationRequest) -> Result<Self, ApiError> {
        app.turns.check_size(job.choices())?;
        check_grammar(app, &job).await?;
        let slots: Vec<ChoiceParser> = (0..job.choices()).map(|_| ChoiceParser::new(&job)).collect();
        let session = SequenceGroup::start(app, &job).await?;
        let prefix = match job.kind {
            GenerationKind::Chat(_) => "chatcmpl",
            GenerationKind::Text | GenerationKind::Tokens => "cmpl",
            GenerationKind::Embedding(_) => "embd",
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
            failed: false,
            job,
            session,
            slots,
        })
    }

    /// The next step; `None` when every choice has ended.
    pub async fn next(&mut self) -> Option<Result<ChoiceUpdate, ApiError>> {
        let output = self.session.next().await?;
        Some(self.accept_output(output))
    }

    /// Takes `first`, and then every step up to the end as it comes.
    ///
    /// # Errors
    /// The answer fails, or ends before its choices do.
    pub async fn each(
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

    /// A step that can be had without waiting.
    pub fn ready(&mut self) -> Option<Result<ChoiceUpdate, ApiError>> {
        let output = self.session.ready()?;
        Some(self.accept_output(output))
    }

    /// True when every choice has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.open == 0
    }

    /// What the answer's body begins with.
    #[must_use]
    pub fn envelope(&self, object: &'static str) -> GenerationEnvelope<'_> {
        GenerationEnvelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.job.target.name,
            adapter_generation: self.generation.as_deref(),
        }
    }

    /// When it was begun, in seconds since 1970.
    #[must_use]
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Content hash of the adapter; `None` for the base model.
    #[must_use]
    pub fn generation(&self) -> Option<&str> {
        self.generation.as_deref()
    }

    /// From the request to its first token, and what of that was a wait for its adapter.
    #[must_use]
    pub fn first_token(&self) -> (Duration, Duration) {
        let adapter = self.meter.waits().map(|waits| waits.adapter);
        (self.meter.first_token().unwrap_or_default(), adapter.unwrap_or_default())
    }

    /// Tokens so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let prompt_tokens = self.job.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let completion_tokens = self.slots.iter().map(|slot| slot.choice.tokens()).sum();
        let reasoning_tokens = self.slots.iter().map(|slot| slot.thought_tokens).sum();
        // A prompt counts once, however many choices continue it.
        let first_choices = self.slots.iter().step_by(self.job.params.choices as usize);
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: first_choices.map(|slot| slot.cached_tokens).sum(),
            },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens },
        }
    }

    /// Ends what was told of drafts: each choice of which some stood, and its characters.
    pub fn retract(&mut self) -> Vec<(usize, usize)> {
        let retracted = self.slots.iter_mut().map(|slot| slot.choice.retract("")).enumerate();
        retracted.filter(|(_, characters)| *characters > 0).collect()
    }

    fn accept_output(&mut self, output: Result<(usize, Output), ApiError>) -> Result<ChoiceUpdate, ApiError> {
        let (index, mut output) = output.inspect_err(|_| self.fail())?;
        telemetry::began();
        self.meter.tokens(index, output.tokens.len());
        let slot = &mut self.slots[index];
        let (mut echoed, mut prompt) = (None, Vec::new());
        if !slot.begun {
            slot.begun = true;
            slot.cached_tokens = output.cached_tokens as usize;
            self.meter.admitted(AdmissionWaits::of(&output));
            let scores = std::mem::take(&mut output.prompt);
            if self.job.echo == Echo::Prompt {
                let scores = self.job.echoed_logprobs().map(|most| likeliest(&scores, most));
                let names = self.job.params.token_names;
                echoed = Some(echo(self.job.text(), self.job.prompt_of(index), names, scores));
            }
            prompt = self.job.params.prompt_logprobs.map_or_else(Vec::new, |most| likeliest(&scores, most));
        }
        let embedding = std::mem::take(&mut output.embedding);
        let ended_by_itself = output.finish.is_some();
        let before = slot.choice.tokens();
        let mut piece = slot.push(output);
        if let (Some(scanner), Some(answering)) = (&mut slot.scanner, &self.job.answering) {
            scan(&mut piece, scanner, answering);
        }
        let fresh = slot.choice.tokens() - before;
        if let (Some(reason), None) = (piece.finish, slot.finish) {
            slot.finish = Some(reason);
            self.open -= 1;
            self.meter.finished(index, reason);
            if !ended_by_itself {
                // A stop string: the executor does not know of it.
                self.session.cancel(index);
            }
        }
        if let Some(lease) = &self.job.target.lease {
            lease.count_tokens(fresh);
        }
        // What is counted is what usage says, at every moment.
        let usage = self.usage();
        self.meter.usage(&usage);
        Ok(ChoiceUpdate { index, piece, echoed, prompt, embedding })
    }

    fn fail(&mut self) {
        self.failed = true;
        self.meter.failed();
    }

    /// How the choices ended, each way once.
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
        let start = match job.kind {
            GenerationKind::Chat(start) => start,
            GenerationKind::Text | GenerationKind::Tokens | GenerationKind::Embedding(_) => {
                TextStart::Continuation
            }
        };
        let stop = job.params.stop.clone().map(StopScanner::new);
        let words = job.answering.as_ref().map_or(&[][..], |answering| answering.format.words());
        let tags = job.reasoning.map(Reasoning::words);
        let shown: Vec<&str> = words.iter().copied().chain(tags.into_iter().flatten()).collect();
        let choice = Choice::new(job.text().decoder(start, &shown), stop, job.params.min_tokens, scores);
        let scanner = job.answering.as_ref().map(ToolCallReader::scanner);
        let (begun, finish) = (false, None);
        Self { choice, thoughts, thought_tokens: 0, scanner, begun, finish, cached_tokens: 0 }
    }

    /// Takes what a step produced.
    fn push(&mut self, mut output: Output) -> ChoiceDelta {
        let mut all = ChoiceDelta::default();
        if self.thoughts.as_ref().is_some_and(ThoughtScanner::thinks) {
            // One by one, so that a thought has as many tokens however many come together.
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

    /// Tells thoughts from the text of a piece.
    fn think(&mut self, output: Output) -> ChoiceDelta {
        let mut piece = self.choice.push(output);
        let Some(scanner) = self.thoughts.as_mut().filter(|scanner| scanner.thinks()) else { return piece };
        let was_within = scanner.is_within();
        let mut told = scanner.push(&piece.text);
        if was_within || scanner.is_within() {
            self.thought_tokens = self.choice.tokens();
        }
        piece.thinks = scanner.thinks();
        if piece.finish.is_some() {
            told.append(&scanner.finish());
        }
        (piece.text, piece.thought) = (told.answer, told.thought);
        // What is drafted may be a thought, or a tag.
        self.choice.retract("");
        piece.provisional.clear();
        piece
    }
}

/// Tells calls of tools from the text of a piece.
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

/// The same scores with at most `most` alternatives each.
fn likeliest(scores: &[TokenOutput], most: u32) -> Vec<TokenOutput> {
    let cut = |score: &TokenOutput| {
        let top = score.top.iter().copied().take(most as usize).collect();
        TokenOutput { top, ..*score }
    };
    scores.iter().map(cut).collect()
}

/// Checks that the grammar of `job` can be honoured, if it has one.
async fn check_grammar(app: &App, job: &GenerationRequest) -> Result<(), ApiError> {
    let Some(grammar) = &job.grammar else { return Ok(()) };
    for grammar in grammar.parts.iter().chain([grammar]) {
        let whose = (job.namespace.owner, &job.tenant);
        let verdict = app.grammars.check(&job.serving.text, whose, &grammar.source).await?;
        verdict.map_err(|why| structured::refused(&grammar.field, &why).of(&grammar.param))?;
    }
    Ok(())
}

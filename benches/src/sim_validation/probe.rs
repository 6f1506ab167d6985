//! What steps take in a running deployment, asked over HTTP as everybody asks: prompts alone and together, known and not,
//! and sequences that decode.

use std::{ops::Range, thread, time::Duration};

use anyhow::{Result, anyhow, ensure};
use simulator::cost::{ComputedWork, fit::TimedObservation};

use super::SAID;
use crate::{
    holobiont_runner::Holobiont,
    http::{Burst, Timeline},
    measure::Samples,
    workload::{AdapterChoice, AnswerKind, BenchRequest, prompt},
};

/// How long prompts may take to reach the executor, in the time that a step of a full chunk leaves them.
const REACHING: Duration = Duration::from_millis(40);
/// Tokens that sequences generate which decode together, and beside prompts.
const GENERATED: usize = 64;
const GENERATED_BESIDE: usize = 400;
/// What those beside prompts look back at, about.
const CONTEXT_BESIDE: usize = 100;
/// Milliseconds between prompts beside others, at most: they are to come at any point of a step.
const PAUSE_MS: u64 = 25;
/// Every prompt is sent so often, every batch decodes so often.
const REPEATS: (usize, usize) = (7, 3);
/// Prompt tokens of a step in a deployment that is told nothing else.
pub(crate) const CHUNK_TOKENS: usize = 512;

/// Asks, with prompts that nobody has sent before.
pub(crate) struct StepProbe<'a> {
    server: &'a Holobiont,
    /// Ranks of the adapters.
    ranks: &'a [usize],
    prompts: u64,
    /// Observations so far: each begins with another adapter.
    observed: usize,
}

impl<'a> StepProbe<'a> {
    /// Of a deployment whose adapters have these ranks.
    pub(crate) fn new(server: &'a Holobiont, ranks: &'a [usize]) -> Self {
        Self { server, ranks, prompts: 0, observed: 0 }
    }

    /// A request of the adapter that is `number`th of this observation.
    fn job(&mut self, number: usize, tokens: usize, generate: usize) -> BenchRequest {
        self.prompts += 1;
        let who = AdapterChoice::Adapter(self.adapter(number));
        BenchRequest { prompt: prompt(self.prompts, tokens), who, generate, says: AnswerKind::Token(SAID) }
    }

    fn adapter(&self, number: usize) -> usize {
        (self.observed + number) % self.ranks.len()
    }

    /// Ranks of the first `count` adapters of this observation.
    fn ranks(&self, count: usize) -> usize {
        (0..count).map(|number| self.ranks[self.adapter(number)]).sum()
    }

    /// A prompt that has the executor for itself.
    ///
    /// # Errors
    /// If a request fails; so all others.
    pub(crate) fn alone(&mut self, tokens: usize) -> Result<TimedObservation> {
        self.observed += 1;
        let mut seconds = Vec::new();
        for _ in 0..REPEATS.0 {
            let job = self.job(0, tokens, 1);
            seconds.push(first_s(self.server.ask(&job)?));
        }
        let seconds = Samples::new(seconds)?.median();
        Ok(TimedObservation { seconds, ..prompted(0..tokens, self.ranks(1), ComputedWork::default()) })
    }

    /// A prompt that was asked for before: its last few tokens look back at all the others.
    pub(crate) fn known(&mut self, tokens: usize) -> Result<TimedObservation> {
        self.observed += 1;
        let job = self.job(0, tokens, 1);
        self.server.ask(&job)?;
        let (mut seconds, mut found) = (Vec::new(), 0);
        for _ in 0..REPEATS.0 {
            let timeline = self.server.ask(&job)?;
            found = timeline.cached;
            seconds.push(first_s(timeline));
        }
        let seconds = Samples::new(seconds)?.median();
        Ok(TimedObservation { seconds, ..prompted(found..tokens, self.ranks(1), ComputedWork::default()) })
    }

    /// Sequences that decode, after so many tokens each.
    pub(crate) fn together(&mut self, sequences: usize, context: usize) -> Result<TimedObservation> {
        self.observed += 1;
        let jobs: Vec<BenchRequest> =
            (0..sequences).map(|number| self.job(number, context, GENERATED)).collect();
        // Their prompts are known then, and all decode from the first step on, or nearly.
        jobs.iter()
            .try_for_each(|job| self.server.ask(&BenchRequest { generate: 1, ..job.clone() }).map(drop))?;
        let mut seconds = Vec::new();
        for _ in 0..REPEATS.1 {
            let Burst(timelines) = self.server.burst(&jobs)?;
            seconds.extend(timelines.into_iter().map(step_s));
        }
        let steps = vec![(1.0, decode(sequences, context + GENERATED / 2, self.ranks(sequences)))];
        Ok(TimedObservation { seconds: Samples::new(seconds)?.mean(), requests: 0.0, steps })
    }

    /// Prompts that come while a long one is computed are computed together, from its first token to theirs.
    pub(crate) fn at_once(&mut self, prompts: usize, tokens: usize) -> Result<TimedObservation> {
        self.observed += 1;
        let server = self.server;
        let mut seconds = Vec::new();
        for _ in 0..REPEATS.0 {
            let long = self.job(0, CHUNK_TOKENS, 1);
            let jobs: Vec<BenchRequest> = (0..prompts).map(|number| self.job(number, tokens, 1)).collect();
            let (before, Burst(timelines)) = thread::scope(|scope| {
                let before = scope.spawn(|| server.ask(&long));
                thread::sleep(REACHING);
                let burst = server.burst(&jobs)?;
                let before = before.join().unwrap_or_else(|_| Err(anyhow!("a client thread panicked")))?;
                Ok::<_, anyhow::Error>((before, burst))
            })?;
            let took = timelines.iter().map(|timeline| (timeline.first - before.first).as_secs_f64());
            seconds.push(Samples::new(took.collect())?.mean());
        }
        let work = ComputedWork {
            prefill_tokens: prompts * tokens,
            prefill_pairs: prompts * tokens * tokens / 2,
            rank_rows: self.ranks(prompts) * tokens,
            ..ComputedWork::default()
        };
        Ok(TimedObservation {
            seconds: Samples::new(seconds)?.median(),
            requests: 0.0,
            steps: vec![(1.0, work)],
        })
    }

    /// A prompt that comes while others decode waits for half a step, on average, before its own.
    pub(crate) fn beside(&mut self, tokens: usize, sequences: usize) -> Result<TimedObservation> {
        self.observed += 1;
        let others: Vec<BenchRequest> =
            (0..sequences).map(|number| self.job(number, 32, GENERATED_BESIDE)).collect();
        let prompts: Vec<BenchRequest> = (0..REPEATS.0).map(|_| self.job(0, tokens, 1)).collect();
        let server = self.server;
        let seconds = thread::scope(|scope| {
            let others: Vec<_> = others.iter().map(|job| scope.spawn(move || server.ask(job))).collect();
            thread::sleep(Duration::from_millis(300));
            let mut seconds = Vec::new();
            for (index, job) in (0..).zip(&prompts) {
                thread::sleep(Duration::from_millis(index * PAUSE_MS / REPEATS.0 as u64));
                let first = server.ask(job).map(first_s)?;
                ensure!(others.iter().all(|other| !other.is_finished()), "those beside have ended too early");
                seconds.push(first);
            }
            Samples::new(seconds)
        })?;
        let decoding = decode(sequences, CONTEXT_BESIDE, self.ranks(sequences));
        let mut observed = prompted(0..tokens, self.ranks(1), decoding);
        observed.steps.push((0.5, decoding));
        Ok(TimedObservation { seconds: seconds.mean(), ..observed })
    }

    /// How much longer a first token takes where its adapter comes from the store: for each adapter, which nobody may have
    /// asked this executor for before.
    pub(crate) fn loads(&mut self, tokens: usize) -> Result<Vec<f64>> {
        (0..self.ranks.len())
            .map(|adapter| {
                let number =
                    (adapter + self.ranks.len() - self.observed % self.ranks.len()) % self.ranks.len();
                let jobs = [0; 2].map(|_| self.job(number, tokens, 1));
                let [cold, warm] = jobs.map(|job| self.server.ask(&job).map(first_s));
                Ok((cold? - warm?).max(0.0))
            })
            .collect()
    }
}

/// A step of sequences that decode after so many tokens each, with adapters of `ranks` together.
fn decode(decode_sequences: usize, context: usize, ranks: usize) -> ComputedWork {
    ComputedWork {
        decode_sequences,
        context_tokens: decode_sequences * context,
        rank_rows: ranks,
        ..ComputedWork::default()
    }
}

/// What is computed of a prompt of which `tokens` are not known, beside sequences that decode, but for the time.
pub(super) fn prompted(tokens: Range<usize>, rank: usize, decoding: ComputedWork) -> TimedObservation {
    let step = |start: usize| {
        let count = CHUNK_TOKENS.min(tokens.end - start);
        let work = ComputedWork {
            prefill_tokens: count,
            prefill_pairs: count * (start + count / 2),
            context_tokens: decoding.context_tokens + start,
            rank_rows: decoding.rank_rows + rank * count,
            ..decoding
        };
        (1.0, work)
    };
    let steps = tokens.clone().step_by(CHUNK_TOKENS).map(step).collect();
    TimedObservation { seconds: 0.0, requests: 1.0, steps }
}

pub(super) fn first_s(timeline: Timeline) -> f64 {
    (timeline.first - timeline.sent).as_secs_f64()
}

/// A step, where nearly every one gave a token.
fn step_s(timeline: Timeline) -> f64 {
    (timeline.last - timeline.first).as_secs_f64() / (timeline.tokens - 1) as f64
}

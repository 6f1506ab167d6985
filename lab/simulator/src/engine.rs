//! An executor on a virtual clock. A step runs as in the real one (`base-executor/src/engine`), with the
//! same scheduler and cache; only computing and copying are replaced by their times.
//!
//! # A turn
//!
//! 1. Arrived requests join the queue; finished copies are reported to the cache.
//! 2. Sequences whose adapter or blocks have arrived resume; waiting ones are admitted in order of arrival
//!    while there is capacity.
//! 3. Every 100 ms the swapper runs: blocks are copied out ahead of need, and the most valuable are copied
//!    back. In [`Design::Executor`] blocks are copied out beside each step instead, and copied back while
//!    the executor is idle.
//! 4. `scheduling::batch` decides on a step; the clock advances by its cost. Sequences that wait for a copy
//!    take no part in it.

mod links;
mod observer;
mod sequence;
mod setup;
mod tiers;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    time::Duration,
};

use kv_cache::Cache;
use scheduling::batch::{RunningStage, Snapshot, StepDecision, StepTokens};

use self::{
    observer::Observer,
    sequence::{EntryOutcome, SimSequence, TurnOrigin},
    setup::settings,
    tiers::Tiers,
};
pub use self::{
    observer::{CacheSample, EndedRequest, Observation},
    setup::{Design, Setup, SimulationError},
};
use crate::{cost::ComputedWork, workload::Workload};

/// Period of the swapper (E-07).
const SWAP_PERIOD: Duration = Duration::from_millis(100);

/// Limit on the time without progress while sequences wait, after which none is possible.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Simulated executor with its cache, queue and links.
#[derive(Debug)]
pub struct Engine<'a> {
    setup: Setup,
    workload: &'a Workload,
    cache: Cache,
    tiers: Tiers,
    now: Duration,
    next_swap: Duration,
    computed_at: Duration,
    arrivals: BinaryHeap<Reverse<(Duration, TurnOrigin)>>,
    waiting: VecDeque<SimSequence>,
    /// Sequences that wait for their adapter.
    cold: Vec<SimSequence>,
    /// Sequences that hold all their blocks, some of which are being copied.
    fetching: Vec<SimSequence>,
    running: Vec<SimSequence>,
    observer: Observer,
}

impl<'a> Engine<'a> {
    /// Creates an engine that is ready to run.
    ///
    /// # Errors
    /// If a request or an adapter can never fit.
    pub fn new(setup: Setup, workload: &'a Workload) -> Result<Self, SimulationError> {
        let settings = settings(&setup, workload)?;
        let arrivals = workload
            .conversations
            .iter()
            .enumerate()
            .filter(|(_, talk)| talk.start < setup.end)
            .map(|(conversation, talk)| Reverse((talk.start, TurnOrigin { conversation, turn: 0 })))
            .collect();
        Ok(Self {
            setup,
            workload,
            cache: Cache::new(settings),
            tiers: Tiers::new(setup.cost, workload),
            now: Duration::ZERO,
            next_swap: Duration::ZERO,
            computed_at: Duration::ZERO,
            arrivals,
            waiting: VecDeque::new(),
            cold: Vec::new(),
            fetching: Vec::new(),
            running: Vec::new(),
            observer: Observer::new(setup.keeps_series),
        })
    }

    /// Runs until every request has ended.
    ///
    /// # Errors
    /// If no sequence makes progress, or the cache breaks an invariant.
    pub fn run(mut self) -> Result<Observation, SimulationError> {
        let mut turns = 0;
        loop {
            self.iterate();
            turns += 1;
            if self.setup.audit_every > 0 && turns % self.setup.audit_every == 0 {
                self.cache.audit()?;
            }
            let shares = self.schedule();
            if !shares.is_empty() {
                self.compute(&shares);
                continue;
            }
            let is_over = self.arrivals.is_empty()
                && self.waiting.is_empty()
                && self.cold.is_empty()
                && self.fetching.is_empty();
            if is_over {
                return Ok(self.observer.finish(&self.cache, &self.tiers, self.now));
            }
            self.wait()?;
        }
    }

    fn iterate(&mut self) {
        while let Some(&Reverse((at, origin))) = self.arrivals.peek()
            && at + self.setup.cost.request() <= self.now
        {
            self.arrivals.pop();
            let sequence = SimSequence::new(self.workload, origin, (at, self.setup.cost.block_tokens));
            self.cache.note_request(Some(crate::workload::adapter_id(sequence.adapter)));
            self.waiting.push_back(sequence);
        }
        self.tiers.end_copies(&mut self.cache, self.now);
        self.admit_ready();
        self.look_at_fetched();
        self.admit();
        if self.now >= self.next_swap {
            self.next_swap = self.now + SWAP_PERIOD;
            if self.setup.design == Design::Paper {
                self.tiers.swap(&mut self.cache, self.now);
            }
            let queued = self.waiting.len() + self.cold.len();
            self.observer.sample(&self.cache, self.now, (self.running.len(), queued));
        }
        self.tiers.begin_copies(&mut self.cache, self.now);
    }

    /// Resumes sequences whose adapter has arrived, ahead of all that arrived while they waited.
    fn admit_ready(&mut self) {
        let mut warm = Vec::new();
        for mut sequence in std::mem::take(&mut self.cold) {
            if self.hold_adapter(&mut sequence) {
                sequence.times.adapter_wait += self.now - sequence.waits_since;
                warm.push(sequence);
            } else {
                self.cold.push(sequence);
            }
        }
        warm.into_iter().rev().for_each(|sequence| self.waiting.push_front(sequence));
    }

    /// Pins the sequence's adapter on the device until the sequence ends; false if the sequence must wait
    /// for the adapter.
    fn hold_adapter(&mut self, sequence: &mut SimSequence) -> bool {
        let is_there =
            self.tiers.pin_adapter(&mut self.cache, self.now, sequence.adapter, &mut sequence.is_pinned);
        is_there || (sequence.is_pinned && self.starts_cold(sequence))
    }

    /// Whether the sequence starts without all of its adapter: if no more of it is coming, or that takes
    /// longer than computing on the CPU (C-28).
    fn starts_cold(&self, sequence: &SimSequence) -> bool {
        let Some(factor) = self.setup.cpu_assist else { return false };
        let prompt_s = sequence.pending() as f64 * self.setup.cost.prefill_token_s;
        let assist_s = prompt_s * (factor - 1.0) * self.tiers.missing(sequence.adapter);
        self.tiers.arrives_in(sequence.adapter).is_none_or(|takes| assist_s <= takes.as_secs_f64())
    }

    fn look_at_fetched(&mut self) {
        for mut sequence in std::mem::take(&mut self.fetching) {
            match sequence.check_arrivals(&mut self.cache) {
                EntryOutcome::Awaits => self.fetching.push(sequence),
                EntryOutcome::Ready => {
                    // A sequence preempted before its first token was already admitted; its time since
                    // counts as compute.
                    if sequence.times.entered.is_none() {
                        sequence.times.kv_wait += self.now - sequence.waits_since;
                    }
                    self.begin(sequence);
                }
                EntryOutcome::NoRoom => self.waiting.push_front(sequence),
            }
        }
    }

    /// Admits waiting sequences in order of arrival while there is capacity. A sequence that does not fit
    /// yet blocks the later ones, because otherwise it would never fit.
    fn admit(&mut self) {
        while self.running.len() + self.fetching.len() < self.setup.limits.max_running {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            if !self.hold_adapter(&mut sequence) {
                sequence.was_cold = true;
                sequence.waits_since = self.now;
                self.cold.push(sequence);
                continue;
            }
            let beside = self.running.len() + self.fetching.len();
            match sequence.try_admit(&mut self.cache, self.workload, (&self.setup.limits, beside)) {
                EntryOutcome::NoRoom => return self.waiting.push_front(sequence),
                EntryOutcome::Ready => self.begin(sequence),
                EntryOutcome::Awaits => {
                    sequence.waits_since = self.now;
                    self.fetching.push(sequence);
                }
            }
            self.tiers.begin_copies(&mut self.cache, self.now);
        }
    }

    fn begin(&mut self, mut sequence: SimSequence) {
        sequence.times.entered.get_or_insert(self.now);
        self.running.push(sequence);
    }

    /// Schedules the next step, with the necessary preemptions.
    fn schedule(&mut self) -> Vec<StepTokens> {
        loop {
            let running: Vec<RunningStage> =
                self.running.iter().map(|sequence| sequence.stage(&self.cache)).collect();
            let snapshot = Snapshot { running: &running, free_blocks: self.cache.available() };
            match snapshot.step(&self.setup.limits) {
                StepDecision::GiveWay => {
                    let Some(mut youngest) = self.running.pop() else { return Vec::new() };
                    youngest.release_blocks(&mut self.cache);
                    self.observer.preemptions += 1;
                    self.waiting.push_front(youngest);
                }
                StepDecision::Compute(shares) => {
                    for share in &shares {
                        let sequence = &mut self.running[share.sequence];
                        let missing = sequence.missing_blocks(&self.cache);
                        sequence.blocks.extend(self.cache.allocate(missing).unwrap_or_default());
                    }
                    self.tiers.begin_copies(&mut self.cache, self.now);
                    return shares;
                }
            }
        }
    }

    fn compute(&mut self, shares: &[StepTokens]) {
        if self.setup.design == Design::Executor {
            // Tokens that fill the step's blocks, and one more.
            let tokens: usize = shares.iter().map(|share| share.count).sum();
            self.cache.spill(tokens / self.setup.cost.block_tokens + 1);
            self.tiers.begin_copies(&mut self.cache, self.now);
        }
        let mut work = ComputedWork::default();
        let mut prefill = 0.0;
        for share in shares {
            let sequence = &self.running[share.sequence];
            work.context_tokens += sequence.computed;
            work.rank_rows += share.count * self.workload.adapters[sequence.adapter].rank as usize;
            if sequence.generated() > 0 && sequence.pending() == 1 {
                work.decode_sequences += 1;
                continue;
            }
            work.prefill_pairs += share.count * (sequence.computed + share.count / 2);
            self.observer.prefill_tokens += share.count as u64;
            let slower = self.setup.cpu_assist.unwrap_or(1.0) - 1.0;
            prefill += share.count as f64 * (1.0 + slower * self.tiers.missing(sequence.adapter));
        }
        work.prefill_tokens = prefill.round() as usize;
        let carried = std::mem::take(&mut self.tiers.carried);
        self.now += self.setup.cost.step(work) + self.setup.cost.copies(carried);
        self.computed_at = self.now;
        self.observer.steps += 1;
        self.postprocess(shares);
        self.cache.advance(self.now, self.running.len());
    }

    fn postprocess(&mut self, shares: &[StepTokens]) {
        let mut ended = Vec::new();
        for share in shares {
            let sequence = &mut self.running[share.sequence];
            if !sequence.advance(share.count, &mut self.cache) {
                continue;
            }
            let talk = &self.workload.conversations[sequence.origin.conversation];
            sequence.tokens.push(talk.token(sequence.tokens.len()));
            sequence.times.first_token.get_or_insert(self.now);
            if sequence.tokens.len() >= sequence.end {
                ended.push(share.sequence);
            }
        }
        ended.sort_unstable();
        for index in ended.into_iter().rev() {
            let sequence = self.running.remove(index);
            self.retire(sequence);
        }
    }

    fn retire(&mut self, mut sequence: SimSequence) {
        sequence.release_blocks(&mut self.cache);
        if sequence.is_pinned {
            self.cache.unpin_adapter(crate::workload::adapter_id(sequence.adapter));
        }
        let TurnOrigin { conversation, turn } = sequence.origin;
        if let Some(next) = self.workload.conversations[conversation].turns.get(turn + 1)
            && self.now + next.think < self.setup.end
        {
            let origin = TurnOrigin { conversation, turn: turn + 1 };
            self.arrivals.push(Reverse((self.now + next.think, origin)));
        }
        let tenant = self.workload.adapters[sequence.adapter].tenant;
        self.observer.note_end(&sequence, tenant, self.now);
    }

    /// Advances the clock to the next event, since there is nothing to compute.
    fn wait(&mut self) -> Result<(), SimulationError> {
        if self.setup.design == Design::Executor {
            self.tiers.idle(&mut self.cache, self.now);
            // No step waits for blocks that are copied meanwhile.
            self.tiers.carried = 0;
        }
        let arrival = self.arrivals.peek().map(|Reverse((at, _))| *at + self.setup.cost.request());
        let somebody_waits = !(self.waiting.is_empty() && self.cold.is_empty() && self.fetching.is_empty());
        if !somebody_waits {
            self.computed_at = self.now;
        } else if self.now > self.computed_at + PATIENCE {
            return Err(SimulationError::Stuck(self.now));
        }
        let next = [arrival, self.tiers.next_end()].into_iter().flatten().min();
        self.now = next.map_or(self.next_swap, |next| next.min(self.next_swap)).max(self.now);
        self.cache.advance(self.now, self.running.len());
        Ok(())
    }
}

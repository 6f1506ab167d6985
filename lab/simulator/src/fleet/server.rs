//! An executor that runs step by step at the speed of its model.

use std::collections::{BTreeMap, VecDeque};

use scheduling::{
    batch::{PromptLogits, RunningStage, Snapshot, StepDecision, StepTokens},
    perf::serving::{ColdStart, RequestLoad},
    routing::Residency,
};

use super::{FleetRequest, LowerTier, Nanos, Prompts, ServerSetup};
use crate::cost::ComputedWork;

#[derive(Debug, Clone, Copy)]
struct ServerSequence {
    id: usize,
    rank: u64,
    /// Number of prompt tokens that are not computed.
    pending: u32,
    /// Number of computed tokens of prompt and answer.
    context: u64,
    left: u32,
    /// Time at which the adapter has arrived.
    warm_at: Nanos,
}

/// Message of an executor after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepMessage {
    /// The first token of a request.
    Began(usize),
    /// The last token of a request.
    Done(usize),
}

#[derive(Debug)]
pub(super) struct SimulatedExecutor {
    setup: ServerSetup,
    /// Factor by which all steps are slower than the model.
    pub(super) slowness: f64,
    waiting: VecDeque<ServerSequence>,
    running: Vec<ServerSequence>,
    step: Vec<StepTokens>,
    is_busy: bool,
    /// Adapters on the device, with the times of their last use.
    resident: BTreeMap<u32, u64>,
    asked: u64,
    /// Known requests with their last message, which is repeated if the gateway asks again.
    known: BTreeMap<usize, Option<StepMessage>>,
}

impl SimulatedExecutor {
    pub(super) fn new(setup: ServerSetup, slowness: f64) -> Self {
        Self {
            setup,
            slowness,
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: Vec::new(),
            is_busy: false,
            resident: BTreeMap::new(),
            asked: 0,
            known: BTreeMap::new(),
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }

    pub(super) fn has_work(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    /// Whether a request waits only for a step. A request whose adapter arrives at this moment does not
    /// count, since its event may follow.
    pub(super) fn could_go_on(&self, now: Nanos) -> bool {
        !self.running.is_empty() || self.waiting.iter().any(|one| one.warm_at < now)
    }

    /// Takes a request. A known request's last message is repeated.
    pub(super) fn submit(&mut self, id: usize, request: &FleetRequest, now: Nanos) -> Option<StepMessage> {
        if let Some(said) = self.known.get(&id) {
            return *said;
        }
        self.known.insert(id, None);
        let warm_at = now + self.load(request);
        let (rank, pending) = (u64::from(request.rank), request.prompt.max(1));
        self.waiting.push_back(ServerSequence {
            id,
            rank,
            pending,
            context: 0,
            left: request.answer.max(1),
            warm_at,
        });
        None
    }

    /// Returns the load time of the request's adapter, which replaces the least recently used one.
    fn load(&mut self, request: &FleetRequest) -> Nanos {
        let before = residency(&self.resident, &self.setup, request);
        touch(&mut self.resident, &mut self.asked, self.setup.adapter_slots, request);
        let model = &self.setup.model;
        let link_s =
            |bytes: u64| if model.cold == ColdStart::Waits { model.link.at(bytes as f64) } else { 0.0 };
        let seconds = match before {
            Residency::Device => 0.0,
            Residency::Host { bytes } => link_s(bytes),
            Residency::Absent { bytes } => model.store.at(bytes as f64) + link_s(bytes),
        };
        nanos(seconds * self.slowness)
    }

    /// Begins a step and returns its duration; `Err` is the time of the next attempt, if no request can run
    /// yet.
    pub(super) fn begin(&mut self, now: Nanos) -> Result<Nanos, Option<Nanos>> {
        self.admit(now);
        let stages: Vec<RunningStage> = self.running.iter().map(stage).collect();
        let snapshot = Snapshot { running: &stages, free_blocks: usize::MAX };
        let StepDecision::Compute(mut shares) = snapshot.step(&self.setup.limits) else { return Err(None) };
        let is_prompt = |share: &StepTokens| self.running[share.sequence].pending > 0;
        if self.setup.prompts == Prompts::Preempt && shares.iter().any(is_prompt) {
            shares.retain(is_prompt);
        }
        if shares.is_empty() {
            return Err(self.waiting.iter().map(|one| one.warm_at).min());
        }
        let took = nanos(self.seconds(&shares) * self.slowness).max(1);
        self.step = shares;
        self.is_busy = true;
        Ok(took)
    }

    /// Admits requests whose adapters are present, in order of arrival, while there are slots.
    fn admit(&mut self, now: Nanos) {
        let mut cold = VecDeque::new();
        while self.running.len() < self.setup.limits.max_running
            && let Some(sequence) = self.waiting.pop_front()
        {
            match sequence.warm_at <= now {
                true => self.running.push(sequence),
                false => cold.push_back(sequence),
            }
        }
        cold.append(&mut self.waiting);
        self.waiting = cold;
    }

    fn seconds(&self, shares: &[StepTokens]) -> f64 {
        if let Some(costs) = self.setup.costs {
            return costs.step(self.work(shares)).as_secs_f64();
        }
        let (mut decoding, mut prompts) = (RequestLoad::default(), RequestLoad::default());
        for share in shares {
            let sequence = &self.running[share.sequence];
            match sequence.pending {
                0 => decoding = decoding.plus(RequestLoad::of(sequence.rank, sequence.context)),
                _ => prompts = prompts.plus(RequestLoad::of(sequence.rank, share.count as u64)),
            }
        }
        let model = &self.setup.model;
        match (decoding.requests, self.setup.prompts) {
            (0, Prompts::Preempt) => model.prefill_s(prompts),
            // One pass reads the weights once; the fixed cost is part of the step.
            _ => model.step_s(decoding) + model.prefill_s(prompts),
        }
    }

    fn work(&self, shares: &[StepTokens]) -> ComputedWork {
        let mut work = ComputedWork::default();
        for share in shares {
            let sequence = &self.running[share.sequence];
            let context = sequence.context as usize;
            work.context_tokens += context;
            work.rank_rows += share.count * sequence.rank as usize;
            if sequence.pending == 0 {
                work.decode_sequences += 1;
            } else {
                work.prefill_tokens += share.count;
                work.prefill_pairs += share.count * (context + share.count / 2);
            }
        }
        work
    }

    /// Ends the step and returns its messages.
    pub(super) fn end(&mut self) -> Vec<StepMessage> {
        let (mut said, mut ended) = (Vec::new(), Vec::new());
        for share in std::mem::take(&mut self.step) {
            let sequence = &mut self.running[share.sequence];
            sequence.context += share.count as u64;
            let is_first = sequence.pending > 0;
            sequence.pending =
                sequence.pending.saturating_sub(u32::try_from(share.count).unwrap_or(u32::MAX));
            if is_first && sequence.pending > 0 {
                continue;
            }
            sequence.pending = 0;
            sequence.left -= 1;
            if is_first {
                said.push(StepMessage::Began(sequence.id));
            }
            if sequence.left == 0 {
                said.push(StepMessage::Done(sequence.id));
                ended.push(share.sequence);
            } else if is_first {
                self.known.insert(sequence.id, Some(StepMessage::Began(sequence.id)));
            }
        }
        ended.sort_unstable();
        for index in ended.into_iter().rev() {
            let id = self.running.remove(index).id;
            self.known.insert(id, Some(StepMessage::Done(id)));
        }
        self.is_busy = false;
        said
    }
}

fn stage(sequence: &ServerSequence) -> RunningStage {
    match sequence.pending {
        0 => RunningStage::Decoding { missing_blocks: 0 },
        pending => RunningStage::Prompt { pending: pending as usize, report: PromptLogits::Last },
    }
}

/// Returns where a device with the adapters `resident` finds the adapter of a request.
pub(super) fn residency(
    resident: &BTreeMap<u32, u64>,
    setup: &ServerSetup,
    request: &FleetRequest,
) -> Residency {
    if request.rank == 0 || resident.contains_key(&request.adapter) || setup.adapter_slots == usize::MAX {
        return Residency::Device;
    }
    let bytes = u64::from(request.rank) * setup.rank_bytes;
    match setup.below {
        LowerTier::Host => Residency::Host { bytes },
        LowerTier::Store => Residency::Absent { bytes },
    }
}

/// Marks the request's adapter as used; a missing one replaces the least recently used.
pub(super) fn touch(
    resident: &mut BTreeMap<u32, u64>,
    asked: &mut u64,
    slots: usize,
    request: &FleetRequest,
) {
    if request.rank == 0 || slots == usize::MAX {
        return;
    }
    *asked += 1;
    resident.insert(request.adapter, *asked);
    if resident.len() > slots
        && let Some(oldest) = resident.iter().min_by_key(|(_, at)| **at).map(|(&adapter, _)| adapter)
    {
        resident.remove(&oldest);
    }
}

pub(super) fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round() as Nanos
}

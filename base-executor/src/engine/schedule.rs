//! Executes the decisions of `scheduling::batch`: admission, participation in steps, and preemption.

use model::forward::{ForwardPass, LogitRows};
use scheduling::batch::{Snapshot, StepDecision, StepTokens};

use super::{
    Engine,
    sequence::{KvAdmission, Sequence},
};

/// The next `count` tokens of a running sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScheduledTokens {
    /// Index of the sequence in `running`.
    pub(super) sequence: usize,
    pub(super) count: usize,
    pub(super) logits: LogitRows,
}

impl ScheduledTokens {
    pub(super) fn rows(&self) -> usize {
        match self.logits {
            LogitRows::None | LogitRows::Draw(_) | LogitRows::States { .. } => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.count,
        }
    }

    /// Computes the draft tree of `sequence`, if it has one, instead of the pending token alone.
    pub(super) fn take_tree<A>(&mut self, sequence: &Sequence<A>) {
        if let Some(grown) = &sequence.grown {
            (self.count, self.logits) = (grown.rows(), LogitRows::All);
        }
    }

    pub(super) fn states(&self) -> usize {
        if let LogitRows::States { from } = self.logits { self.count - from } else { 0 }
    }
}

impl<P: ForwardPass> Engine<P> {
    /// Admits waiting sequences in order of arrival while there is capacity. A sequence that does not fit
    /// blocks those behind it, since it would never fit otherwise.
    pub(super) fn admit(&mut self) {
        let (now, limits) = (self.clock.now(), self.limits.batch());
        while self.queues.running().len() < limits.max_running {
            let Some(mut sequence) = self.queues.take_next() else { return };
            if !sequence.knows_its_grammar() || !self.hold_adapter(&mut sequence, now) {
                // A sequence that waits for the device blocks no other.
                self.queues.set_aside(sequence);
                failpoint::pass("executor.cold_waits");
                continue;
            }
            let found = match sequence.try_admit(&mut self.kv, &limits, self.queues.running().len(), now) {
                KvAdmission::NoRoom => return self.queues.put_back(sequence),
                KvAdmission::Waits => {
                    self.queues.set_aside(sequence);
                    failpoint::pass("executor.fetch_waits");
                    continue;
                }
                KvAdmission::Runs { found } => found,
            };
            if sequence.note_admission(found, now) {
                self.stats.cached_tokens += found as u64;
            }
            self.queues.begin(sequence);
            failpoint::pass("executor.admitted");
        }
    }

    /// Plans the next step, after preemptions for it.
    pub(super) fn schedule(&mut self) -> Vec<ScheduledTokens> {
        let limits = self.limits.batch();
        self.queues.each_running(|sequence| _ = sequence.knows_its_grammar());
        loop {
            let running: Vec<_> = self.queues.running().iter().map(Sequence::stage).collect();
            let snapshot = Snapshot { running: &running, free_blocks: self.kv.available() };
            match snapshot.step(&limits) {
                StepDecision::GiveWay => self.preempt_youngest(),
                StepDecision::Compute(shares) => {
                    let shares = self.of_one_path(shares);
                    return self.prepare(&shares);
                }
            }
        }
    }

    /// Keeps the shares of one path through the base's layers, which a pass needs; the paths alternate.
    fn of_one_path(&mut self, mut shares: Vec<StepTokens>) -> Vec<StepTokens> {
        let path = |share: &StepTokens| self.queues.running()[share.sequence].task.path;
        let last = self.computing.path;
        let next = shares.iter().map(path).find(|&path| path != last).unwrap_or(last);
        shares.retain(|share| path(share) == next);
        self.computing.set_path(next);
        shares
    }

    /// Allocates the blocks of the scheduled sequences.
    fn prepare(&mut self, shares: &[StepTokens]) -> Vec<ScheduledTokens> {
        for share in shares {
            let sequence = self.queues.running_mut(share.sequence);
            // A prompt has had its blocks since admission.
            if let Some(blocks) = self.kv.allocate(sequence.missing_blocks()) {
                sequence.blocks.extend(blocks);
            }
        }
        let portion = |share: &StepTokens| self.portion(share.sequence, share.count);
        let mut portions: Vec<_> = shares.iter().map(portion).collect();
        // A pass needs states last.
        portions.sort_by_key(|portion| portion.states() > 0);
        portions
    }

    pub(super) fn portion(&self, sequence: usize, count: usize) -> ScheduledTokens {
        let logits = self.queues.running()[sequence].logits_of(count, self.computing.drawing());
        ScheduledTokens { sequence, count, logits }
    }

    /// Preempts the youngest running sequence to the head of the queue; all waiting ones are younger.
    fn preempt_youngest(&mut self) {
        if let Some(mut sequence) = self.queues.take_youngest() {
            sequence.release_blocks(&mut self.kv);
            self.stats.preemptions += 1;
            self.queues.put_back(sequence);
            failpoint::pass("executor.after_preempt");
        }
    }
}

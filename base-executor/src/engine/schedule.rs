//! Carrying out what `scheduling::batch` decides: who is let in, takes part in a step, or gives way.

use model::forward::{ForwardPass, LogitRows};
use scheduling::batch::{Snapshot, StepDecision, StepTokens};

use super::{
    Engine,
    sequence::{KvAdmission, Sequence},
};

/// The next `count` tokens of a running sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScheduledTokens {
    /// Index in `running`.
    pub(super) sequence: usize,
    pub(super) count: usize,
    pub(super) logits: LogitRows,
}

impl ScheduledTokens {
    /// Rows of logits it asks for.
    pub(super) fn rows(&self) -> usize {
        match self.logits {
            LogitRows::None | LogitRows::Draw(_) | LogitRows::States { .. } => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.count,
        }
    }

    /// Rows of hidden states it asks for.
    pub(super) fn states(&self) -> usize {
        if let LogitRows::States { from } = self.logits { self.count - from } else { 0 }
    }
}

impl<P: ForwardPass> Engine<P> {
    /// Lets waiting sequences run, in order of arrival, as long as there is room. One that does not fit yet keeps
    /// the others behind it waiting: it would never fit otherwise.
    pub(super) fn admit(&mut self) {
        let (now, limits) = (self.clock.now(), self.limits.batch());
        while self.queues.running().len() < limits.max_running {
            let Some(mut sequence) = self.queues.take_next() else { return };
            if !sequence.knows_its_grammar() || !self.hold_adapter(&mut sequence, now) {
                // It steps aside, so that it keeps nobody waiting.
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

    /// The next step; whoever has to give way for it has done so.
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

    /// Those of one path through the base's layers, which a pass takes as a whole; where there are some of each, by turns.
    fn of_one_path(&mut self, mut shares: Vec<StepTokens>) -> Vec<StepTokens> {
        let path = |share: &StepTokens| self.queues.running()[share.sequence].task.path;
        let last = self.computing.path;
        let next = shares.iter().map(path).find(|&path| path != last).unwrap_or(last);
        shares.retain(|share| path(share) == next);
        self.computing.set_path(next);
        shares
    }

    /// Gives those that compute the blocks they need.
    fn prepare(&mut self, shares: &[StepTokens]) -> Vec<ScheduledTokens> {
        for share in shares {
            let sequence = self.queues.running_mut(share.sequence);
            // A prompt has had its blocks since it was admitted.
            if let Some(blocks) = self.kv.allocate(sequence.missing_blocks()) {
                sequence.blocks.extend(blocks);
            }
        }
        let portion = |share: &StepTokens| self.portion(share.sequence, share.count);
        let mut portions: Vec<_> = shares.iter().map(portion).collect();
        // As a pass wants it: states come last.
        portions.sort_by_key(|portion| portion.states() > 0);
        portions
    }

    pub(super) fn portion(&self, sequence: usize, count: usize) -> ScheduledTokens {
        let logits = self.queues.running()[sequence].logits_of(count, self.computing.drawing());
        ScheduledTokens { sequence, count, logits }
    }

    /// Puts the last that came back to the head of the queue: everything there is younger still.
    fn preempt_youngest(&mut self) {
        if let Some(mut sequence) = self.queues.take_youngest() {
            sequence.release_blocks(&mut self.kv);
            self.stats.preemptions += 1;
            self.queues.put_back(sequence);
            failpoint::pass("executor.after_preempt");
        }
    }
}

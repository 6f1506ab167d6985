//! Who takes part in a step, with how many tokens, and who has to give way.

use model::forward::{ForwardPass, LogitRows};

use super::{Engine, sequence::Drawing};

/// Rows of logits that prompt log-probabilities may take in a step: a row is as long as the vocabulary.
const SCORED_TOKENS: usize = 64;

/// The next `count` tokens of a running sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Portion {
    /// Index in `running`.
    pub(super) sequence: usize,
    pub(super) count: usize,
    pub(super) logits: LogitRows,
}

impl Portion {
    /// Rows of logits it asks for.
    pub(super) fn rows(&self) -> usize {
        match self.logits {
            LogitRows::None | LogitRows::Draw(_) => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.count,
        }
    }
}

impl<P: ForwardPass> Engine<P> {
    /// Lets waiting sequences run, in order of arrival, as long as there is room. One that does not fit yet keeps
    /// the others behind it waiting: it would never fit otherwise.
    pub(super) fn admit(&mut self) {
        let now = self.clock.now();
        while self.running.len() < self.limits.max_running {
            if !self.adapter_is_there(now) {
                continue;
            }
            let Some(sequence) = self.waiting.front_mut() else { return };
            // A block for each that runs, or the newcomer would soon have to give way again.
            let Some(found) = sequence.enter(&mut self.kv, self.running.len()) else { return };
            if sequence.note_admission(found, now) {
                self.stats.cached_tokens += found as u64;
            }
            self.running.extend(self.waiting.pop_front());
            failpoint::pass("executor.admitted");
        }
    }

    /// Everyone who generates goes on by a token; prompts share `chunk_tokens` on top of that, so neither keeps
    /// the other waiting.
    pub(super) fn schedule(&mut self) -> Vec<Portion> {
        let mut plan = Vec::with_capacity(self.running.len());
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].is_decoding() {
                if !self.grow(index) {
                    break;
                }
                plan.push(self.portion(index, 1));
            }
            index += 1;
        }
        self.schedule_prompts(&mut plan);
        plan
    }

    /// First come, first served; but a prompt that would take the whole step for itself leaves a quarter of it to
    /// the next ones.
    fn schedule_prompts(&self, plan: &mut Vec<Portion>) {
        let budget = self.limits.chunk_tokens;
        let is_prompt = |index: &usize| !self.running[*index].is_decoding();
        let prompts: Vec<usize> = (0..self.running.len()).filter(is_prompt).collect();
        let share = if prompts.len() > 1 { budget - budget / 4 } else { budget };
        let (mut left, mut scored_left) = (budget, SCORED_TOKENS);
        for index in prompts {
            let sequence = &self.running[index];
            let mut count = sequence.pending().min(share).min(left);
            match sequence.pending_virtual() {
                _ if !sequence.scores_prompt() => {}
                0 => {
                    count = count.min(scored_left);
                    scored_left -= count;
                }
                // They go ahead of the prompt: no logits are owed for them.
                virtual_tokens => count = count.min(virtual_tokens),
            }
            left -= count;
            if count > 0 {
                plan.push(self.portion(index, count));
            }
        }
    }

    pub(super) fn portion(&self, sequence: usize, count: usize) -> Portion {
        let logits = self.running[sequence].logits_of(count, Drawing::of(&self.pass));
        Portion { sequence, count, logits }
    }

    /// Gets the sequence a block for its pending token, if it lacks one, from those who came later if need be.
    /// Returns false if it was itself the last to come and had to give way.
    fn grow(&mut self, index: usize) -> bool {
        while self.running[index].lacks_block() {
            if let Some(block) = self.kv.allocate(1) {
                self.running[index].blocks.extend(block);
                continue;
            }
            self.preempt_youngest();
            if index == self.running.len() {
                return false;
            }
        }
        true
    }

    /// Puts the last that came back to the head of the queue: everything there is younger still.
    fn preempt_youngest(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            sequence.leave(&mut self.kv);
            self.stats.preemptions += 1;
            self.waiting.push_front(sequence);
            failpoint::pass("executor.after_preempt");
        }
    }
}

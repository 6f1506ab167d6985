//! Execution of a plan, also if the device lacks memory for all of it at once.
//!
//! A pass that runs out of memory has changed nothing that counts, since it writes KV only behind the
//! computed tokens. The plan is therefore retried in parts: sequence by sequence, then with fewer prompt
//! tokens. A part that still does not fit fails its request.

use model::forward::{BLOCK_TOKENS, ForwardPass};
use shmproto::message::{ErrorCode, WireError};

use super::{
    Engine,
    model_runner::StepFailed,
    postprocess::{FAULT, NO_WEIGHTS},
    schedule::ScheduledTokens,
    sequence::failure,
};

impl<P: ForwardPass> Engine<P> {
    /// Computes `plan` and emits its outputs, unless the device is lost.
    pub(super) fn run_plan(&mut self, plan: &[ScheduledTokens]) {
        if self.run_whole(plan) {
            self.is_short = false;
        }
    }

    /// Returns false if memory was short.
    fn run_whole(&mut self, plan: &[ScheduledTokens]) -> bool {
        match self.compute(plan) {
            Ok(()) => {
                failpoint::pass("executor.after_step_before_outputs");
                self.postprocess(plan);
            }
            Err(_) if self.computing.is_lost() => {}
            Err(StepFailed::Fault) => self.fail_planned(plan, FAULT),
            Err(StepFailed::NoWeights) => self.fail_planned(plan, NO_WEIGHTS),
            Err(StepFailed::NoMemory(why)) => {
                self.note_shortage(&why);
                match self.without_drafts(plan) {
                    Some(plain) => _ = self.run_whole(&plain),
                    None => self.run_in_parts(plan, &why),
                }
                return false;
            }
        }
        true
    }

    /// Returns the plan without draft tokens, if it has any.
    fn without_drafts(&mut self, plan: &[ScheduledTokens]) -> Option<Vec<ScheduledTokens>> {
        let has_grown = |portion: &ScheduledTokens| self.queues.running()[portion.sequence].has_grown();
        let grown: Vec<_> = plan.iter().map(has_grown).collect();
        let plain = plan.iter().zip(&grown).map(|(portion, has_grown)| {
            if *has_grown {
                self.queues.running_mut(portion.sequence).prune(&mut self.kv);
                self.portion(portion.sequence, 1)
            } else {
                *portion
            }
        });
        grown.contains(&true).then(|| plain.collect())
    }

    /// Logs a memory shortage once, although every step may meet it until memory is free again.
    fn note_shortage(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_short, true) {
            tracing::warn!(why, "a step has too little memory; steps run in parts until memory is free");
        }
    }

    fn run_in_parts(&mut self, plan: &[ScheduledTokens], why: &str) {
        match plan {
            [] => {}
            [alone] if alone.count <= BLOCK_TOKENS => self.refuse(*alone, why),
            // The rest of the prompt follows in the next step.
            [alone] => {
                let half = self.portion(alone.sequence, alone.count.div_ceil(2));
                self.run_whole(&[half]);
            }
            _ => {
                let mut parts = plan.to_vec();
                // Runs from the back, since an ended sequence leaves `running` and shifts later indices.
                parts.sort_unstable_by_key(|portion| std::cmp::Reverse(portion.sequence));
                for part in parts {
                    self.run_whole(&[part]);
                    if self.computing.is_lost() {
                        return;
                    }
                }
            }
        }
    }

    /// Fails a request for which the device lacks memory even alone.
    fn refuse(&mut self, portion: ScheduledTokens, why: &str) {
        let caller = self.queues.running()[portion.sequence].caller;
        let message = format!("no memory for this request now: {why}; or send it again later");
        tracing::error!(request = caller.request, why, "no memory for a request");
        self.outboxes
            .output(caller, failure(caller.request, WireError { code: ErrorCode::NoMemory, message }));
        let sequence = self.queues.end(portion.sequence);
        self.retire(sequence);
    }
}

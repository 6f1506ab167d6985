//! Continuous batching: decides which sequences take part in a step, their tokens, and which is preempted.
//!
//! The decision maps a snapshot to a step. Every decoding sequence advances by one token; prompts share a
//! separate token budget, so decode and prefill do not delay each other. The oldest sequences get blocks
//! first and the youngest is preempted first. The oldest is never preempted, so some sequence always ends,
//! and every sequence becomes the oldest in time.

/// Limits of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Maximum number of sequences per step.
    pub max_running: usize,
    /// Maximum number of prompt tokens per step; longer prompts are cut.
    pub chunk_tokens: usize,
    /// Maximum number of scored prompt tokens per step: each needs a row of logits as long as the vocabulary.
    pub scored_tokens: usize,
}

/// Progress of a running sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunningStage {
    /// The sequence takes part in every step with one token.
    Decoding {
        /// Blocks that the sequence lacks for that token: none or one.
        missing_blocks: usize,
    },
    /// The prompt is not computed yet.
    Prompt {
        /// Number of prompt tokens left to compute.
        pending: usize,
        /// Tokens of the prompt that need logits.
        report: PromptLogits,
    },
    /// The sequence waits for an event outside the pass and takes no part in the step.
    Waiting,
}

/// Tokens of a prompt for which the pass computes logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptLogits {
    /// Only the last token needs logits.
    Last,
    /// Each token needs logits, except the virtual tokens that a prefix adapter puts in front.
    Each {
        /// Number of virtual tokens left to compute.
        virtual_tokens: usize,
    },
}

/// Input of the decision.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// Running sequences in order of arrival.
    pub running: &'a [RunningStage],
    /// Number of blocks that can be assigned.
    pub free_blocks: usize,
}

/// Next tokens of a running sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTokens {
    /// Index of the sequence in [`Snapshot::running`].
    pub sequence: usize,
    /// Number of tokens, at least one.
    pub count: usize,
}

/// Result of the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepDecision {
    /// Blocks are short: preempt the youngest running sequence, then decide again.
    GiveWay,
    /// Compute these sequences, decoding ones first, then prompts. Blocks suffice for all of them.
    Compute(Vec<StepTokens>),
}

impl Snapshot<'_> {
    /// Decides what the next step computes.
    #[must_use]
    pub fn step(&self, limits: &BatchLimits) -> StepDecision {
        let mut shares = Vec::with_capacity(self.running.len());
        let mut free_blocks = self.free_blocks;
        for (sequence, stage) in self.running.iter().enumerate() {
            let RunningStage::Decoding { missing_blocks } = *stage else { continue };
            match free_blocks.checked_sub(missing_blocks) {
                Some(left) => free_blocks = left,
                None => return StepDecision::GiveWay,
            }
            shares.push(StepTokens { sequence, count: 1 });
        }
        self.share_prompts(limits, &mut shares);
        StepDecision::Compute(shares)
    }

    /// Shares the budget first come, first served; beside other prompts, one takes at most three quarters.
    fn share_prompts(&self, limits: &BatchLimits, shares: &mut Vec<StepTokens>) {
        let budget = limits.chunk_tokens;
        let prompts = || {
            self.running.iter().enumerate().filter_map(|(sequence, stage)| match *stage {
                RunningStage::Prompt { pending, report } => Some((sequence, pending, report)),
                RunningStage::Decoding { .. } | RunningStage::Waiting => None,
            })
        };
        let share = if prompts().nth(1).is_some() { budget - budget / 4 } else { budget };
        let (mut left, mut scored_left) = (budget, limits.scored_tokens);
        for (sequence, pending, report) in prompts() {
            let mut count = pending.min(share).min(left);
            match report {
                PromptLogits::Last => {}
                PromptLogits::Each { virtual_tokens: 0 } => {
                    count = count.min(scored_left);
                    scored_left -= count;
                }
                // Virtual tokens precede the prompt and need no logits.
                PromptLogits::Each { virtual_tokens } => count = count.min(virtual_tokens),
            }
            left -= count;
            if count > 0 {
                shares.push(StepTokens { sequence, count });
            }
        }
    }
}

/// Whether a sequence that needs `missing_blocks` of `free_blocks` may join `running` others. One block is
/// left for each running sequence; otherwise the new one would soon be preempted.
#[must_use]
pub fn may_enter(limits: &BatchLimits, running: usize, missing_blocks: usize, free_blocks: usize) -> bool {
    running < limits.max_running && free_blocks >= missing_blocks + running
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: BatchLimits = BatchLimits { max_running: 4, chunk_tokens: 64, scored_tokens: 16 };

    fn decoding(missing_blocks: usize) -> RunningStage {
        RunningStage::Decoding { missing_blocks }
    }

    fn prompt(pending: usize) -> RunningStage {
        RunningStage::Prompt { pending, report: PromptLogits::Last }
    }

    fn shares(running: &[RunningStage], free_blocks: usize) -> Vec<(usize, usize)> {
        match (Snapshot { running, free_blocks }).step(&LIMITS) {
            StepDecision::Compute(shares) => {
                shares.iter().map(|share| (share.sequence, share.count)).collect()
            }
            StepDecision::GiveWay => panic!("there are blocks"),
        }
    }

    #[test]
    fn everyone_who_generates_goes_on_and_prompts_share_what_is_left_to_them() {
        assert_eq!(shares(&[prompt(100)], 0), [(0, 64)]);
        assert_eq!(shares(&[decoding(0), prompt(100), decoding(1)], 1), [(0, 1), (2, 1), (1, 64)]);
        assert_eq!(shares(&[prompt(100), prompt(100), prompt(1)], 0), [(0, 48), (1, 16)]);
        assert_eq!(shares(&[prompt(10), prompt(10)], 0), [(0, 10), (1, 10)]);
    }

    #[test]
    fn one_that_waits_takes_no_part_and_keeps_nobody_waiting() {
        assert_eq!(
            shares(&[RunningStage::Waiting, decoding(0), prompt(100), RunningStage::Waiting], 0),
            [(1, 1), (2, 64)]
        );
        assert_eq!(shares(&[RunningStage::Waiting], 0), []);
    }

    #[test]
    fn scored_prompts_take_as_many_tokens_as_there_may_be_rows_but_virtual_ones_have_none() {
        let scored = |virtual_tokens| RunningStage::Prompt {
            pending: 40,
            report: PromptLogits::Each { virtual_tokens },
        };
        assert_eq!(shares(&[scored(0)], 0), [(0, 16)]);
        assert_eq!(shares(&[scored(0), scored(0), prompt(9)], 0), [(0, 16), (2, 9)]);
        assert_eq!(shares(&[scored(20), scored(0)], 0), [(0, 20), (1, 16)]);
    }

    #[test]
    fn the_oldest_get_blocks_first_and_someone_gives_way_where_there_are_too_few() {
        assert_eq!(shares(&[decoding(1), decoding(1)], 2).len(), 2);
        let short = Snapshot { running: &[decoding(1), decoding(1), prompt(5)], free_blocks: 1 };
        assert_eq!(short.step(&LIMITS), StepDecision::GiveWay);
    }

    #[test]
    fn a_newcomer_leaves_a_block_to_each_that_runs() {
        assert!(may_enter(&LIMITS, 3, 5, 8));
        assert!(!may_enter(&LIMITS, 3, 5, 7));
        assert!(!may_enter(&LIMITS, 4, 0, 100));
    }

    fn stage() -> impl Strategy<Value = RunningStage> {
        let report = prop_oneof![
            Just(PromptLogits::Last),
            (0..40usize).prop_map(|virtual_tokens| PromptLogits::Each { virtual_tokens })
        ];
        prop_oneof![
            (0..2usize).prop_map(decoding),
            (1..200usize, report).prop_map(|(pending, report)| RunningStage::Prompt { pending, report }),
            Just(RunningStage::Waiting)
        ]
    }

    proptest! {
        #[test]
        fn a_step_is_within_its_limits_and_never_empty(
            running in prop::collection::vec(stage(), 1..20), free_blocks in 0..20usize, chunk_tokens in 4..100usize,
        ) {
            let limits = BatchLimits { chunk_tokens, ..LIMITS };
            let StepDecision::Compute(shares) = (Snapshot { running: &running, free_blocks }).step(&limits) else {
                let needed: usize = running.iter().map(|stage| match stage {
                    RunningStage::Decoding { missing_blocks } => *missing_blocks,
                    RunningStage::Prompt { .. } | RunningStage::Waiting => 0,
                }).sum();
                prop_assert!(needed > free_blocks, "nobody gives way without need");
                return Ok(());
            };
            let mut prompt_tokens = 0;
            for share in &shares {
                match running[share.sequence] {
                    RunningStage::Decoding { .. } => prop_assert_eq!(share.count, 1),
                    RunningStage::Prompt { pending, .. } => {
                        prop_assert!(share.count > 0 && share.count <= pending);
                        prompt_tokens += share.count;
                    }
                    RunningStage::Waiting => prop_assert!(false, "it takes no part"),
                }
            }
            let all_wait = running.iter().all(|stage| *stage == RunningStage::Waiting);
            prop_assert!(prompt_tokens <= chunk_tokens && shares.is_empty() == all_wait);
            let decoding = running.iter().filter(|stage| matches!(stage, RunningStage::Decoding { .. })).count();
            prop_assert_eq!(shares.iter().filter(|share| matches!(running[share.sequence], RunningStage::Decoding { .. })).count(), decoding);
        }
    }
}

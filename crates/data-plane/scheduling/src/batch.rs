//! Continuous batching: who takes part in a step, with how many tokens, and who has to give way.
//!
//! A snapshot goes in, a step comes out. Everyone who generates goes on by a token; prompts share a budget on top of
//! that, so neither keeps the other waiting. Blocks are given to the oldest first and taken from the youngest: the
//! oldest never gives way, so there is always one that ends, and everyone becomes the oldest.

/// What a step is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Sequences computed together.
    pub max_running: usize,
    /// Prompt tokens of a step; prompts are cut to fit.
    pub chunk_tokens: usize,
    /// Prompt tokens of a step that may be scored: each has a row of logits, as long as the vocabulary.
    pub scored_tokens: usize,
}

/// Where a running sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunningStage {
    /// It takes part in every step, with one token.
    Decoding {
        /// Blocks it needs for that token beside its own: none or one.
        missing_blocks: usize,
    },
    /// Its prompt is not computed yet.
    Prompt {
        /// Tokens that are left to compute.
        pending: usize,
        /// What becomes of them.
        report: PromptLogits,
    },
    /// It waits for something outside of the pass, and takes no part in the step.
    Waiting,
}

/// Whether logits are owed for the tokens of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptLogits {
    /// For none but the last.
    Last,
    /// For each, but for so many ahead of them, which an adapter has put there.
    Each {
        /// Tokens that are left of those.
        virtual_tokens: usize,
    },
}

/// What there is to decide about.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// The running sequences, in order of arrival.
    pub running: &'a [RunningStage],
    /// Blocks that can be given out.
    pub free_blocks: usize,
}

/// The next tokens of a running sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTokens {
    /// Its place among those that run.
    pub sequence: usize,
    /// How many tokens, at least one.
    pub count: usize,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepDecision {
    /// Blocks are short: the youngest that runs goes back to the queue. Then there is to be decided anew.
    GiveWay,
    /// These compute: first those that decode, then prompts. There are blocks for all of them.
    Compute(Vec<StepTokens>),
}

impl Snapshot<'_> {
    /// Decides.
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

    /// First come, first served; but a prompt that would take the whole step for itself leaves a quarter of it to the
    /// next ones.
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
                // They go ahead of the prompt: no logits are owed for them.
                PromptLogits::Each { virtual_tokens } => count = count.min(virtual_tokens),
            }
            left -= count;
            if count > 0 {
                shares.push(StepTokens { sequence, count });
            }
        }
    }
}

/// Whether one more may run beside `running` others, if it needs `missing_blocks` of the `free_blocks`. A block is left
/// for each that runs, or the newcomer would soon have to give way again.
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

//! Lays out training sequences as rows of a pass.

use kernels::backward::attention::SequenceRows;
use types::BlockId;

use super::{Example, TrainableAdapter};
use crate::{
    backward::saved_activations::{Tape, TargetRow},
    deltas::prepared::PreparedAdapter,
    forward::{BLOCK_TOKENS, LogitRows, SequenceSlice},
};

pub(super) fn tape(learner: &TrainableAdapter, examples: &[Example<'_>]) -> Tape {
    let virtual_tokens = learner.prepared.virtual_tokens();
    let mut tape = Tape::default();
    let mut first = 0;
    for (sequence, example) in examples.iter().enumerate() {
        let rows = first + virtual_tokens..;
        let targets = rows.zip(example.targets).filter_map(|(row, target)| Some((row, (*target)?)));
        tape.targets.extend(targets.map(|(row, token)| TargetRow { row, token, sequence }));
        let count = virtual_tokens + example.tokens.len();
        // Virtual tokens may have any token id.
        let tokens = std::iter::repeat_n(0, virtual_tokens).chain(example.tokens.iter().copied());
        tape.tokens.push(tokens.collect());
        tape.sequences.push(SequenceRows { first, count });
        tape.dropouts.extend(example.dropout);
        first += count;
    }
    tape
}

pub(super) fn blocks(sequences: &[SequenceRows]) -> Vec<Vec<BlockId>> {
    let mut next = 0..;
    let of =
        |rows: &SequenceRows| next.by_ref().take(rows.count.div_ceil(BLOCK_TOKENS)).map(BlockId).collect();
    sequences.iter().map(of).collect()
}

pub(super) fn batch<'a>(
    tape: &'a Tape,
    blocks: &'a [Vec<BlockId>],
    learner: &'a TrainableAdapter,
) -> Vec<SequenceSlice<'a, PreparedAdapter>> {
    let (adapter, logits) = (Some(&learner.prepared), LogitRows::None);
    let slice = |(tokens, blocks): (&'a Vec<u32>, &'a Vec<BlockId>)| SequenceSlice {
        tokens,
        start: 0,
        blocks,
        trunk: &[],
        adapter,
        logits,
    };
    tape.tokens.iter().zip(blocks).map(slice).collect()
}

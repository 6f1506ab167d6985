//! Draft tokens that are verified in exact arithmetic, with any masking.

use std::path::Path;

use crate::support::{
    bits, blocks, generate,
    oracle_draft::{AlternatingOracle, drafted, samplings},
    ring::{RING, pads, ring_executor, shares},
    split_logits, split_masked, split_over, tiny, tokens,
};
use client::{
    generate::GenerateRequest,
    masking::RowProtection,
    speculative::DraftPolicy,
    split_model::{SplitModel, SplitOptions},
};
use model::forward::{LogitRows, SequenceSlice, Trunk};
use speculation::baselines::BaselineRule;

/// Models of all modes of exact arithmetic.
fn exact(path: &Path, directory: &Path) -> [SplitModel; 3] {
    let modes = [RING, shares(ring_executor(path)).into(), RowProtection::Pads(pads(path, directory)).into()];
    let options = SplitOptions {
        effort: DraftPolicy::Compared(BaselineRule::Nodes(12)),
        kv_bytes: 32 << 20,
        ..SplitOptions::default()
    };
    modes.map(|masking| split_masked(Box::new(ring_executor(path)), path, masking, &options))
}

#[test]
fn drafted_answers_of_every_exact_mode_are_those_of_plain_decoding() {
    let (path, directory) = (tiny("llama-tied"), tempfile::tempdir().unwrap());
    let mut plain = split_over(Box::new(ring_executor(&path)), &path, RING);
    let vocab_size = plain.config().vocab_size;
    let mut models = exact(&path, directory.path());
    for sampling in samplings(vocab_size) {
        let task = GenerateRequest {
            prompt: tokens(13, vocab_size),
            sampling,
            max_tokens: 24,
            stop_tokens: Vec::new(),
        };
        let expected = generate(&mut plain, &task, None);
        for model in &mut models {
            let mut planted = AlternatingOracle::new(&expected.tokens, vocab_size);
            let found = drafted(model, &task, None, &mut planted);
            assert_eq!(found.tokens, expected.tokens, "{}", model.mode());
            assert!(found.drafted.accepted > 5, "{}: {:?}", model.mode(), found.drafted);
        }
    }
}

/// Logits of a prompt and of two branches after it, in one pass.
fn tree_logits(model: &mut SplitModel, prompt: &[u32], branches: [&[u32]; 2]) -> Vec<f32> {
    let (blocks, mut logits, mut begun) = (blocks(), Vec::new(), prompt.len());
    let trunks = branches.map(|branch| {
        let trunk = [Trunk { back: begun, rows: prompt.len(), start: 0 }];
        begun += branch.len();
        trunk
    });
    let slice = |at: usize, trunk, tokens, start| SequenceSlice {
        trunk,
        tokens,
        start,
        blocks: &blocks[4 * at..4 * at + 4],
        adapter: None,
        logits: LogitRows::All,
    };
    let [left, right] = branches;
    let batch = [
        slice(0, &[], prompt, 0),
        slice(1, &trunks[0], left, prompt.len()),
        slice(2, &trunks[1], right, prompt.len()),
    ];
    model.forward(&batch, &mut logits).unwrap();
    logits
}

#[test]
fn every_row_of_a_tree_has_the_same_bits_in_every_exact_mode_and_those_it_has_alone() {
    let (path, directory) = (tiny("llama-tied"), tempfile::tempdir().unwrap());
    let [mut plain, mut shares, mut pads] = exact(&path, directory.path());
    let vocab_size = plain.config().vocab_size;
    let all = tokens(18, vocab_size);
    let (prompt, branches) = (&all[..11], [&all[11..15], &all[15..]]);
    let expected = tree_logits(&mut plain, prompt, branches);
    assert_eq!(bits(&tree_logits(&mut shares, prompt, branches)), bits(&expected));
    assert_eq!(bits(&tree_logits(&mut pads, prompt, branches)), bits(&expected));
    let mut begun = 11 * vocab_size;
    for branch in branches {
        let alone = split_logits(&mut plain, &[prompt, branch].concat(), None);
        let (rows, end) = (&alone[11 * vocab_size..], begun + branch.len() * vocab_size);
        assert_eq!(bits(rows), bits(&expected[begun..end]));
        begun = end;
    }
}

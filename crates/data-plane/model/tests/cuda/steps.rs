//! Batches, chunks, replayed decode steps and sampling on the device, compared with the pass on the CPU.

use std::sync::Arc;

use model::{
    cuda::{CudaModel, Graphs},
    deltas::prepared::PreparedAdapter,
    forward::{ForwardPass as _, LogitRows},
    resident::KvPrecision,
    sampling::{self, Probability, Sampling, SamplingParams, TokenCounts},
};
use types::BlockId;

use crate::support::{CudaSequence, adapter, at, device, error, golden, on_cpu, on_device, upload};

/// A 32-bit model: both devices agree except for the order of sums.
const MODEL: &str = "llama-tied";
const TOLERANCE: f32 = 1e-3;

/// Every golden adapter of the model, on the device of `pass`.
fn adapters(pass: &CudaModel) -> Vec<Arc<PreparedAdapter>> {
    let mut paths: Vec<_> = std::fs::read_dir(golden("adapters").join(MODEL))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    let all = paths.iter().map(|path| adapter(pass, path));
    all.filter(|adapter| adapter.virtual_tokens() == 0).collect()
}

fn sequences(adapters: &[Arc<PreparedAdapter>]) -> Vec<CudaSequence<'_>> {
    let lengths = [1, 7, 16, 17, 40, 33, 5, 64];
    let own = |i: usize| if i.is_multiple_of(3) { None } else { adapters.get(i % adapters.len()) };
    lengths.iter().enumerate().map(|(i, &length)| CudaSequence::new(i as u32, length, own(i))).collect()
}

#[test]
fn a_batch_of_many_adapters_gives_what_the_cpu_gives() {
    let Some(cuda) = device() else { return };
    let mut pass = on_device(&cuda, MODEL, Graphs::Avoid);
    let mut cpu = on_cpu(MODEL);
    let adapters = adapters(&pass);
    let sequences = sequences(&adapters);
    let batch = |logits| -> Vec<_> {
        sequences.iter().map(|sequence| sequence.slice(0..sequence.tokens.len(), logits)).collect()
    };
    for logits in [LogitRows::Last, LogitRows::All] {
        let (mut on_gpu, mut expected) = (Vec::new(), Vec::new());
        pass.forward(&batch(logits), &mut on_gpu).unwrap();
        // The CPU reads adapters from the host tier.
        let copies: Vec<_> = adapters.iter().map(|adapter| adapter.device()).collect();
        adapters.iter().for_each(|adapter| adapter.set_device(None));
        cpu.forward(&batch(logits), &mut expected);
        adapters.iter().zip(copies).for_each(|(adapter, copy)| adapter.set_device(copy));
        let error = error(&on_gpu, &expected);
        assert!(error <= TOLERANCE, "{logits:?}: {error}");
    }
}

#[test]
fn a_prompt_in_chunks_gives_what_it_gives_in_one_piece() {
    let Some(cuda) = device() else { return };
    let mut pass = on_device(&cuda, MODEL, Graphs::Use);
    let sequence = CudaSequence::new(0, 64, None);
    let (mut whole, mut chunked) = (Vec::new(), Vec::new());
    pass.forward(&[sequence.slice(0..64, LogitRows::Last)], &mut whole).unwrap();
    for (start, end) in [(0, 5), (5, 21), (21, 22), (22, 60), (60, 64)] {
        let logits = if end == 64 { LogitRows::Last } else { LogitRows::None };
        pass.forward(&[sequence.slice(start..end, logits)], &mut chunked).unwrap();
        assert_eq!(chunked.is_empty(), end < 64);
    }
    assert!(error(&whole, &chunked) <= TOLERANCE);
}

#[test]
fn a_prefix_that_came_as_bytes_from_another_model_has_the_bits_of_one_computed_here() {
    let Some(cuda) = device() else { return };
    for kv_dtype in [Some(KvPrecision::F32), Some(KvPrecision::F16)] {
        let [mut first, mut second] = [Graphs::Avoid, Graphs::Use]
            .map(|graphs| at(&cuda, &golden("models").join(MODEL), kv_dtype, graphs));
        let (here, mut there) = (CudaSequence::new(0, 64, None), CudaSequence::new(0, 64, None));
        there.blocks.iter_mut().for_each(|block| block.0 = 70 - 7 * block.0);
        let mut logits = Vec::new();
        first.forward(&[here.slice(0..48, LogitRows::None)], &mut logits).unwrap();
        let mut bytes = vec![0; first.block_bytes()];
        for (from, to) in here.blocks.iter().zip(&there.blocks).take(3) {
            first.read_block(*from, &mut bytes).unwrap();
            second.write_block(*to, &bytes).unwrap();
        }
        for (start, end) in [(48, 62), (62, 63), (63, 64)] {
            let [mut expected, mut moved] = [const { Vec::new() }; 2];
            first.forward(&[here.slice(start..end, LogitRows::Last)], &mut expected).unwrap();
            second.forward(&[there.slice(start..end, LogitRows::Last)], &mut moved).unwrap();
            assert!(error(&moved, &expected) == 0.0, "{kv_dtype:?}, from token {start}");
        }
    }
}

#[test]
fn replayed_decode_steps_give_what_steps_launch_by_launch_give() {
    let Some(cuda) = device() else { return };
    let mut passes = [Graphs::Avoid, Graphs::Use].map(|graphs| on_device(&cuda, MODEL, graphs));
    let mut given: Vec<Vec<Vec<f32>>> = Vec::new();
    for pass in &mut passes {
        let adapters = adapters(pass);
        let adapters: Vec<_> = adapters.into_iter().filter(|adapter| adapter.scales().is_none()).collect();
        let sequences = sequences(&adapters);
        let mut steps = Vec::new();
        let prompts: Vec<_> = sequences.iter().filter(|sequence| sequence.tokens.len() > 4).collect();
        let begin: Vec<_> = prompts
            .iter()
            .map(|sequence| sequence.slice(0..sequence.tokens.len() - 4, LogitRows::None))
            .collect();
        pass.forward(&begin, &mut Vec::new()).unwrap();
        // The batch shrinks once, and a prompt runs between: graphs of both shapes are captured, replayed and
        // kept.
        for (step, count) in [(4, 6), (3, 6), (2, 6), (1, 5)] {
            let next: Vec<_> = prompts[..count]
                .iter()
                .map(|sequence| {
                    let at = sequence.tokens.len() - step;
                    sequence.slice(at..at + 1, LogitRows::Last)
                })
                .collect();
            let mut logits = Vec::new();
            pass.forward(&next, &mut logits).unwrap();
            steps.push(logits);
            let other = CudaSequence::new(9, 30, adapters.first());
            pass.forward(&[other.slice(0..30, LogitRows::Last)], &mut Vec::new()).unwrap();
        }
        given.push(steps);
    }
    for (step, (launched, replayed)) in given[0].iter().zip(&given[1]).enumerate() {
        let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(launched), bits(replayed), "step {step}");
    }
}

#[test]
fn tokens_drawn_on_the_device_are_those_drawn_from_its_logits() {
    let Some(cuda) = device() else { return };
    let mut pass = on_device(&cuda, MODEL, Graphs::Use);
    assert!(pass.draws());
    let requests = [
        Sampling { temperature: 0.0, ..Sampling::default() },
        Sampling::default(),
        Sampling { temperature: 0.7, top_p: 0.8, seed: 7, ..Sampling::default() },
        Sampling { top_k: 5, min_p: 0.05, seed: 9, ..Sampling::default() },
    ];
    let params = requests.map(|request| SamplingParams::new(request, pass.vocab_size()).unwrap());
    let sequences: Vec<CudaSequence<'_>> = (0..5).map(|index| CudaSequence::new(index, 20, None)).collect();
    let whole: Vec<_> = sequences.iter().map(|sequence| sequence.slice(0..20, LogitRows::Last)).collect();
    let mut logits = Vec::new();
    pass.forward(&whole, &mut logits).unwrap();
    let drawing: Vec<_> = sequences
        .iter()
        .enumerate()
        .map(|(index, sequence)| {
            let draw = params.get(index).and_then(|params| params.draw(20, Probability::Wanted));
            sequence.slice(0..20, draw.map_or(LogitRows::Last, LogitRows::Draw))
        })
        .collect();
    let mut rest = Vec::new();
    pass.forward(&drawing, &mut rest).unwrap();
    let width = pass.vocab_size();
    assert_eq!(rest.len(), width, "the row that nobody draws from");
    assert!(error(&rest, &logits[4 * width..]) == 0.0);
    assert_eq!(pass.drawn().len(), 4);
    for ((drawn, row), params) in pass.drawn().iter().zip(logits.chunks(width)).zip(&params) {
        let drawn = drawn.unwrap();
        let (logprob, _) = sampling::logprobs(row, drawn.token, 0);
        assert!((drawn.logprob - logprob).abs() < 1e-4, "{} and {logprob}", drawn.logprob);
        let expected = sampling::sample(&mut row.to_vec(), params, &TokenCounts::default(), 20, &[]);
        assert_eq!(drawn.token, expected);
    }
}

#[test]
fn what_was_planned_with_a_revoked_copy_is_not_launched_again() {
    let Some(cuda) = device() else { return };
    let mut pass = on_device(&cuda, MODEL, Graphs::Use);
    let path = golden("adapters").join(MODEL).join("rank64-all-linear");
    let prepared = adapter(&pass, &path);
    let sequence = CudaSequence::new(0, 20, Some(&prepared));
    pass.forward(&[sequence.slice(0..19, LogitRows::Last)], &mut Vec::new()).unwrap();
    let step = |pass: &mut CudaModel| {
        let mut logits = Vec::new();
        pass.forward(&[sequence.slice(19..20, LogitRows::Last)], &mut logits).map(|()| logits)
    };
    let expected = step(&mut pass).unwrap();
    let copy = prepared.device().unwrap();
    let lent = lent(&pass);
    assert!(!lent.is_empty());
    copy.revoke();
    let garbage = vec![0xFF; pass.block_bytes()];
    lent.iter().for_each(|&block| pass.write_block(block, &garbage).unwrap());
    assert!(!copy.is_complete() && copy.next_bytes().is_none());
    // The device has no block of the adapter, and there is no worker.
    assert!(step(&mut pass).is_err() && !pass.is_lost());
    upload(&pass, &prepared);
    let again = step(&mut pass).unwrap();
    assert!(again.iter().zip(&expected).all(|(again, expected)| again.to_bits() == expected.to_bits()));
}

fn lent(pass: &CudaModel) -> Vec<BlockId> {
    let memory = pass.adapter_memory();
    (0..pass.kv_blocks() as u32).filter(|&block| !memory.pool.is_own(block)).map(BlockId).collect()
}

//! Split of the data into held-out and training examples.

use std::collections::BTreeSet;

use trainer::{
    adapter::AdapterSpec,
    batch_sampler::split,
    data::{DataItems, Example},
    job::DatasetSplit,
    plan::{InitialAdapter, JobPlan, JobPrecision},
    schedule::Decay,
};

pub(crate) fn plan(held_out: usize) -> JobPlan {
    JobPlan {
        start: InitialAdapter::New(AdapterSpec::Prefix { virtual_tokens: 1 }),
        learning_rate: 1e-3,
        decay: Decay::Cosine,
        warmup_steps: 0,
        batch_size: 1,
        epochs: 1,
        max_steps: None,
        weight_decay: 0.0,
        dropout: 0.0,
        max_grad_norm: 1.0,
        beta: 0.1,
        desirable_weight: 1.0,
        undesirable_weight: 1.0,
        held_out,
        seed: 3,
        precision: JobPrecision::Serving,
        max_tokens: 64,
        keep_best: false,
        patience: None,
        draft: None,
        grpo: None,
    }
}

/// Examples of the lines 1, 2, ..., with these counts per line.
fn items(counts: &[usize]) -> DataItems {
    let of_line = |(line, &count): (usize, &usize)| {
        (0..count).map(move |_| Example { line, tokens: vec![1, 2], weights: vec![1.0] })
    };
    DataItems::Examples((1..).zip(counts).flat_map(of_line).collect())
}

fn lines(items: &DataItems) -> Vec<u64> {
    items.lines(&(0..items.len()).collect::<Vec<_>>())
}

#[test]
fn a_conversation_that_became_several_examples_is_learned_or_held_out_as_a_whole() {
    let counts: Vec<usize> = (0..40).map(|line| 1 + line % 4).collect();
    let course = DatasetSplit::new(items(&counts), None, &plan(25));
    let [learned, held_out] = [course.learned(), course.held_out()].map(lines);
    assert_eq!(learned.len() + held_out.len(), counts.iter().sum::<usize>());
    let [learned, held_out]: [BTreeSet<u64>; 2] = [learned, held_out].map(BTreeSet::from_iter);
    assert!(learned.is_disjoint(&held_out), "{learned:?} and {held_out:?}");
    assert_eq!(held_out.len(), 10, "a quarter of the lines");
}

#[test]
fn of_lines_that_are_an_example_each_the_seed_decides_as_ever() {
    let course = DatasetSplit::new(items(&[1; 40]), None, &plan(25));
    let numbers = |lines: Vec<u64>| lines.into_iter().map(|line| line as usize - 1).collect::<Vec<_>>();
    let got = [course.learned(), course.held_out()].map(|items| numbers(lines(items)));
    assert_eq!(got, <[_; 2]>::from(split(40, 25, 3)));
}

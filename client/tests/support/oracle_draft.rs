//! Draft tokens with a known share of right ones.

use std::{convert::Infallible, ops::ControlFlow};

use client::{
    generate::{GenerateRequest, Generated},
    speculative::ClientDrafter,
    split_model::{ClientAdapter, SplitModel},
};
use model::sampling::{Sampling, SamplingParams};
use speculation::{
    draft::{Draft, DraftToken},
    tree::{NodeId, TokenTree},
};

/// Drafter that knows the answer: the right token is the first, the second or none of its draft tokens, in
/// turn.
pub struct AlternatingOracle {
    answer: Vec<u32>,
    said: usize,
    vocab_size: u32,
}

impl AlternatingOracle {
    pub fn new(answer: &[u32], vocab_size: usize) -> Self {
        Self { answer: answer.to_vec(), said: 0, vocab_size: vocab_size as u32 }
    }
}

impl Draft for AlternatingOracle {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        assert_eq!(tokens, &self.answer[self.said..][..tokens.len()], "the target's own tokens, in order");
        self.said += tokens.len();
        Ok(())
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        let place = self.said + tree.depth(at);
        let truth = self.answer.get(place).copied().unwrap_or(0);
        let wrong = (truth + 1 + place as u32) % self.vocab_size;
        let guesses = match place % 7 {
            2 | 5 => vec![(wrong, 0.5), (truth, 0.49)],
            6 => vec![(wrong, 0.9)],
            _ => vec![(truth, 0.9), (wrong, 0.09)],
        };
        Ok(guesses.into_iter().map(|(token, probability)| DraftToken { token, probability }).collect())
    }
}

pub fn drafted(
    model: &mut SplitModel,
    task: &GenerateRequest,
    adapter: Option<&ClientAdapter>,
    guesser: ClientDrafter<'_>,
) -> Generated {
    model.generate_drafted(task, adapter, guesser, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// Greedy sampling, and three seeds, one of them with penalties, which count earlier tokens.
pub fn samplings(vocab_size: usize) -> Vec<SamplingParams> {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let seeded = |seed| Sampling { temperature: 0.8, seed, ..Sampling::default() };
    let penalized =
        Sampling { repetition_penalty: 1.3, presence_penalty: 0.4, frequency_penalty: 0.2, ..seeded(3) };
    let params = |request| SamplingParams::new(request, vocab_size).unwrap();
    [greedy, seeded(1), seeded(2), penalized].map(params).into()
}

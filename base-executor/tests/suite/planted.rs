//! An author who knows the answers, for tests.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base_executor::engine::drafts::{Author, Drafts};
use policy::random::Rng;
use speculation::{
    draft::{Draft, Guess},
    tree::{NodeId, TokenTree},
};

/// What is said behind each prompt.
pub(crate) type Answers = Arc<Mutex<Vec<(Vec<u32>, Vec<u32>)>>>;

/// An author who knows the answers, and is wrong now and then.
pub(crate) struct Planted {
    answers: Answers,
    text: Vec<u32>,
    /// How often its first guess is right, of 1; where it is not, one of the others may be.
    right: f64,
    /// What a guess takes.
    takes: Duration,
}

impl Planted {
    /// Drafts by such authors.
    pub(crate) fn drafts(answers: &Answers, right: f64, takes: Duration) -> Drafts {
        let answers = Arc::clone(answers);
        Drafts::by(16, move |prompt, _| {
            Box::new(Planted { answers: Arc::clone(&answers), text: prompt.to_vec(), right, takes })
        })
    }
}

impl Draft for Planted {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.text.extend(tokens);
        Ok(())
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<Guess>, Infallible> {
        let begun = Instant::now();
        let mut text = self.text.clone();
        text.extend(at.into_iter().flat_map(|at| tree.path(at).iter()).map(|node| tree.token(node)));
        let answers = self.answers.lock().unwrap();
        let said = |(prompt, said): &(Vec<u32>, Vec<u32>)| {
            let rest = text.strip_prefix(&prompt[..])?;
            said.strip_prefix(rest)?.first().copied()
        };
        let truth = answers.iter().find_map(said);
        let rng =
            Rng::seeded(text.iter().fold(1u64, |hash, token| hash.wrapping_mul(31) + u64::from(*token)));
        let place = if rng.uniform(0) < self.right { 0 } else { 1 + rng.bits(1) as usize % 4 };
        let wrong = |rank: usize| (text.len() as u32 * 7 + rank as u32) % 60;
        let first = self.right.clamp(0.24, 0.95);
        let guess = |rank| Guess {
            token: truth.filter(|_| rank == place).unwrap_or(wrong(rank)),
            probability: if rank == 0 { first } else { (1.0 - first) / 3.0 },
        };
        let mut guesses: Vec<Guess> = (0..4).map(guess).collect();
        guesses.dedup_by_key(|guess| guess.token);
        while begun.elapsed() < self.takes {
            std::hint::spin_loop();
        }
        Ok(guesses)
    }
}

impl Author for Planted {}

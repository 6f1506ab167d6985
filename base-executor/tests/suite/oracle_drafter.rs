//! A drafter that knows the answers, for tests.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base_executor::{
    drafter::{DrafterFactory, SequenceDrafter},
    engine::drafts::Drafts,
};
use scheduling::random::Rng;
use shmproto::message::DraftKind;
use speculation::{
    draft::{Draft, DraftToken},
    hybrid_drafter::DraftCost,
    tree::{NodeId, TokenTree},
};

pub(crate) type KnownAnswers = Arc<Mutex<Vec<(Vec<u32>, Vec<u32>)>>>;

/// A drafter that knows the answers and is sometimes wrong.
pub(crate) struct OracleDrafter {
    answers: KnownAnswers,
    text: Vec<u32>,
    /// Probability of a right first draft token; otherwise one of the others may be right.
    right: f64,
    takes: Duration,
    price: Option<DraftCost>,
    spent: Duration,
}

impl OracleDrafter {
    pub(crate) fn drafts(answers: &KnownAnswers, right: f64, takes: Duration) -> Drafts {
        let answers = Arc::clone(answers);
        let author = move |prompt: &[u32], _| -> Box<dyn SequenceDrafter> {
            let (answers, text) = (Arc::clone(&answers), prompt.to_vec());
            Box::new(OracleDrafter { answers, text, right, takes, price: None, spent: Duration::ZERO })
        };
        Drafts::by(16, Some(DrafterFactory::new(DraftKind::Model, author)))
    }
}

impl Draft for OracleDrafter {
    type Error = Infallible;

    fn accept(&mut self, tokens: &[u32]) -> Result<(), Infallible> {
        self.text.extend(tokens);
        Ok(())
    }

    fn guesses(&mut self, tree: &TokenTree, at: Option<NodeId>) -> Result<Vec<DraftToken>, Infallible> {
        let (takes_s, first) = (self.takes.as_secs_f64(), self.right.clamp(0.24, 0.95));
        let pays = |price: &mut DraftCost| price.pay(Some(takes_s), (tree, at), tree.confidence(at) * first);
        if takes_s > 0.0 && !self.price.as_mut().is_some_and(pays) {
            return Ok(Vec::new());
        }
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
        let guess = |rank| DraftToken {
            token: truth.filter(|_| rank == place).unwrap_or(wrong(rank)),
            probability: if rank == 0 { first } else { (1.0 - first) / 3.0 },
        };
        let mut guesses: Vec<DraftToken> = (0..4).map(guess).collect();
        guesses.dedup_by_key(|guess| guess.token);
        while begun.elapsed() < self.takes {
            std::hint::spin_loop();
        }
        self.spent += begun.elapsed();
        Ok(guesses)
    }

    fn takes_time(&self) -> bool {
        true
    }
}

impl SequenceDrafter for OracleDrafter {
    fn set_price(&mut self, price: DraftCost) {
        self.price = Some(price);
    }

    fn take_spent(&mut self) -> Duration {
        std::mem::take(&mut self.spent)
    }

    fn is_of_model(&self, _: &TokenTree, _: NodeId) -> bool {
        true
    }
}

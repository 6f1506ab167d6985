//! BLD, the Big Little Decoder (CHECKLIST L-17): **lossy**, here for comparison alone.
//!
//! The little model goes on as long as it is sure; at a token of which it is not the big one is asked, reads what was said since, and says
//! that token. What the little one was sure of and wrong about stays: nothing is computed again. It is told here how much of the
//! answer that is.

use std::time::Instant;

use anyhow::Result;
use model::forward::BLOCK_TOKENS;
use types::BlockId;

use super::StreamedSide;
use crate::oracle_draft::OracleDraft;

/// The little model hands over to the big one below this confidence.
const SURE: f64 = 0.9;
/// Most tokens that it says in a row.
const MOST: usize = 16;

/// What came of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct BigLittle {
    pub(super) token_s: f64,
    /// Share of tokens that are not the big model's.
    pub(super) wrong: f64,
}

/// Has both say `tokens` tokens behind `prompt`.
///
/// # Errors
/// If a pass fails.
pub(super) fn decode(
    side: &mut StreamedSide,
    little: &OracleDraft,
    prompt: &[u32],
    tokens: usize,
) -> Result<BigLittle> {
    let each = (prompt.len() + tokens + 2 * MOST).div_ceil(BLOCK_TOKENS);
    let blocks: Vec<BlockId> = (0..each as u32).map(BlockId).collect();
    side.pass(prompt, 0, &blocks, each)?;
    let mut said = prompt.to_vec();
    // What the big one said behind the prompt is not read yet.
    said.push(little.answer[0]);
    let (mut place, mut wrong, mut read) = (1, 0, prompt.len());
    let begun = Instant::now();
    while place <= tokens {
        for _ in 0..MOST {
            little.work();
            let guesses = little.at(place);
            let Some(guess) = guesses.first().filter(|guess| guess.probability >= SURE) else { break };
            wrong += usize::from(guess.token != little.answer[place]);
            said.push(guess.token);
            place += 1;
        }
        side.pass(&said[read..], read, &blocks, each)?;
        read = said.len();
        // Its own token, behind all that was said.
        said.push(little.answer[place]);
        place += 1;
    }
    let said = (place - 1) as f64;
    Ok(BigLittle { token_s: begun.elapsed().as_secs_f64() / said, wrong: wrong as f64 / said })
}

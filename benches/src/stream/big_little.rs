//! BLD, the Big Little Decoder: **lossy**, here only for comparison.
//!
//! The little model generates while it is confident. At an unsure token the big model reads the text since
//! its last turn and generates that token. Confident errors of the little model stay, since nothing is
//! computed again. Here an oracle with a known share of errors plays the little model.

use std::time::Instant;

use anyhow::Result;
use model::forward::BLOCK_TOKENS;
use types::BlockId;

use super::StreamedSide;
use crate::oracle_draft::OracleDraft;

/// Confidence below which the little model hands over to the big one.
const SURE: f64 = 0.9;
const MOST: usize = 16;

#[derive(Debug, Clone, Copy)]
pub(super) struct BigLittle {
    pub(super) token_s: f64,
    /// Share of tokens that differ from the big model's.
    pub(super) wrong: f64,
}

/// Generates `tokens` tokens after `prompt` with both models.
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
    // The big model has not yet read its own token after the prompt.
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
        // The big model's own token, after all others.
        said.push(little.answer[place]);
        place += 1;
    }
    let said = (place - 1) as f64;
    Ok(BigLittle { token_s: begun.elapsed().as_secs_f64() / said, wrong: wrong as f64 / said })
}

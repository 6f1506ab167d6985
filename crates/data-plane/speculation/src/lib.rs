//! Speculative decoding: one pass of the target model verifies many draft tokens (EdgeLLM, DESIGN 11).
//!
//! ```text
//! Draft -> TreeGrowth -> TokenTree -> worth -> Segments -> (target's pass) -> TreeVerifier -> Threshold
//!                           +-- DraftAhead: grows during the pass ----------------+
//! ```
//!
//! Speculation never changes an answer. At each position the target samples with its own generator, keyed by
//! seed and position; a draft token is accepted only if it is the sampled token. Only the latency changes.
//!
//! # Layout
//!
//! - [`tree`]: the token tree, and its layout in rows of a pass.
//! - [`verification`]: the comparison of a tree with the target's tokens.
//! - [`threshold`]: the confidence below which a tree is verified, learned from earlier verifications.
//! - [`draft`]: the drafter traits. [`ngram`]: the drafter over the sequence's own tokens, without a model.
//! - [`hybrid_drafter`]: the n-gram drafter, with a model where the table is unlikely to be right.
//! - [`calibration`]: measured acceptance of a model's draft tokens. `acceptance_rate`: a decaying average.
//! - [`tree_expansion`]: the choice of the branch that gets the next token.
//! - [`baselines`]: the tree shapes that the paper compares with.
//! - [`verify_selection`]: the choice of draft tokens worth a row, and of model runs worth their time.
//! - [`draft_budget`]: the time that drafting may take.
//! - [`draft_ahead`]: drafting during verification. [`draft_deadline`]: its time limit.
//! - [`lru`]: statistics of the most recent adapters and clients.
//!
//! # Principles
//!
//! - No code here knows a model, reads a clock or draws a random number.
//! - Confidences are measured acceptance probabilities, not the probabilities that a model computes.

#![forbid(unsafe_code)]

mod acceptance_rate;
pub mod baselines;
pub mod calibration;
pub mod draft;
pub mod draft_ahead;
pub mod draft_budget;
pub mod draft_deadline;
pub mod hybrid_drafter;
pub mod lru;
pub mod ngram;
pub mod threshold;
pub mod tree;
pub mod tree_expansion;
pub mod verification;
pub mod verify_selection;

//! Speculation: tokens are guessed, and many guesses are verified in one pass of the target (EdgeLLM; DESIGN section 11).
//!
//! ```text
//! Draft -> Growth -> TokenTree -> worth -> Segments -> (the target's pass) -> Walk -> Verdict -> Threshold
//!                       +-- Ahead: grows on meanwhile ----------------------------------+
//! ```
//!
//! No answer changes: at each position the target draws with its own generator, keyed by seed and position, and a drafted
//! token survives if it is the one drawn. What is decided here is how soon an answer comes, never what it is.
//!
//! # Layout
//!
//! - [`tree`]: drafted tokens, and how they lie in rows of a pass.
//! - [`verification`]: what the target says of them.
//! - [`threshold`]: how unlikely a tree becomes before it is verified, learned from verdicts.
//! - [`draft`]: who guesses. [`ngram`]: out of what the sequence said before, without a model. [`hybrid_drafter`]: a model where that
//!   does not know.
//! - [`calibration`]: how often what a model guesses comes true; `acceptance_rate`: how often anything does.
//! - [`tree_expansion`]: which branch of a tree gets the next token.
//! - [`baselines`]: the shapes of trees that the paper compares with.
//! - [`verify_selection`]: which drafted tokens are worth a row of the pass, and which guesses the time they take. [`draft_budget`]: how much of
//!   it there is.
//! - [`draft_ahead`]: what is drafted while the target is busy, and what of it is kept. [`draft_deadline`]: for how long.
//! - [`lru`]: what was learned about the adapters and clients that came last.
//!
//! # Principles
//!
//! - Nothing here knows a model, reads a clock or draws a number.
//! - Confidences are probabilities: whoever guesses says how often such guesses come true, not how sure a model sounds.

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

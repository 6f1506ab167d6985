//! A real worker process against a board of the test.

#![expect(clippy::unwrap_used, reason = "a test that panics has failed, which is what is wanted")]

mod executor;
mod hostile;
mod images;
mod life;
mod sums;
mod system;
mod worker;

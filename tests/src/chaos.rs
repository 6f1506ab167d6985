//! Processes that fail at failpoints while golden requests run.
//!
//! - [`failpoints`]: places where a process can be killed
//! - [`traffic`]: clients that repeat golden requests and accept only golden answers
//! - [`names`]: the possible registry contents after requests and a crash
//! - [`report`]: survived faults, a line for each run

pub mod failpoints;
pub mod names;
pub mod report;
pub mod traffic;

pub use failpoints::FailpointDirectory;
pub use names::PossibleNames;
pub use report::ChaosReport;
pub use traffic::{AdapterVariants, Traffic};

/// A deterministic generator (`splitmix64`).
#[derive(Debug, Clone)]
pub struct ChaosRng(u64);

impl ChaosRng {
    /// Creates the generator of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).expect("smaller than the limit")
    }

    /// Returns one of `items` at random.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

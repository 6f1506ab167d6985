//! Processes that die at named places while golden requests run.
//!
//! - [`failpoints`]: where a process may be made to die, and what has to happen for it to get there
//! - [`traffic`]: clients that ask for golden answers all the time and take nothing else
//! - [`names`]: what the registry was told, what it acknowledged, and what it may hold after a crash
//! - [`report`]: what was survived, a line for each run

pub mod failpoints;
pub mod names;
pub mod report;
pub mod traffic;

pub use failpoints::FailpointDirectory;
pub use names::PossibleNames;
pub use report::ChaosReport;
pub use traffic::{AdapterVariants, Traffic};

/// A generator whose every run with a seed is the same (`splitmix64`).
#[derive(Debug, Clone)]
pub struct ChaosRng(u64);

impl ChaosRng {
    /// The generator of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % limit as u64).expect("smaller than the limit")
    }

    /// One of `items`.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

//! The work of helper processes, as a trait.

use serde::{Serialize, de::DeserializeOwned};

/// A kind of work whose cost a tenant chooses.
pub(super) trait Work: Send + Sync + 'static {
    /// First argument of a program that becomes the helper process.
    const ARGUMENT: &'static str;
    /// Name of the process in lists of processes, at most 15 bytes.
    const NAME: &'static std::ffi::CStr;
    /// Added to the process's niceness, because the threads that serve requests have priority.
    const NICENESS: i32;

    /// Data that every question needs; not counted to the memory limit.
    type Setup: Serialize + DeserializeOwned;
    type Question: DeserializeOwned + Send;
    type Answer: Serialize + DeserializeOwned + Send;

    fn new(setup: &Self::Setup) -> Self;

    fn answer(&self, question: Self::Question) -> Self::Answer;
}

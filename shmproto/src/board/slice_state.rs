//! State word of a slice: which worker holds the slice, for which job.

use super::WorkerNumber;

/// Number of a job; 0 means none and is skipped when the numbers wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JobNumber(pub(super) u32);

impl JobNumber {
    /// Number before the first job.
    pub(super) const NONE: Self = Self(0);

    pub(super) fn next(self) -> Self {
        Self(self.0.checked_add(1).unwrap_or(1))
    }
}

/// Content of a state word: `job u32 << 32 | worker u24 << 8 | state u8`.
///
/// The word names the claimant by worker number, not by slot. A worker that was fenced while stopped may
/// continue after its slot has a new worker, and must not be taken for that worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SliceWord {
    pub(super) job: JobNumber,
    pub(super) state: SlicePhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlicePhase {
    Open,
    Claimed(WorkerNumber),
    Done(WorkerNumber),
    Failed(WorkerNumber),
    Taken,
}

const OPEN: u8 = 1;
const CLAIMED: u8 = 2;
const DONE: u8 = 3;
const FAILED: u8 = 4;
const TAKEN: u8 = 5;

impl SliceWord {
    pub(super) fn encode(self) -> u64 {
        let (code, worker) = match self.state {
            SlicePhase::Open => (OPEN, 0),
            SlicePhase::Claimed(worker) => (CLAIMED, worker.get()),
            SlicePhase::Done(worker) => (DONE, worker.get()),
            SlicePhase::Failed(worker) => (FAILED, worker.get()),
            SlicePhase::Taken => (TAKEN, 0),
        };
        u64::from(self.job.0) << 32 | u64::from(worker) << 8 | u64::from(code)
    }

    /// Decodes a word from memory; `None` if no honest peer writes it.
    pub(super) fn decode(number: u64) -> Option<Self> {
        let [code, low, middle, high, job @ ..] = number.to_le_bytes();
        let claimant = u32::from_le_bytes([low, middle, high, 0]);
        let state = match (code, WorkerNumber::new(claimant)) {
            (OPEN, None) => SlicePhase::Open,
            (TAKEN, None) => SlicePhase::Taken,
            (CLAIMED, Some(worker)) => SlicePhase::Claimed(worker),
            (DONE, Some(worker)) => SlicePhase::Done(worker),
            (FAILED, Some(worker)) => SlicePhase::Failed(worker),
            _ => return None,
        };
        Some(Self { job: JobNumber(u32::from_le_bytes(job)), state })
    }

    /// Returns the worker number in a word, even if the rest is invalid.
    pub(super) fn claimant(number: u64) -> Option<WorkerNumber> {
        let [_, low, middle, high, ..] = number.to_le_bytes();
        WorkerNumber::new(u32::from_le_bytes([low, middle, high, 0]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_numbers_come_round_without_zero() {
        assert_eq!(JobNumber::NONE.next(), JobNumber(1));
        assert_eq!(JobNumber(u32::MAX).next(), JobNumber(1));
    }

    #[test]
    fn the_protocol_document_numbers_the_states_as_the_code_does() {
        let document = include_str!("../../../docs/PROTOCOL.md");
        let states =
            [(OPEN, "Open"), (CLAIMED, "Claimed"), (DONE, "Done"), (FAILED, "Failed"), (TAKEN, "Taken")];
        for (code, name) in states {
            assert!(document.contains(&format!("\n| {code} | `{name}` | ")), "{name}");
        }
    }

    #[test]
    fn a_word_says_what_was_put_into_it_and_nothing_else_is_a_word() {
        let worker = WorkerNumber::new(0x00ab_cdef).unwrap();
        for state in [
            SlicePhase::Open,
            SlicePhase::Claimed(worker),
            SlicePhase::Done(worker),
            SlicePhase::Failed(worker),
            SlicePhase::Taken,
        ] {
            let word = SliceWord { job: JobNumber(0xfeed_beef), state };
            assert_eq!(SliceWord::decode(word.encode()), Some(word));
        }
        for wrong in [0, 6, 0xff, 1 << 8 | 1, 2, 3, 4, 1 << 8 | 5, u64::MAX] {
            assert_eq!(SliceWord::decode(wrong), None, "{wrong:#x}");
        }
    }
}

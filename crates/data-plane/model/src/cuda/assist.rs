//! Who sums, for a GPU that goes on by itself, the ranks of an adapter that it does not hold (CaraServe §4.2).

use std::fmt::Debug;

use kernels::cuda::{CudaError, HostMapping, Pinned, board::Signal};

use crate::deltas::assist::AssistJob;

/// How whoever sums heads learns that a job's rows are there (CaraServe §4.2; CHECKLIST C-07).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invocation {
    /// One kernel writes the rows into the slab and says so, in the order of the stream: the host takes no part in it.
    Fused,
    /// The host waits for the stream, copies the rows and says so itself: what the fused way is compared with.
    Native,
}

/// Whoever sums heads for a device that goes on by itself.
///
/// Jobs have numbers, each one more than the one before, going round after `u32::MAX`: a word has *reached* a number if
/// it is not behind it (`word - number`, wrapping, is not negative). For each job, in the order of one stream:
///
/// 1. The rows are written to the beginning of the slab; then, fenced at system scope, the job's number to `asked`.
/// 2. Whoever assists sees that, has the heads summed, writes the sums, and then the number to `answered`.
/// 3. The stream waits until `answered` has reached the number, and reads the sums.
///
/// So the rows of a job are overwritten, and its sums asked for anew, only after the stream has passed its third step.
pub trait DeviceAssist: Debug + Send {
    /// A pass begins that may ask for something.
    fn begin_pass(&mut self);

    /// It has ended: what it posted and did not ask for is not asked for any more. The stream has come to its end by
    /// now, unless the pass failed.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unanswered`] if any job of the pass was not computed, or the stream gave a wait for one up: what it
    /// computed is worth nothing.
    fn end_pass(&mut self) -> Result<(), CudaError>;

    /// Takes on a job, and says its number.
    ///
    /// # Panics
    ///
    /// If its rows do not fit the slab or its sums not [`sums`](Self::sums): whoever posts cuts it by rows first. A
    /// group of any block's layers fits for all rows of a pass, and at least one row of the model's head.
    fn post(&mut self, job: AssistJob) -> u32;

    /// Where the rows go, f32.
    fn slab(&self) -> &HostMapping;

    /// The number of the job whose rows are in the slab; the device writes it (or, natively, the host).
    fn asked(&self) -> &Signal;

    /// The number of the job whose sums are there; whoever assists writes it.
    fn answered(&self) -> &Signal;

    /// The sums of the job that was answered last.
    fn sums(&self) -> &Pinned<f32>;

    /// How the device is to ask.
    fn invocation(&self) -> Invocation;
}

//! Partial sums from the CPU for a GPU that continues asynchronously (CaraServe §4.2).

use std::fmt::Debug;

use kernels::cuda::{CudaError, HostMapping, Pinned, board::Signal};

use crate::deltas::assist::AssistJob;

/// Way in which workers learn that a job's rows are in the slab (CaraServe §4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invocation {
    /// One kernel writes the rows to the slab and signals them, in stream order, without the host.
    Fused,
    /// The host waits for the stream, copies the rows and signals them: the baseline of the fused way.
    Native,
}

/// Computes partial sums for a device that continues asynchronously.
///
/// Job numbers increase by one and wrap after `u32::MAX`. A word has *reached* a number if `word - number`,
/// wrapping, is not negative. Each job takes three steps, in the order of one stream:
///
/// 1. The device writes the rows to the beginning of the slab, then, fenced at system scope, the job's number
///    to `asked`.
/// 2. The assisting thread sees the number, gets the partial sums computed, writes the sums, then the number
///    to `answered`.
/// 3. The stream waits until `answered` has reached the number, and reads the sums.
///
/// So rows are overwritten, and new sums requested, only after the stream has passed the third step.
pub trait DeviceAssist: Debug + Send {
    /// Announces a pass that may post jobs.
    fn begin_pass(&mut self);

    /// Announces the end of the pass and cancels unasked jobs. A successful pass has finished the stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unanswered`] if a job of the pass was not computed, or the stream gave up waiting for
    /// one. The results of the pass are then invalid.
    fn end_pass(&mut self) -> Result<(), CudaError>;

    /// Accepts a job and returns its number.
    ///
    /// # Panics
    ///
    /// If the rows do not fit the slab or the sums do not fit [`sums`](Self::sums): the caller splits jobs by
    /// rows. A block's group fits for all rows of a pass, and the model's head for at least one row.
    fn post(&mut self, job: AssistJob) -> u32;

    /// Returns the slab for the rows, f32.
    fn slab(&self) -> &HostMapping;

    /// Returns the word with the number of the job in the slab, written by the device (natively by the host).
    fn asked(&self) -> &Signal;

    /// Returns the word with the number of the last answered job, written by the assisting thread.
    fn answered(&self) -> &Signal;

    /// Returns the sums of the last answered job.
    fn sums(&self) -> &Pinned<f32>;

    /// Returns the way in which the device signals a job.
    fn invocation(&self) -> Invocation;
}

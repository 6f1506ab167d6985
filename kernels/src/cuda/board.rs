//! The device's side of the board: sends rows to workers on the CPU and adds the sums that they return
//! (CaraServe §4.2). The kernels are in `board.cu`.
//!
//! A pass sends rows with [`copy_and_signal`], continues, waits with [`await_value`] and adds the sums with
//! [`add_sums`]. All of these calls only enqueue, so the host never waits. [`copy_native`] is the baseline of
//! common frameworks, for comparison: it copies, waits, and lets the host signal.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{
    Cuda, CudaError, CudaStream, DeviceVec, HostMapping, Matrix, Pinned,
    error::check,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};

/// Threads per block: `THREADS` of `board.cu`.
const THREADS: u32 = 256;

/// Maximum number of blocks: enough to saturate the bus, yet leaving multiprocessors to other kernels.
const MAX_BLOCKS: usize = 64;

/// Index of the signal's value, and of the word that reports an abandoned wait.
const VALUE: usize = 0;
const FAULT: usize = 1;

/// True if a word that holds `value` has reached `number`, with wraparound.
#[must_use]
pub fn has_reached(value: u32, number: u32) -> bool {
    value.wrapping_sub(number).cast_signed() >= 0
}

/// A word that counts upwards and wraps, by which device and host notify each other. At most one copy that
/// ends in this signal is in flight, because one stream orders the copies.
#[derive(Debug)]
pub struct Signal {
    words: Pinned<u32>,
    /// Number of blocks of the current copy that have finished; 0 between copies.
    ticket: DeviceVec<u32>,
}

impl Signal {
    /// Creates a signal with value 0.
    ///
    /// # Errors
    /// Fails if the device is lost or the host cannot lock memory.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        let stream = CudaStream::new(cuda)?;
        let ticket = DeviceVec::zeroed(&stream, 1)?;
        stream.synchronize()?;
        Ok(Self { words: Pinned::new(cuda, 2)?, ticket })
    }

    /// Returns the signal's value. All writes before the store of that value, by device or host, are visible.
    #[must_use]
    pub fn load(&self) -> u32 {
        self.words.load(VALUE)
    }

    /// Stores `value` for the device; the caller has first written the data that the device will read.
    pub fn store(&self, value: u32) {
        self.words.store(VALUE, value);
    }

    /// Checks and clears the flag of abandoned waits, at the end of a pass after waiting for the stream.
    ///
    /// # Errors
    /// [`CudaError::Unanswered`] if a wait was abandoned: all later results of the pass are invalid.
    pub fn take_fault(&self) -> Result<(), CudaError> {
        if self.words.load(FAULT) == 0 {
            return Ok(());
        }
        self.words.store(FAULT, 0);
        Err(CudaError::Unanswered)
    }
}

/// Spans of rows of x to copy. Uploaded once for all layers of a pass.
#[derive(Debug)]
pub struct RowSpans {
    rows: DeviceVec<u32>,
    count: usize,
    /// One past the last row of all spans.
    end: usize,
}

impl RowSpans {
    /// Creates an empty list of spans.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Ok(Self { rows: DeviceVec::new(cuda, 0)?, count: 0, end: 0 })
    }

    /// Replaces the spans, each a first row and a number of rows, in the order of `stream`.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn upload(&mut self, stream: &CudaStream, spans: &[(usize, usize)]) -> Result<(), CudaError> {
        let rows: Vec<u32> =
            spans.iter().flat_map(|&(first, rows)| count(first)..count(first + rows)).collect();
        if rows.len() > self.rows.len() {
            self.rows = DeviceVec::new(stream.cuda(), rows.len().max(2 * self.rows.len()))?;
        }
        self.count = rows.len();
        self.end = spans.iter().filter(|span| span.1 > 0).map(|span| span.0 + span.1).max().unwrap_or(0);
        stream.upload(&rows, &mut self.rows, 0)
    }

    /// Returns the total number of rows of all spans.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.count
    }
}

/// Writes the rows of `spans` in sequence as f32 to words `at..` of `to`, then `value` to `signal`. One
/// launch does both: a reader that sees the value also sees the rows.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the rows do not exist, or if `to` is too small or not registered.
pub fn copy_and_signal(
    stream: &CudaStream,
    x: &Matrix,
    spans: &RowSpans,
    to: &HostMapping,
    at: usize,
    signal: &Signal,
    value: u32,
) -> Result<(), CudaError> {
    assert!(at + spans.count * x.width() <= to.len(), "the rows have room on the board");
    let end = [Arg::Ptr(signal.words.address_of(VALUE)), Arg::U32(value), Arg::Ptr(signal.ticket.address())];
    // SAFETY: `to` has room for the rows, as checked.
    unsafe { copy(stream, x, spans, to.address_of(at), end) }
}

/// # Safety
/// The device reaches `to`, which is 4-byte aligned and holds the rows as f32. `end` is signal, value and
/// ticket.
unsafe fn copy(
    stream: &CudaStream,
    x: &Matrix,
    spans: &RowSpans,
    to: u64,
    end: [Arg; 3],
) -> Result<(), CudaError> {
    assert!(spans.end <= x.rows(), "the rows exist");
    let width = x.width();
    let wide = width.is_multiple_of(4) && to.is_multiple_of(16);
    let arguments = [
        Arg::Ptr(x.address()),
        Arg::Ptr(spans.rows.address()),
        Arg::U32(count(spans.count)),
        Arg::U32(count(width)),
        Arg::Ptr(to),
        Arg::U32(u32::from(wide)),
        end[0],
        end[1],
        end[2],
    ];
    let shape = blocks(spans.count * width, wide);
    // SAFETY: 1. The kernel is declared with these arguments. 2. Rows were checked; the caller guarantees `to`.
    unsafe { launch(stream, by_kind!("copy_and_signal", x.kind()), shape, &arguments) }
}

/// Method by which a stream waits for a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitMethod {
    /// The stream waits for a word in memory, without a timeout: the host must ensure that the signal comes.
    StreamMemory,
    /// A kernel polls the word. After `limit_us` it gives up, which [`Signal::take_fault`] reports; later
    /// waits for the same signal then return at once.
    Kernel {
        /// Timeout of the wait, in microseconds.
        limit_us: u32,
    },
}

/// Enqueues a wait on `stream` until `signal` has reached `value`.
///
/// # Errors
/// Fails if the device is lost or does not support this kind of wait.
pub fn await_value(
    stream: &CudaStream,
    signal: &Signal,
    value: u32,
    how: WaitMethod,
) -> Result<(), CudaError> {
    let word = signal.words.address_of(VALUE);
    match how {
        WaitMethod::StreamMemory => {
            stream.cuda().bind()?;
            let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
            // SAFETY: the word is locked memory that the device reaches; the signal's drop waits for the device.
            let result = unsafe { sys::cuStreamWaitValue32_v2(stream.raw(), word, value, flags) };
            check("wait for a word in memory", result)
        }
        WaitMethod::Kernel { limit_us } => {
            let fault = signal.words.address_of(FAULT);
            let arguments = [Arg::Ptr(word), Arg::U32(value), Arg::Ptr(fault), Arg::U32(limit_us)];
            // SAFETY: the kernel is declared with these arguments; both words are locked memory that the device
            // reaches.
            unsafe { launch(stream, "await_signal", LaunchShape::line(1, 1), &arguments) }
        }
    }
}

/// Position of sums, and the part of an output that they are added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumsTarget {
    /// Index of the first sum; the sums are `[rows, width]`.
    pub at: usize,
    /// Number of rows of sums.
    pub rows: usize,
    /// Number of sums per row.
    pub width: usize,
    /// Output row of the first row of sums.
    pub first_row: usize,
    /// Output column of the first sum of a row.
    pub column: usize,
}

/// Computes `out[first_row.., column..] += sums` from host memory, after an [`await_value`] for the sums.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the sums or their target in `out` do not exist.
pub fn add_sums(
    stream: &CudaStream,
    sums: &Pinned<f32>,
    place: SumsTarget,
    out: &mut Matrix,
) -> Result<(), CudaError> {
    let SumsTarget { at, rows, width, first_row, column } = place;
    assert!(first_row + rows <= out.rows() && column + width <= out.width(), "the outputs exist");
    if rows == 0 {
        return Ok(());
    }
    assert!(at + rows * width <= sums.len(), "the sums exist");
    let from = sums.address_of(at);
    let to = out.address_of_row(first_row) + (column * out.kind().bytes()) as u64;
    let fours = [width, column, out.width()].into_iter().all(|count| count.is_multiple_of(4));
    let wide = fours && from.is_multiple_of(16);
    let arguments = [
        Arg::Ptr(from),
        Arg::U32(count(rows)),
        Arg::U32(count(width)),
        Arg::Ptr(to),
        Arg::U32(count(out.width())),
        Arg::U32(u32::from(wide)),
    ];
    // SAFETY: 1. The kernel is declared with these arguments. 2. Sums and outputs were checked. 3. Other threads may
    // write sums at any time: any bit pattern is a valid float. 4. The output is borrowed exclusively.
    unsafe { launch(stream, by_kind!("add_sums", out.kind()), blocks(rows * width, wide), &arguments) }
}

/// Returns a launch with enough blocks for `numbers` elements, from 1 to [`MAX_BLOCKS`].
fn blocks(numbers: usize, wide: bool) -> LaunchShape {
    let each = THREADS as usize * if wide { 4 } else { 1 };
    LaunchShape::line(numbers.div_ceil(each).clamp(1, MAX_BLOCKS), THREADS)
}

/// Device buffer in which [`copy_native`] gathers rows.
#[derive(Debug)]
pub struct NativeCopy(DeviceVec<f32>);

impl NativeCopy {
    /// Allocates a buffer of `numbers` elements.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn new(cuda: &Arc<Cuda>, numbers: usize) -> Result<Self, CudaError> {
        Ok(Self(DeviceVec::new(cuda, numbers)?))
    }

    /// Grows the buffer to at least `numbers` elements.
    ///
    /// # Errors
    /// Fails if the device has no free memory.
    pub fn reserve(&mut self, stream: &CudaStream, numbers: usize) -> Result<(), CudaError> {
        if self.0.len() < numbers {
            self.0 = DeviceVec::new(stream.cuda(), numbers.max(2 * self.0.len()))?;
        }
        Ok(())
    }
}

/// Copies and signals like [`copy_and_signal`], without a custom operator: a copy, a wait for it, a signal by
/// the host. Later work is enqueued only after the copy. `to` need not be registered.
///
/// # Errors
/// Fails if the device is lost.
///
/// # Panics
/// Panics if the rows do not exist, or if `to` or `room` is too small.
#[allow(clippy::too_many_arguments, reason = "those of copy_and_signal, and the room it works in")]
pub fn copy_native(
    stream: &CudaStream,
    x: &Matrix,
    spans: &RowSpans,
    room: &mut NativeCopy,
    to: &HostMapping,
    at: usize,
    signal: &Signal,
    value: u32,
) -> Result<(), CudaError> {
    let numbers = spans.count * x.width();
    assert!(at + numbers <= to.len(), "the rows have room on the board");
    assert!(numbers <= room.0.len(), "the rows have room on the device");
    if numbers > 0 {
        // SAFETY: `room` is large enough. Without a signal the kernel reads neither value nor ticket.
        unsafe { copy(stream, x, spans, room.0.address(), [Arg::Ptr(0), Arg::U32(0), Arg::Ptr(0)])? };
        let bytes = numbers * size_of::<f32>();
        // SAFETY: both ranges exist; the host's range is atomics, which any thread may change, and `synchronize` waits
        // below.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.host_address_of(at), room.0.address(), bytes, stream.raw())
        };
        check("copy rows to the host", result)?;
    }
    stream.synchronize()?;
    signal.store(value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::has_reached;

    #[test]
    fn numbers_go_round() {
        for number in [0, 1, 7, u32::MAX - 1, u32::MAX] {
            assert!(has_reached(number, number));
            assert!(has_reached(number.wrapping_add(1), number));
            assert!(!has_reached(number, number.wrapping_add(1)));
            assert!(has_reached(number.wrapping_add(1 << 30), number));
        }
    }
}

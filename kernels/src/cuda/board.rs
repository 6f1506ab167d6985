//! The device's end of the board: rows for workers on the CPU, and the sums that they answer with (CaraServe §4.2). See
//! `board.cu`.
//!
//! A pass asks with [`copy_and_signal`], goes on, waits with [`await_value`] and adds the answer with [`add_sums`]: four
//! things that are enqueued, and none that the host waits for. [`copy_native`] is what frameworks do instead, for
//! comparison: it copies, waits, and lets the host signal.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{
    Cuda, CudaError, CudaStream, DeviceVec, HostMapping, Matrix, Pinned,
    error::check,
    launch::{Arg, LaunchShape, by_kind, count, launch},
};

/// Threads of a block: `THREADS` of `board.cu`.
const THREADS: u32 = 256;

/// Most blocks: as many keep the bus busy, and leave multiprocessors to others.
const MAX_BLOCKS: usize = 64;

/// The signal's own word, and the word that says that a wait was given up.
const VALUE: usize = 0;
const FAULT: usize = 1;

/// True if a word that holds `value` has reached `number`; numbers go round.
#[must_use]
pub fn has_reached(value: u32, number: u32) -> bool {
    value.wrapping_sub(number).cast_signed() >= 0
}

/// A word that counts upwards, and wraps: what device and host tell each other. One copy that ends in it is under way at
/// a time, which one stream sees to.
#[derive(Debug)]
pub struct Signal {
    words: Pinned<u32>,
    /// How many blocks of the copy under way have written; 0 between copies.
    ticket: DeviceVec<u32>,
}

impl Signal {
    /// A signal at 0.
    ///
    /// # Errors
    ///
    /// The device is lost, or the host has no memory that may be locked.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        let stream = CudaStream::new(cuda)?;
        let ticket = DeviceVec::zeroed(&stream, 1)?;
        stream.synchronize()?;
        Ok(Self { words: Pinned::new(cuda, 2)?, ticket })
    }

    /// What it has come to. What was written before is seen: by the device if it stored the number, by the host if that did.
    #[must_use]
    pub fn load(&self) -> u32 {
        self.words.load(VALUE)
    }

    /// Sets it, for the device to see: after whatever the device is to read then.
    pub fn store(&self, value: u32) {
        self.words.store(VALUE, value);
    }

    /// Whether a wait was given up since this was last asked. For the end of a pass, when the stream was waited for.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unanswered`] if one was: what was computed behind it is worth nothing.
    pub fn take_fault(&self) -> Result<(), CudaError> {
        if self.words.load(FAULT) == 0 {
            return Ok(());
        }
        self.words.store(FAULT, 0);
        Err(CudaError::Unanswered)
    }
}

/// Rows of x that others are to have: spans of them, one after another. Uploaded once for all layers of a pass.
#[derive(Debug)]
pub struct RowSpans {
    rows: DeviceVec<u32>,
    count: usize,
    /// Behind the last row.
    end: usize,
}

impl RowSpans {
    /// No rows.
    ///
    /// # Errors
    ///
    /// The device is lost.
    pub fn new(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        Ok(Self { rows: DeviceVec::new(cuda, 0)?, count: 0, end: 0 })
    }

    /// Replaces the spans, each a first row and a number of rows, in the order of `stream`.
    ///
    /// # Errors
    ///
    /// The device has no room.
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

    /// How many rows there are in all.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.count
    }
}

/// Writes the rows of `spans`, one after another as f32, to words `at..` of `to`, and then, when all of them are there,
/// `value` to `signal`. One launch: whoever sees the value sees the rows.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the rows do not exist, or `to` has no room or is not registered.
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
///
/// `to` is memory the device reaches, 4-byte aligned, with room for the rows as f32. `end` is the kernel's signal, value and
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. Rows were checked; the caller vouches for `to`.
    unsafe { launch(stream, by_kind!("copy_and_signal", x.kind()), shape, &arguments) }
}

/// How a stream waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitMethod {
    /// The stream's own wait for a word in memory. It has no limit: the host must see to it that the signal comes.
    StreamMemory,
    /// A kernel that looks at the word. It gives up after `limit_us`, which [`Signal::take_fault`] reports; waits for the same
    /// signal behind it do not begin then.
    Kernel {
        /// Microseconds.
        limit_us: u32,
    },
}

/// Has `stream` wait, from here on, until `signal` has come to `value`.
///
/// # Errors
///
/// The device is lost, or has no such wait.
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
            // SAFETY: the kernel is declared with these arguments; both words are locked memory that the device reaches.
            unsafe { launch(stream, "await_signal", LaunchShape::line(1, 1), &arguments) }
        }
    }
}

/// Sums, and the part of an output they belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumsTarget {
    /// Where they begin, `[rows, width]`.
    pub at: usize,
    /// Rows.
    pub rows: usize,
    /// Numbers of a row.
    pub width: usize,
    /// Row of the output for the first row.
    pub first_row: usize,
    /// Column of the output for the first number of a row.
    pub column: usize,
}

/// `out[first_row.., column..] += sums`, read from where they are: after an [`await_value`] that says they are there.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the sums or their place in `out` do not exist.
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
    // SAFETY: 1. The kernel is declared with these arguments. 2. Sums and outputs were checked. 3. Sums may be written by
    // others at any time: they are read as plain numbers. 4. What is written is borrowed exclusively.
    unsafe { launch(stream, by_kind!("add_sums", out.kind()), blocks(rows * width, wide), &arguments) }
}

/// As many blocks as `numbers` need, one at least.
fn blocks(numbers: usize, wide: bool) -> LaunchShape {
    let each = THREADS as usize * if wide { 4 } else { 1 };
    LaunchShape::line(numbers.div_ceil(each).clamp(1, MAX_BLOCKS), THREADS)
}

/// What [`copy_native`] gathers rows in.
#[derive(Debug)]
pub struct NativeCopy(DeviceVec<f32>);

impl NativeCopy {
    /// Room for `numbers`.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn new(cuda: &Arc<Cuda>, numbers: usize) -> Result<Self, CudaError> {
        Ok(Self(DeviceVec::new(cuda, numbers)?))
    }

    /// Makes room for `numbers` at least.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn reserve(&mut self, stream: &CudaStream, numbers: usize) -> Result<(), CudaError> {
        if self.0.len() < numbers {
            self.0 = DeviceVec::new(stream.cuda(), numbers.max(2 * self.0.len()))?;
        }
        Ok(())
    }
}

/// As [`copy_and_signal`], the way that needs no operator of its own: a copy, a wait for it, a signal by the host. Nothing is
/// enqueued behind it before it is over. `to` need not be registered.
///
/// # Errors
///
/// The device is lost.
///
/// # Panics
///
/// If the rows do not exist, or `to` or `room` is too small.
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
        // SAFETY: the room is large enough. Without a signal the kernel reads neither value nor ticket.
        unsafe { copy(stream, x, spans, room.0.address(), [Arg::Ptr(0), Arg::U32(0), Arg::Ptr(0)])? };
        let bytes = numbers * size_of::<f32>();
        // SAFETY: both ranges exist; the host's is atomics, which anybody may change, and the copy is waited for below.
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

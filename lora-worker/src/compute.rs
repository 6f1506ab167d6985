//! The compute thread: serves one worker slot after another, slice by slice.
//!
//! During work the thread allocates nothing, takes no lock and makes no system call; tests check this.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::Duration,
};

use kernels::{
    Isa,
    lora::{LoraMatrix, sum_ranks},
};
use shmproto::board::{ClaimedSlice, Consumer, Geometry, Slice, WakeReason};

use crate::{
    assignment::Assignment, control::VisitError, library::MappedAdapters, thread_status::ThreadStatus,
};

/// Wait interval of a thread without a slot.
const TURN: Duration = Duration::from_secs(1);

/// Rows summed at a time: enough to read weights rarely, few enough to stop soon for an unwanted slice.
const STRIDE_ROWS: usize = 128;

/// Serves assignments until the process exits. Returns an error that rules out further assignments.
pub(crate) fn run(
    posts: &Receiver<Result<Assignment, VisitError>>,
    spin: Duration,
    signs: &ThreadStatus,
) -> Option<VisitError> {
    while !signs.leaving() {
        signs.beat();
        match posts.recv_timeout(TURN) {
            Ok(Ok(post)) => {
                serve_slices(post, spin, signs);
                failpoint::pass("worker.left");
            }
            Ok(Err(why)) => return Some(why),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Some(VisitError::Fault),
        }
    }
    None
}

fn serve_slices(post: Assignment, spin: Duration, signs: &ThreadStatus) {
    let Assignment { mut seat, handoff, connection, over } = post;
    let mut bench = SliceWorkspace::new(seat.geometry());
    let mut refused = 0;
    let ended = || signs.leaving() || over.load(Ordering::Relaxed);
    while !ended() {
        signs.beat();
        match seat.wait(spin) {
            WakeReason::Job => {
                // Adapters mapped before the job was posted are in the handoff by now.
                handoff.receive_newest(&mut bench.library);
                while !ended() && bench.serve(&mut seat) {}
            }
            WakeReason::Fenced => {
                tracing::warn!("the executor closed this worker's slot; requesting a new one");
                connection.shut_down();
                return;
            }
            WakeReason::Rest => {
                failpoint::pass("worker.parked");
                handoff.receive_newest(&mut bench.library);
                report_refused(&seat, &mut refused);
            }
        }
    }
}

/// Logs the refused slices, if their number has grown since the last report.
fn report_refused(seat: &Consumer, reported: &mut u64) {
    if let Some(refused) = seat.refused().filter(|refused| refused.slices != *reported) {
        tracing::error!(slices = refused.slices, last = %refused.last, "the executor posted invalid slices");
        *reported = refused.slices;
    }
}

/// Adapters, and buffers for the largest slice of the board.
///
/// The kernel backs the buffers with memory only where a slice touches them.
#[derive(Debug)]
struct SliceWorkspace {
    library: MappedAdapters,
    isa: Isa,
    x: Vec<f32>,
    sums: Vec<f32>,
}

impl SliceWorkspace {
    fn new(geometry: Geometry) -> Self {
        let zeros = |elements| vec![0.0; elements];
        let Geometry { x_elements, sums_elements, .. } = geometry;
        Self {
            library: MappedAdapters::default(),
            isa: Isa::vectors(),
            x: zeros(x_elements),
            sums: zeros(sums_elements),
        }
    }

    /// Computes one slice; returns false if there is none for this worker.
    fn serve(&mut self, seat: &mut Consumer) -> bool {
        let Self { library, isa, x, sums } = self;
        let Some(claim) = seat.claim(|image, module| library.matrix(image, module).is_some()) else {
            return false;
        };
        failpoint::pass("worker.after_claim");
        let slice = *claim.slice();
        match library.matrix(slice.image, slice.module).filter(|matrix| fits(matrix, &slice)) {
            Some(matrix) => {
                let (x, sums) = (&mut x[..slice.x_elements()], &mut sums[..slice.sums_elements as usize]);
                claim.read_x(x);
                compute(claim, matrix, *isa, x, sums);
            }
            None => claim.fail(),
        }
        true
    }
}

/// Whether the slice matches the shape and ranks of the matrix.
fn fits(matrix: &LoraMatrix, slice: &Slice) -> bool {
    let sums = (slice.rows as usize).checked_mul(matrix.rows());
    slice.width as usize == matrix.columns()
        && slice.last_rank as usize <= matrix.rank()
        && sums == Some(slice.sums_elements as usize)
}

/// Sums the ranks of a slice and publishes the sums. Gives the slice back if it is unwanted or fails.
fn compute(claim: ClaimedSlice<'_>, matrix: &LoraMatrix, isa: Isa, x: &[f32], sums: &mut [f32]) {
    let slice = *claim.slice();
    let ranks = slice.first_rank as usize..slice.last_rank as usize;
    let strides = x.chunks(STRIDE_ROWS * matrix.columns()).zip(sums.chunks_mut(STRIDE_ROWS * matrix.rows()));
    for (x, sums) in strides {
        // After a panic the sums are incomplete, and nothing reads them.
        let sum = AssertUnwindSafe(|| sum_ranks(isa, x, matrix, ranks.clone(), sums));
        if catch_unwind(sum).is_err() {
            tracing::error!(?slice, "the worker failed to compute a slice; the executor computes it");
            return claim.fail();
        }
        failpoint::pass("worker.mid_slice");
        if !claim.is_wanted() {
            return claim.fail();
        }
    }
    failpoint::pass("worker.before_done");
    claim.done(sums);
    failpoint::pass("worker.after_done");
}

#[cfg(test)]
mod tests {
    use assert_no_alloc::{assert_no_alloc, violation_count};
    use kernels::lora::{LoraPrecision, MatrixLayout};
    use shmproto::{
        board::{Board, SliceState},
        image::{Image, ImageEntry},
    };

    use super::*;
    use crate::library::MappedAdapter;

    const GEOMETRY: Geometry = Geometry { x_elements: 1 << 16, sums_elements: 1 << 16, slices: 16, seats: 1 };

    /// An adapter of one module with 40 ranks, 64 columns and 48 rows.
    fn image(precision: LoraPrecision) -> Image {
        let mut data = Vec::new();
        let (a, b) = (vec![0.5; 40 * 64], vec![0.25; 48 * 40]);
        let layout = MatrixLayout::append(&mut data, 40, 64, 48, 1.0, &a, &b, precision);
        let entry = ImageEntry {
            module: 0,
            rank: 40,
            columns: 64,
            rows: 48,
            scale: layout.scale,
            a_kind: layout.a.kind as u8,
            b_kind: layout.b.kind as u8,
            a_offset: layout.a.offset as u64,
            b_offset: layout.b.offset as u64,
        };
        Image::build(&[entry], &data).unwrap()
    }

    fn slice(image: u64) -> Slice {
        Slice {
            image,
            module: 0,
            first_row: 0,
            rows: 200,
            width: 64,
            first_rank: 0,
            last_rank: 40,
            x_offset: 0,
            sums_offset: 0,
            sums_elements: 200 * 48,
        }
    }

    /// A workspace with one adapter per precision, numbered from 1.
    fn bench() -> SliceWorkspace {
        let mut bench = SliceWorkspace::new(GEOMETRY);
        let precisions = [LoraPrecision::Exact, LoraPrecision::Compact, LoraPrecision::Bf16];
        for (number, precision) in (1..).zip(precisions) {
            bench.library.add(number, MappedAdapter::over(&image(precision)).unwrap()).unwrap();
        }
        bench
    }

    #[test]
    fn no_slice_takes_an_allocation_neither_done_nor_given_back() {
        let (board, mut producer) = Board::in_process(GEOMETRY).unwrap();
        let mut seat = board.seat().unwrap().join_in_process();
        let (mut bench, x) = (bench(), vec![1.0; 200 * 64]);
        let unknown = Slice { width: 63, rows: 1, sums_elements: 48, ..slice(1) };
        let ends = [(slice(1), true), (slice(2), true), (slice(3), true), (unknown, false)];
        for (slice, is_done) in ends {
            producer.announce(1);
            producer.post(&x, &[slice]).unwrap();
            let counted = violation_count();
            assert_no_alloc(|| {
                assert_eq!(seat.wait(Duration::from_micros(50)), WakeReason::Job);
                assert!(bench.serve(&mut seat));
                assert!(!bench.serve(&mut seat));
            });
            assert_eq!(violation_count(), counted);
            assert_eq!(matches!(producer.state(0), SliceState::Done(_)), is_done);
            producer.take_back(0);
        }
    }

    #[test]
    fn the_count_of_allocations_counts() {
        let counted = violation_count();
        assert_no_alloc(|| drop(std::hint::black_box(vec![0u8; 100])));
        assert!(violation_count() > counted);
    }

    #[test]
    fn a_slice_that_nobody_waits_for_any_more_is_given_up() {
        let (board, mut producer) = Board::in_process(GEOMETRY).unwrap();
        let mut seat = board.seat().unwrap().join_in_process();
        let bench = bench();
        producer.post(&vec![1.0; 200 * 64], &[slice(1)]).unwrap();
        let claim = seat.claim(|_, _| true).unwrap();
        producer.take_back(0);
        let mut sums = vec![f32::NAN; 200 * 48];
        compute(claim, bench.library.matrix(1, 0).unwrap(), bench.isa, &vec![1.0; 200 * 64], &mut sums);
        assert!(!sums[0].is_nan(), "it was begun");
        assert!(sums[STRIDE_ROWS * 48].is_nan(), "and not ended");
    }

    #[test]
    fn a_fault_in_a_slice_gives_it_back_and_is_not_the_end() {
        let (board, mut producer) = Board::in_process(GEOMETRY).unwrap();
        let mut seat = board.seat().unwrap().join_in_process();
        let (mut bench, x) = (bench(), vec![1.0; 200 * 64]);
        producer.post(&x, &[slice(1)]).unwrap();
        let claim = seat.claim(|_, _| true).unwrap();
        // The kernels panic on sums of another shape.
        let matrix = bench.library.matrix(1, 0).unwrap();
        compute(claim, matrix, bench.isa, &x, &mut [0.0; 7]);
        assert_eq!(producer.state(0), SliceState::Lost);
        producer.post(&x, &[slice(2)]).unwrap();
        assert!(bench.serve(&mut seat));
        assert!(matches!(producer.state(0), SliceState::Done(_)));
    }
}

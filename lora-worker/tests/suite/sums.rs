//! Sums that a worker computes.

use kernels::lora::LoraPrecision;
use rustix::process::Signal;
use shmproto::board::{Slice, SliceState};

use crate::{
    executor::{BoardExecutor, ModuleShape, SliceWork, adapter, bits, job},
    worker::{WorkerDirectory, until},
};

#[test]
fn sums_are_those_of_the_kernels_bit_for_bit_for_every_kind_of_number_and_many_modules() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let ranks = [1, 8, 16, 17, 64];
    let precisions = [LoraPrecision::Exact, LoraPrecision::Compact, LoraPrecision::Bf16];
    for (number, precision) in (1..).zip(precisions) {
        let shape = |(module, rank)| ModuleShape {
            precision,
            ..ModuleShape::new(module, rank, 96 + rank, 33 + rank)
        };
        let shapes: Vec<_> = (0..).zip(ranks).map(shape).collect();
        let image = adapter(number, &shapes);
        peer.offer(number.into(), &image).unwrap();
        let works: Vec<_> =
            shapes.iter().zip([1, 3, 16, 5, 130]).map(|(shape, rows)| SliceWork::of(shape, rows)).collect();
        let (x, slices) = job(number.into(), &works);
        executor.post(&x, &slices);
        for (index, work) in works.iter().enumerate() {
            let expected = work.expected(&image);
            assert_eq!(
                bits(&executor.read(index, expected.len())),
                bits(&expected),
                "{precision:?}, module {index}"
            );
        }
    }
}

#[test]
fn a_worker_sums_the_head_it_is_asked_for_and_no_more() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let shape = ModuleShape::new(3, 40, 64, 48);
    let image = adapter(1, &[shape]);
    peer.offer(1, &image).unwrap();
    let mut seen = Vec::new();
    for ranks in [1, 16, 32, 40] {
        let work = SliceWork::of(&shape, 4).with_ranks(ranks);
        let sums = executor.compute(1, &work);
        assert_eq!(bits(&sums), bits(&work.expected(&image)), "{ranks} ranks");
        seen.push(bits(&sums));
    }
    seen.dedup();
    assert_eq!(seen.len(), 4, "each rank counts");
}

#[test]
fn numbers_that_are_no_numbers_are_computed_like_others() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let shape = ModuleShape::new(0, 16, 32, 32);
    let image = adapter(1, &[shape]);
    peer.offer(1, &image).unwrap();
    let mut work = SliceWork::of(&shape, 2);
    work.x[5] = f32::NAN;
    work.x[40] = f32::INFINITY;
    let sums = executor.compute(1, &work);
    assert_eq!(bits(&sums), bits(&work.expected(&image)));
    assert!(sums.iter().any(|sum| sum.is_nan()));
}

#[test]
fn what_a_worker_does_not_have_it_does_not_claim() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let (known, unknown) = (ModuleShape::new(1, 8, 32, 32), ModuleShape::new(2, 8, 32, 32));
    let image = adapter(1, &[known]);
    peer.offer(1, &image).unwrap();
    let works = [SliceWork::of(&unknown, 1), SliceWork::of(&known, 1)];
    let (x, mut slices) = job(1, &works);
    slices.push(Slice { image: 9, sums_offset: 1024, ..slices[1] });
    executor.post(&x, &slices);
    assert_eq!(bits(&executor.read(1, 32)), bits(&works[1].expected(&image)));
    assert_eq!(executor.producer.state(0), SliceState::Open, "no such module");
    assert_eq!(executor.producer.state(2), SliceState::Open, "no such adapter");
    executor.take_back(0);
    executor.take_back(2);
}

#[test]
fn what_a_matrix_does_not_have_is_given_back_and_the_worker_goes_on() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let mut worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let shape = ModuleShape::new(0, 8, 32, 32);
    let image = adapter(1, &[shape]);
    peer.offer(1, &image).unwrap();
    let work = SliceWork::of(&shape, 2);
    let right = work.slice(1, 0, 0);
    let wrong = [
        Slice { width: 16, ..right },
        Slice { rows: 1, ..right },
        Slice { last_rank: 9, ..right },
        Slice { sums_elements: 66, ..right },
    ];
    for slice in wrong {
        executor.post(&work.x, &[slice]);
        until("it is given back", || executor.producer.state(0) == SliceState::Lost);
        executor.take_back(0);
        assert!(executor.board.is_admitted(peer.worker), "it is the executor that is wrong");
    }
    assert_eq!(bits(&executor.compute(1, &work)), bits(&work.expected(&image)));
    worker.signal(Signal::TERM);
    assert_eq!(worker.code(), Some(0));
}

#[test]
fn several_workers_share_a_job() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _workers = [place.start_undisturbed(&[]), place.start_undisturbed(&[]), place.start_undisturbed(&[])];
    let peers = [executor.seat(), executor.seat(), executor.seat()];
    let shape = ModuleShape::new(0, 64, 512, 512);
    let image = adapter(1, &[shape]);
    for peer in &peers {
        peer.offer(1, &image).unwrap();
    }
    let works: Vec<_> = (0..24).map(|_| SliceWork::of(&shape, 16)).collect();
    let expected = bits(&works[0].expected(&image));
    until("each has done something", || {
        let (x, slices) = job(1, &works);
        executor.post(&x, &slices);
        for index in 0..works.len() {
            assert_eq!(bits(&executor.read(index, 16 * 512)), expected);
        }
        executor.board.stats().seats.iter().filter(|seat| seat.slices > 0).count() == peers.len()
    });
}

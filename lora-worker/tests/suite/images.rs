//! Adapters as a worker receives them.

use std::os::fd::AsFd as _;

use shmproto::{board::SliceState, region::SealedBytes};

use crate::{
    executor::{BoardExecutor, ModuleShape, SliceWork, adapter, bits},
    worker::{WorkerDirectory, until},
};

const SHAPE: ModuleShape =
    ModuleShape { module: 4, rank: 8, columns: 64, rows: 32, precision: kernels::lora::LoraPrecision::Exact };

#[test]
fn an_adapter_that_is_withdrawn_is_forgotten_and_one_that_replaces_it_is_used() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let (first, second) = (adapter(1, &[SHAPE]), adapter(2, &[SHAPE]));
    peer.offer(1, &first).unwrap();
    peer.offer(2, &second).unwrap();
    let work = SliceWork::of(&SHAPE, 3);
    assert_eq!(bits(&executor.compute(1, &work)), bits(&work.expected(&first)));
    peer.withdraw(1);
    // Every image has a new number; messages are processed in order.
    let third = adapter(3, &[SHAPE]);
    peer.offer(3, &third).unwrap();
    executor.post(&work.x, &[work.slice(1, 0, 0), work.slice(3, 0, 128)]);
    assert_eq!(bits(&executor.read(1, 96)), bits(&work.expected(&third)));
    assert_eq!(executor.producer.state(0), SliceState::Open);
    executor.take_back(0);
    assert_eq!(bits(&executor.compute(2, &work)), bits(&work.expected(&second)));
}

#[test]
fn an_image_that_is_none_is_rejected_by_name_and_the_worker_goes_on() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let _worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let garbage = SealedBytes::build("garbage", &[&[0xA5; 4096]]).unwrap();
    let reason = peer.offer_fd(1, 4096, garbage.fd()).unwrap_err();
    assert!(reason.contains("image"), "{reason}");
    // An unsealed file: its bytes could change during use.
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let reason = peer.offer_fd(2, 4096, file.as_fd()).unwrap_err();
    assert!(reason.contains("seal"), "{reason}");
    // Larger than announced.
    let image = adapter(3, &[SHAPE]);
    let reason = peer.offer_fd(3, 64, image.fd()).unwrap_err();
    assert!(reason.contains("64"), "{reason}");
    peer.offer(3, &image).unwrap();
    let reason = peer.offer(3, &image).unwrap_err();
    assert_eq!(reason, "image 3 is mapped already; use each image number once");
    let work = SliceWork::of(&SHAPE, 1);
    assert_eq!(bits(&executor.compute(3, &work)), bits(&work.expected(&image)));
}

#[test]
fn two_hundred_adapters_leave_nothing_behind() {
    let place = WorkerDirectory::new();
    let mut executor = BoardExecutor::new(&place);
    let worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    let work = SliceWork::of(&SHAPE, 1);
    let mut pass = |number: u32| {
        let image = adapter(number, &[SHAPE]);
        peer.offer(number.into(), &image).unwrap();
        assert_eq!(bits(&executor.compute(number.into(), &work)), bits(&work.expected(&image)));
        peer.withdraw(number.into());
    };
    pass(1);
    let before = (worker.open_files(), worker.shared_maps());
    (2..=200).for_each(&mut pass);
    until("no more is open than before", || {
        worker.open_files() <= before.0 && worker.shared_maps() <= before.1
    });
    // The board's three regions, and no adapter.
    until("no adapter is mapped", || worker.shared_maps() == 3);
}

#[test]
fn adapters_that_were_never_used_are_given_back_too() {
    let place = WorkerDirectory::new();
    let executor = BoardExecutor::new(&place);
    let worker = place.start_undisturbed(&[]);
    let peer = executor.seat();
    peer.offer(1, &adapter(1, &[SHAPE])).unwrap();
    until("one is mapped", || worker.shared_maps() == 4);
    let before = worker.open_files();
    for number in 2..=100 {
        peer.offer(number, &adapter(2, &[SHAPE])).unwrap();
    }
    assert_eq!(worker.open_files(), before + 99);
    (1..=100).for_each(|number| peer.withdraw(number));
    until("no adapter is mapped", || (worker.shared_maps(), worker.open_files()) == (3, before - 1));
}

//! This test has a process of its own, since it counts the process's open files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, os::fd::OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use shmproto::{
    fd_passing::{AdapterOffered, Connection, ExecutorEnd, SlotGranted, ToWorker, WorkerEnd},
    image::{Image, ImageEntry},
    region::{Access, PeerAccess, Region},
};

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:").count()
}

/// A connection, a seat with its three regions, an adapter, and in half of the rounds a worker that leaves
/// without reading.
fn handover(round: u32) {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs): (OwnedFd, OwnedFd) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let (executor, worker): (ExecutorEnd, WorkerEnd) = (Connection::over(ours), Connection::over(theirs));
    let region = || Region::create("test-leaks", 64, PeerAccess::ReadWrite).unwrap();
    let regions = [region(), region(), region()];
    let seated = SlotGranted { seat: 0, worker: round, control_bytes: 64, x_bytes: 64, sums_bytes: 64 };
    executor.send(&ToWorker::Seated(seated), &regions.each_ref().map(Region::fd)).unwrap();
    let entry =
        ImageEntry { rank: 1, columns: 1, rows: 1, scale: 1.0, b_offset: 64, ..ImageEntry::default() };
    let image = Image::build(&[entry], &[0; 68]).unwrap();
    let offered =
        AdapterOffered { image: u64::from(round), bytes: image.bytes().as_ref().as_ref().len() as u64 };
    executor.send(&ToWorker::AdapterOffered(offered), &[image.fd()]).unwrap();
    if round.is_multiple_of(2) {
        return;
    }
    let (_, fds) = worker.receive().unwrap().unwrap();
    let mapped: Vec<Region> =
        fds.into_iter().map(|fd| Region::map(fd, 64..=64, Access::ReadWrite).unwrap()).collect();
    let (_, mut fds) = worker.receive().unwrap().unwrap();
    let image = Image::map(fds.remove(0), 1 << 20).unwrap();
    assert_eq!((mapped.len(), image.entries().len()), (3, 1));
}

#[test]
fn a_thousand_handovers_leave_no_descriptor_and_no_mapping_behind() {
    handover(1);
    let before = (open_descriptors(), mappings());
    for round in 0..1_000 {
        handover(round);
    }
    assert_eq!((open_descriptors(), mappings()), before);
    assert_eq!(mappings(), 0);
}

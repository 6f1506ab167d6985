//! Shared memory keeps its size, its seals and its pages, against any action of the peer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::FileExt as _,
    },
    process::Command,
    sync::atomic::Ordering,
    time::Duration,
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, OFlags, SealFlags},
    io::Errno,
    mm::{MapFlags, ProtFlags},
};
use shmproto::region::{Access, MAX_BYTES, PeerAccess, Region, RegionError, SealedBytes};

fn copy(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().unwrap()
}

/// A memfd as from an honest peer, except for the test's changes.
fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    if bytes > 0 {
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes).unwrap();
    }
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn fixed() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

fn unchanging() -> SealFlags {
    fixed() | SealFlags::WRITE
}

/// Tries to map the descriptor for writing and returns the kernel's error.
fn map_to_write(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let allowed = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the address, and the mapping is never accessed.
    unsafe { rustix::mm::mmap(std::ptr::null_mut(), 64, allowed, MapFlags::SHARED, fd, 0) }.map(drop)
}

#[test]
fn what_one_side_writes_the_other_reads() {
    let ours = Region::create("test-both", 256, PeerAccess::ReadWrite).unwrap();
    let theirs = Region::map(copy(ours.fd()), 256..=256, Access::ReadWrite).unwrap();
    assert!(ours.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    ours.words()[3].store(7, Ordering::Release);
    theirs.words()[63].store(9, Ordering::Release);
    assert_eq!(theirs.read_words()[3].acquire(), 7);
    assert_eq!(ours.read_words()[63].relaxed(), 9);
    assert_eq!((ours.words().len(), theirs.bytes()), (64, 256));
}

#[test]
fn a_region_has_whole_lines_and_at_least_the_bytes_asked_for() {
    for (asked, got) in [(1, 64), (64, 64), (65, 128), (4096, 4096), (4097, 4160)] {
        let region = Region::create("test-lines", asked, PeerAccess::ReadWrite).unwrap();
        assert_eq!((region.bytes(), region.words().len()), (got, got / 4));
        region.words()[got / 4 - 1].store(1, Ordering::Relaxed);
    }
}

#[test]
fn no_bytes_and_too_many_are_refused_before_anything_is_taken() {
    for bytes in [0, MAX_BYTES + 1, usize::MAX] {
        let refused = Region::create("test-size", bytes, PeerAccess::ReadOnly);
        assert!(matches!(refused, Err(RegionError::Size { .. })), "{bytes}");
    }
    assert!(matches!(SealedBytes::build("test-size", &[]), Err(RegionError::Size { bytes: 0 })));
    assert!(matches!(SealedBytes::build("test-size", &[b"", b""]), Err(RegionError::Size { bytes: 0 })));
}

#[test]
fn a_name_says_nothing_but_what_the_region_is() {
    for name in ["", "a b", "tenant/adapter", "é", "a\0b", &"x".repeat(65)] {
        let refused = Region::create(name, 64, PeerAccess::ReadOnly);
        assert!(matches!(refused, Err(RegionError::Name(_))), "{name:?}");
    }
}

#[test]
fn nobody_can_cut_lengthen_or_unseal_a_region() {
    for peers in [PeerAccess::ReadOnly, PeerAccess::ReadWrite] {
        let region = Region::create("test-sealed", 8192, peers).unwrap();
        let peer = copy(region.fd());
        assert_eq!(rustix::fs::ftruncate(&peer, 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&peer, 16384), Err(Errno::PERM));
        assert_eq!(rustix::fs::fcntl_add_seals(&peer, SealFlags::WRITE), Err(Errno::PERM));
        assert_eq!(rustix::fs::fstat(&peer).unwrap().st_size, 8192);
    }
}

#[test]
fn a_peer_that_may_read_can_by_no_means_write() {
    let region = Region::create("test-read-only", 4096, PeerAccess::ReadOnly).unwrap();
    let peer = copy(region.fd());
    let refused = Region::map(copy(region.fd()), 64..=4096, Access::ReadWrite);
    assert!(matches!(refused, Err(RegionError::WriteSealed)), "{refused:?}");
    assert_eq!(map_to_write(peer.as_fd()), Err(Errno::PERM));
    assert_eq!(rustix::io::pwrite(&peer, b"x", 0), Err(Errno::PERM));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(&peer, hole, 0, 4096), Err(Errno::PERM));
    // Opening it again does not help either.
    let anew = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&peer));
    let anew = rustix::fs::open(anew, OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
    assert_eq!(map_to_write(anew.as_fd()), Err(Errno::PERM));

    let reading = Region::map(peer, 4096..=4096, Access::ReadOnly).unwrap();
    region.words()[5].store(11, Ordering::Release);
    assert_eq!(reading.read_words()[5].acquire(), 11, "its maker still writes");
}

#[test]
#[should_panic(expected = "a region mapped to be read is written")]
fn words_to_write_of_a_region_that_is_read_are_a_fault_of_the_program() {
    let region = Region::create("test-misuse", 64, PeerAccess::ReadWrite).unwrap();
    let reading = Region::map(copy(region.fd()), 64..=64, Access::ReadOnly).unwrap();
    let _ = reading.words();
}

#[test]
fn its_maker_can_give_up_writing() {
    let region = Region::create("test-given-up", 64, PeerAccess::ReadWrite).unwrap();
    let peer = Region::map(copy(region.fd()), 64..=64, Access::ReadWrite).unwrap();
    let region = region.into_read_only().unwrap();
    peer.words()[0].store(3, Ordering::Release);
    assert_eq!(region.read_words()[0].acquire(), 3);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let rights: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains("memfd:test-given-up"))
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    assert!(rights.contains(&"r--s") && rights.contains(&"rw-s") && rights.len() == 2, "{rights:?}");
}

#[test]
fn memory_that_could_still_change_is_not_mapped() {
    for lacking in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
        let refused = Region::map(memfd(64, fixed() - lacking), 64..=64, Access::ReadOnly);
        assert!(matches!(refused, Err(RegionError::Unsealed(_))), "{refused:?}");
    }
    for lacking in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL, SealFlags::WRITE] {
        let refused = SealedBytes::map(memfd(64, unchanging() - lacking), 64);
        let Err(RegionError::Unsealed(names)) = refused else { panic!("{refused:?}") };
        let name = lacking.iter_names().next().unwrap().0;
        assert_eq!(names, name, "the seal that lacks is named");
    }
}

#[test]
fn a_peer_that_keeps_a_way_to_write_cannot_call_its_memory_unchanging() {
    let bytes = memfd(64, fixed() | SealFlags::FUTURE_WRITE);
    assert!(matches!(SealedBytes::map(bytes, 64), Err(RegionError::Unsealed(_))));
}

#[test]
fn what_is_no_memory_of_the_kind_is_refused() {
    let (pipe, _end) = io::pipe().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = File::create_new(directory.path().join("file")).unwrap();
    file.write_all_at(&[0; 64], 0).unwrap();
    let null = File::open("/dev/null").unwrap();
    for fd in [OwnedFd::from(pipe), file.into(), null.into()] {
        let refused = Region::map(copy(fd.as_fd()), 1..=64, Access::ReadOnly);
        assert!(matches!(refused, Err(RegionError::NotMemory(_) | RegionError::Unsealed(_))), "{refused:?}");
        let refused = SealedBytes::map(fd, 64);
        assert!(matches!(refused, Err(RegionError::NotMemory(_) | RegionError::Unsealed(_))), "{refused:?}");
    }
}

#[test]
fn another_size_than_was_agreed_is_refused() {
    for (bytes, agreed) in [(128, 64..=64), (64, 128..=256), (65, 1..=4096), (0, 0..=64)] {
        let refused = Region::map(memfd(bytes, fixed()), agreed, Access::ReadOnly);
        assert!(matches!(refused, Err(RegionError::PeerSize { .. })), "{bytes}: {refused:?}");
    }
    let refused = SealedBytes::map(memfd(65, unchanging()), 64);
    assert!(matches!(refused, Err(RegionError::PeerSize { bytes: 65, least: 1, most: 64 })), "{refused:?}");
    assert!(matches!(SealedBytes::map(memfd(0, unchanging()), 64), Err(RegionError::PeerSize { .. })));
}

#[test]
fn memory_whose_pages_are_not_there_is_refused() {
    let holes = |seals| {
        let fd = rustix::fs::memfd_create("holes", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 30).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let refused = Region::map(holes(fixed()), 1..=1 << 30, Access::ReadOnly);
    assert!(matches!(refused, Err(RegionError::Holes)), "{refused:?}");
    assert!(matches!(SealedBytes::map(holes(unchanging()), 1 << 30), Err(RegionError::Holes)));
}

#[test]
fn sealed_bytes_are_what_was_put_in_on_both_sides_and_nobody_changes_them() {
    let ours = SealedBytes::build("test-bytes", &[b"one", b"", b" and two"]).unwrap();
    let theirs = SealedBytes::map(copy(ours.fd()), 64).unwrap();
    assert_eq!((ours.as_ref(), theirs.as_ref()), (&b"one and two"[..], &b"one and two"[..]));
    let peer = copy(ours.fd());
    assert_eq!(map_to_write(peer.as_fd()), Err(Errno::PERM));
    assert_eq!(rustix::io::pwrite(&peer, b"x", 0), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&peer, 1), Err(Errno::PERM));
    assert_eq!(rustix::fs::fcntl_get_seals(&peer).unwrap() & unchanging(), unchanging());
    drop(ours);
    assert_eq!(theirs.as_ref(), b"one and two", "they outlive their maker");
}

#[test]
fn descriptors_are_not_inherited_and_what_is_shared_cannot_be_executed() {
    let region = Region::create("test-flags", 64, PeerAccess::ReadWrite).unwrap();
    let bytes = SealedBytes::build("test-flags", &[b"x"]).unwrap();
    for fd in [region.fd(), bytes.fd()] {
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        let mode = rustix::fs::fstat(fd).unwrap().st_mode;
        assert_eq!(mode & 0o111, 0, "the kernel of this machine knows MFD_NOEXEC_SEAL");
    }
}

#[test]
fn what_is_dropped_is_unmapped() {
    let mapped = || fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:test-dropped").count();
    let region = Region::create("test-dropped", 4096, PeerAccess::ReadWrite).unwrap();
    let bytes = SealedBytes::build("test-dropped", &[&[1; 5000]]).unwrap();
    assert_eq!(mapped(), 2);
    drop(region);
    assert_eq!(mapped(), 1);
    drop(bytes);
    assert_eq!(mapped(), 0);
}

#[test]
fn memory_that_was_lent_is_given_back_although_a_peer_keeps_the_descriptor() {
    let blocks = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_blocks;
    // The last page is incomplete.
    let bytes = (1 << 16) + 64;
    let region = Region::create("test-lent", bytes, PeerAccess::ReadWrite).unwrap().emptied_when_dropped();
    let (kept, mapped) =
        (region.fd().try_clone_to_owned().unwrap(), region.fd().try_clone_to_owned().unwrap());
    let theirs = Region::map(mapped, bytes..=bytes, Access::ReadWrite).unwrap();
    theirs.words()[0].store(7, Ordering::Relaxed);
    assert!(blocks(&kept) > 0);
    drop(region);
    assert_eq!(blocks(&kept), 0);
    assert_eq!(theirs.read_words()[0].relaxed(), 0, "who still has it mapped is not killed by that");
}

/// Variable of the process with a file size limit.
const LIMITED: &str = "SHMPROTO_TEST_LIMITED";

/// A file size limit keeps the kernel from giving memory: filling the machine would disturb other processes.
#[test]
fn memory_that_is_not_there_is_an_error_of_the_maker_and_no_fault_of_a_reader() {
    if std::env::var_os(LIMITED).is_some() {
        let no_room = |error| matches!(error, RegionError::NoRoom { bytes: 1_048_576, .. });
        assert!(no_room(Region::create("test-room", 1 << 20, PeerAccess::ReadWrite).unwrap_err()));
        assert!(no_room(SealedBytes::build("test-room", &[&[1; 1 << 20]]).unwrap_err()));
        return;
    }
    let mut child = Command::new("sh")
        .args(["-c", r#"trap "" XFSZ; ulimit -f 64; exec "$0" "$@""#])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "memory_that_is_not_there_is_an_error_of_the_maker_and_no_fault_of_a_reader"])
        .env(LIMITED, "1")
        .spawn()
        .unwrap();
    assert!(wait(&mut child).unwrap().success());
}

fn wait(child: &mut std::process::Child) -> io::Result<std::process::ExitStatus> {
    for _ in 0..600 {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    child.kill()?;
    child.wait()
}
